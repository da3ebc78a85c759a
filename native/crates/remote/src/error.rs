//! Why bytes of a registry could not be had.

use std::io;

use thiserror::Error;

/// The causes, by what the caller can do about them.
#[derive(Debug, Clone, Error)]
pub enum RemoteError {
    /// The registry wants other credentials.
    #[error("{address}: the registry refuses: {reason}")]
    Denied {
        /// What was asked for.
        address: String,
        /// Its answer.
        reason: String,
    },
    /// The registry has no such blob.
    #[error("{address}: the registry no longer has it ({reason})")]
    Missing {
        /// What was asked for.
        address: String,
        /// Its answer.
        reason: String,
    },
    /// No good answer in time, after several tries.
    #[error("{address}: no good answer in {tries} tries: {reason}")]
    Unavailable {
        /// What was asked for.
        address: String,
        /// How often.
        tries: u32,
        /// What the last try met.
        reason: String,
    },
    /// The registry sent something else than was asked for.
    #[error("{address}: {reason}")]
    Wrong {
        /// What was asked for.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// The stub is not usable.
    #[error("remote layer {path}: {reason}")]
    Stub {
        /// The stub file.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

impl From<RemoteError> for io::Error {
    fn from(error: RemoteError) -> io::Error {
        let kind = match &error {
            RemoteError::Denied { .. } => io::ErrorKind::PermissionDenied,
            RemoteError::Missing { .. } => io::ErrorKind::NotFound,
            RemoteError::Unavailable { .. } => io::ErrorKind::TimedOut,
            RemoteError::Wrong { .. } | RemoteError::Stub { .. } => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, error)
    }
}

impl RemoteError {
    /// The error behind an I/O error, if it came from here.
    pub fn of(error: &io::Error) -> Option<&RemoteError> {
        error.get_ref()?.downcast_ref()
    }
}
