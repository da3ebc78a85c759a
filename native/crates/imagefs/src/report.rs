//! What the program answers: figures of a layer, or the class of a failure and its text.

use std::error::Error;
use std::{io, iter};

use lsmt::StackError;
use serde::Serialize;
use tarstream::TarError;

use crate::apply::{excess_of, ApplyError};
use crate::ext4::Ext4Error;
use crate::source::Excess;

/// A layer that was written.
#[derive(Serialize)]
pub struct Report {
    /// Checksum of the decompressed archive.
    pub diff_id: String,
    /// Checksum of what came in.
    pub input_digest: String,
    /// Its size.
    pub input_bytes: u64,
    /// Size of the decompressed archive.
    pub archive_bytes: u64,
    /// Its members.
    pub entries: u64,
    /// Size of the layer file.
    pub size_bytes: u64,
    /// Bytes of data in it.
    pub stored_bytes: u64,
}

/// A raw image that became a layer.
#[derive(Serialize)]
pub struct Imported {
    /// Size of the layer file.
    pub size_bytes: u64,
}

/// A failure. Callers decide by `code`.
#[derive(Debug, Serialize)]
pub struct Failure {
    /// `bad_layer`, `limit`, `disk_too_small`, `storage_full`, `corrupt` or `internal`.
    pub code: &'static str,
    /// The cause.
    pub message: String,
}

impl Failure {
    /// The archive is another one than the image's configuration says.
    pub fn wrong_digest(found: &str) -> Failure {
        Failure {
            code: "corrupt",
            message: format!(
                "the layer's content has the checksum {found}, the image states another"
            ),
        }
    }

    /// A failed read of the archive, or a failed file operation.
    pub fn from_io(error: io::Error) -> Failure {
        if let Some(excess) = excess_of(&error) {
            return excess.into();
        }
        let code = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "storage_full",
            io::ErrorKind::InvalidData
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::Other => "bad_layer",
            _ => "internal",
        };
        Failure {
            code,
            message: error.to_string(),
        }
    }
}

impl From<Excess> for Failure {
    fn from(excess: Excess) -> Failure {
        Failure {
            code: "limit",
            message: excess.to_string(),
        }
    }
}

impl From<ApplyError> for Failure {
    fn from(error: ApplyError) -> Failure {
        let message = error.to_string();
        match error {
            ApplyError::Tar(TarError::Io(inner)) => Failure::from_io(inner),
            ApplyError::Tar(_) | ApplyError::Entry { .. } => Failure {
                code: "bad_layer",
                message,
            },
            ApplyError::Ext4(inner) => inner.into(),
            ApplyError::Excess(excess) => excess.into(),
        }
    }
}

impl From<Ext4Error> for Failure {
    fn from(error: Ext4Error) -> Failure {
        let message = error.to_string();
        let code = match error {
            _ if is_storage_full(&error) => "storage_full",
            Ext4Error::Entry { .. } => "bad_layer",
            Ext4Error::NoBlocks { .. } | Ext4Error::NoInodes { .. } => "disk_too_small",
            Ext4Error::Damaged(_) => "corrupt",
            Ext4Error::Lower(StackError::Layer(_)) => "corrupt",
            _ => "internal",
        };
        Failure { code, message }
    }
}

/// Whether a full disk, or a quota, is what `error` comes from.
fn is_storage_full(error: &(dyn Error + 'static)) -> bool {
    let causes = iter::successors(Some(error), |error| (*error).source());
    let mut kinds = causes.filter_map(|error| Some(error.downcast_ref::<io::Error>()?.kind()));
    kinds.any(|kind| {
        matches!(
            kind,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        )
    })
}
