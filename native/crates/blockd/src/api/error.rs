//! The one error shape of the socket and the table from causes to it.

use std::error::Error;
use std::io;

use axum::http::{header, StatusCode};
use axum::response::{IntoResponse, Response};
use lsmt::{BlobError, LayerError, StackError, UpperError, WriteError};
use remote::RemoteError;
use serde::Serialize;

use crate::config::ConfigError;

/// Stable names of causes; callers decide by these, never by the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The named stack or process does not exist.
    NotFound,
    /// The request itself is wrong.
    InvalidInput,
    /// The request contradicts what exists.
    Conflict,
    /// Somebody else uses it now.
    Busy,
    /// A file system is full; nothing was left behind.
    StorageFull,
    /// A file does not hold what it should.
    Corrupt,
    /// A registry refuses.
    Denied,
    /// A registry does not answer.
    Unavailable,
    /// The operating system failed.
    Io,
    /// A fault of the daemon.
    Internal,
}

impl Code {
    fn status(self) -> StatusCode {
        match self {
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::InvalidInput => StatusCode::BAD_REQUEST,
            Code::Conflict | Code::Busy => StatusCode::CONFLICT,
            Code::StorageFull => StatusCode::INSUFFICIENT_STORAGE,
            Code::Denied => StatusCode::FORBIDDEN,
            Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Code::Corrupt | Code::Io | Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// An error reply.
#[derive(Debug, Clone, Serialize)]
pub struct ApiError {
    code: Code,
    message: String,
    hint: String,
}

impl ApiError {
    /// An error with its cause and the next step.
    pub fn new(code: Code, message: impl Into<String>, hint: impl Into<String>) -> ApiError {
        ApiError {
            code,
            message: message.into(),
            hint: hint.into(),
        }
    }

    /// What went wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// A fault in the request.
    pub fn invalid(message: impl Into<String>, hint: impl Into<String>) -> ApiError {
        ApiError::new(Code::InvalidInput, message, hint)
    }

    /// No stack of that name.
    pub fn no_stack(id: &str) -> ApiError {
        let message = format!("no stack named {id:?} is open");
        ApiError::new(
            Code::NotFound,
            message,
            "GET /v1/stacks lists the open ones",
        )
    }

    /// An error of the operating system about `what`.
    pub fn io(what: &str, error: &io::Error) -> ApiError {
        let code = if is_storage_full(error) {
            Code::StorageFull
        } else {
            Code::Io
        };
        ApiError::new(code, format!("{what}: {error}"), hint_of(code))
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let fallback = r#"{"code":"internal","message":"cannot encode the error","hint":""}"#;
        let body = serde_json::to_string(&self).unwrap_or_else(|_| fallback.to_owned());
        let kind = [(header::CONTENT_TYPE, "application/json")];
        (self.code.status(), kind, body).into_response()
    }
}

impl From<StackError> for ApiError {
    fn from(error: StackError) -> ApiError {
        let code = code_of(&error);
        ApiError::new(code, error.to_string(), hint_of(code))
    }
}

impl From<LayerError> for ApiError {
    fn from(error: LayerError) -> ApiError {
        StackError::from(error).into()
    }
}

impl From<RemoteError> for ApiError {
    fn from(error: RemoteError) -> ApiError {
        let code = code_of_remote(&error);
        ApiError::new(code, error.to_string(), hint_of(code))
    }
}

impl From<ConfigError> for ApiError {
    fn from(error: ConfigError) -> ApiError {
        let code = match io_cause(&error) {
            Some(cause) if is_storage_full(cause) => Code::StorageFull,
            _ => Code::InvalidInput,
        };
        ApiError::new(code, error.to_string(), hint_of(code))
    }
}

fn hint_of(code: Code) -> &'static str {
    match code {
        Code::NotFound => "check the name",
        Code::InvalidInput => "correct the request and send it again",
        Code::Conflict => "compare with GET /v1/stacks",
        Code::Busy => "close the other user first, then try again",
        Code::StorageFull => "free some space, then try again; nothing was left behind",
        Code::Corrupt => "run `blockd fsck` on the named file",
        Code::Denied => "give credentials for this registry, or log in to it with docker",
        Code::Unavailable => "see that the registry can be reached, then try again",
        Code::Io => "see the message and the daemon's log",
        Code::Internal => "report this with the daemon's log",
    }
}

fn code_of_remote(error: &RemoteError) -> Code {
    match error {
        RemoteError::Denied { .. } => Code::Denied,
        RemoteError::Missing { .. } => Code::NotFound,
        RemoteError::Unavailable { .. } => Code::Unavailable,
        RemoteError::Wrong { .. } | RemoteError::Stub { .. } => Code::Corrupt,
    }
}

/// The code a failed stack operation gets.
pub fn code_of(error: &StackError) -> Code {
    if let Some(cause) = io_cause(error) {
        if let Some(remote) = RemoteError::of(cause) {
            return code_of_remote(remote);
        }
        return match cause.kind() {
            _ if is_storage_full(cause) => Code::StorageFull,
            io::ErrorKind::NotFound | io::ErrorKind::InvalidInput => Code::InvalidInput,
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => Code::Corrupt,
            _ => Code::Io,
        };
    }
    match error {
        StackError::Layer(LayerError::Format { .. }) => Code::Corrupt,
        StackError::Layer(LayerError::Open {
            source: BlobError::ZFile(_) | BlobError::Tar(_),
            ..
        }) => Code::Corrupt,
        StackError::Upper(upper) => match upper {
            UpperError::Busy { .. } => Code::Busy,
            UpperError::Sealed { .. } | UpperError::Incomplete { .. } => Code::Conflict,
            UpperError::Format { .. } | UpperError::Mismatch { .. } => Code::Corrupt,
            UpperError::TooManyExtents { .. } | UpperError::NoSize { .. } => Code::InvalidInput,
            UpperError::Io { .. } | UpperError::Poisoned { .. } => Code::Io,
        },
        StackError::Write(WriteError::TooManyEntries { .. })
        | StackError::ReadOnly
        | StackError::OutOfRange { .. }
        | StackError::TooManyLayers { .. }
        | StackError::TooManyEntries { .. }
        | StackError::NoSize
        | StackError::BadSize { .. } => Code::InvalidInput,
        StackError::UpperSize { .. }
        | StackError::FreshUpperUsed { .. }
        | StackError::NoSuchRun
        | StackError::ReplacementSize { .. } => Code::Conflict,
        StackError::Layer(_)
        | StackError::Write(_)
        | StackError::Read { .. }
        | StackError::SyncLayer { .. }
        | StackError::SyncReplacement { .. } => Code::Io,
    }
}

/// The operating system's error at the root of the chain, if there is one.
pub fn io_cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    let mut current = Some(error);
    while let Some(link) = current {
        if let Some(cause) = link.downcast_ref::<io::Error>() {
            return Some(cause);
        }
        current = link.source();
    }
    None
}

/// Whether a file system or a quota is full.
pub fn is_storage_full(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    code == Some(nix::libc::ENOSPC) || code == Some(nix::libc::EDQUOT)
}
