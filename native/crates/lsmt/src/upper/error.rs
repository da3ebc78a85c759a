//! Why an upper could not be opened or used.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::format::{FormatError, MAX_LAYER_ENTRIES};

/// Why an upper could not be opened or used.
#[derive(Debug, Error)]
pub enum UpperError {
    /// The operating system refused.
    #[error("upper {path}: cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The bytes are not an append upper.
    #[error("upper {path}: {source}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: FormatError,
    },
    /// The data and index files have different identities.
    #[error("upper files {data} and {index} do not belong together: their uuids differ")]
    Mismatch {
        /// The data file.
        data: PathBuf,
        /// The index file.
        index: PathBuf,
    },
    /// The file is a sealed layer already.
    #[error("upper {path} is a sealed layer; open it as a lower and give a fresh upper")]
    Sealed {
        /// The file.
        path: PathBuf,
    },
    /// Only one of the two files exists, and it holds data.
    #[error("upper file {missing} is missing while {present} holds data; restore the missing file or remove both")]
    Incomplete {
        /// The file that does not exist.
        missing: PathBuf,
        /// The file that does.
        present: PathBuf,
    },
    /// Another process, or another stack, holds the upper.
    #[error("upper {path} is in use by another stack or process")]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// A sparse upper lies where its disk does, so its size must be known.
    #[error("sparse upper {path} needs a virtual size, and a possible one")]
    NoSize {
        /// The file.
        path: PathBuf,
    },
    /// The extents do not fit in one sealed layer.
    #[error("upper {path} has {extents} extents, a sealed layer holds at most {MAX_LAYER_ENTRIES}; commit it instead")]
    TooManyExtents {
        /// The file.
        path: PathBuf,
        /// Extents in the map.
        extents: usize,
    },
    /// An earlier `fdatasync` failed; what reached the disk is unknown.
    #[error("upper {path} failed to reach the disk earlier and accepts no more flushes; reopen it to continue from the last good flush")]
    Poisoned {
        /// The file.
        path: PathBuf,
    },
}

impl UpperError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> UpperError {
        let path = path.to_owned();
        UpperError::Io {
            action,
            path,
            source,
        }
    }

    pub(crate) fn format(path: &Path, source: FormatError) -> UpperError {
        let path = path.to_owned();
        UpperError::Format { path, source }
    }
}
