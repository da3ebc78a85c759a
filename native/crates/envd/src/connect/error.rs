//! Connect error codes and their HTTP status (contract section 3.3).

use std::fmt;
use std::io;

use hyper::StatusCode;

/// Error class of an RPC. Callers test the code, never the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// The request itself is wrong.
    InvalidArgument,
    /// The deadline of the request passed.
    DeadlineExceeded,
    /// The named thing does not exist.
    NotFound,
    /// The thing to be made exists.
    AlreadyExists,
    /// The user may not do this.
    PermissionDenied,
    /// A limit was reached.
    ResourceExhausted,
    /// The state does not allow this now.
    FailedPrecondition,
    /// Unknown method or feature.
    Unimplemented,
    /// A fault of the guest or of this program.
    Internal,
    /// No such user.
    Unauthenticated,
}

impl Code {
    /// Name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Code::InvalidArgument => "invalid_argument",
            Code::DeadlineExceeded => "deadline_exceeded",
            Code::NotFound => "not_found",
            Code::AlreadyExists => "already_exists",
            Code::PermissionDenied => "permission_denied",
            Code::ResourceExhausted => "resource_exhausted",
            Code::FailedPrecondition => "failed_precondition",
            Code::Unimplemented => "unimplemented",
            Code::Internal => "internal",
            Code::Unauthenticated => "unauthenticated",
        }
    }

    /// HTTP status of a unary answer.
    pub fn status(self) -> StatusCode {
        match self {
            Code::InvalidArgument | Code::FailedPrecondition => StatusCode::BAD_REQUEST,
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::AlreadyExists => StatusCode::CONFLICT,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        }
    }
}

/// An RPC failure: class and text for a person.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}: {message}", .code.name())]
pub struct ConnectError {
    /// Class.
    pub code: Code,
    /// Cause, and the next step where one is known.
    pub message: String,
}

impl ConnectError {
    /// Builds an error from anything printable.
    pub fn new(code: Code, message: impl fmt::Display) -> Self {
        Self {
            code,
            message: message.to_string(),
        }
    }

    /// Classifies a failed system call on `what`.
    pub fn from_io(what: impl fmt::Display, error: &io::Error) -> Self {
        let code = match error.raw_os_error() {
            Some(libc::ENOENT) => Code::NotFound,
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => Code::PermissionDenied,
            Some(libc::EEXIST) => Code::AlreadyExists,
            Some(
                libc::ENOTDIR | libc::EISDIR | libc::ENAMETOOLONG | libc::EINVAL | libc::ELOOP,
            ) => Code::InvalidArgument,
            Some(libc::ENOTEMPTY | libc::EBUSY | libc::EXDEV) => Code::FailedPrecondition,
            Some(
                libc::ENOSPC
                | libc::EDQUOT
                | libc::EMFILE
                | libc::ENFILE
                | libc::ENOMEM
                | libc::EAGAIN,
            ) => Code::ResourceExhausted,
            _ => Code::Internal,
        };
        Self::new(code, format_args!("{what}: {}", cause(error)))
    }
}

/// Text of a system error without Rust's "(os error N)".
pub fn cause(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_lowercase(),
        None => text,
    }
}
