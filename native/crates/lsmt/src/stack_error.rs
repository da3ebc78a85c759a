//! Why an operation on a stack failed.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::format::MAX_LAYERS;
use crate::layer::LayerError;
use crate::merge::MAX_MERGED_ENTRIES;
use crate::upper::UpperError;
use crate::writer::WriteError;

/// Why a stack operation failed.
#[derive(Debug, Error)]
pub enum StackError {
    /// A lower could not be opened.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The upper failed.
    #[error(transparent)]
    Upper(#[from] UpperError),
    /// An output layer could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A lower or a source could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A layer sealed without `sync` could not be made durable later.
    #[error("cannot flush a sealed layer: {source}")]
    SyncLayer {
        /// The cause.
        source: io::Error,
    },
    /// A write to a stack without an upper.
    #[error("the stack has no upper and is read-only")]
    ReadOnly,
    /// A write past the end of the disk.
    #[error(
        "range {offset_bytes}+{length_bytes} ends past the disk of {virtual_size_bytes} bytes"
    )]
    OutOfRange {
        /// Start of the range.
        offset_bytes: u64,
        /// Length of the range.
        length_bytes: u64,
        /// Size of the disk.
        virtual_size_bytes: u64,
    },
    /// The stack is too deep.
    #[error("{count} layers exceed the limit of {MAX_LAYERS}; commit some of them into one first")]
    TooManyLayers {
        /// Layers asked for.
        count: usize,
    },
    /// The merged index is too big.
    #[error("the merged index of {entries} entries exceeds the limit of {MAX_MERGED_ENTRIES}; commit the layers into one first")]
    TooManyEntries {
        /// Entries of all layers.
        entries: usize,
    },
    /// Neither the layers nor the caller say how large the disk is.
    #[error("the virtual size is unknown: give virtual_size_bytes")]
    NoSize,
    /// A size that would cut content off or is no multiple of 512.
    #[error("virtual size {wanted_bytes} must be a multiple of 512 and at least {least_bytes}")]
    BadSize {
        /// Size asked for.
        wanted_bytes: u64,
        /// Size of the content.
        least_bytes: u64,
    },
    /// An upper made for a disk of another size.
    #[error("the upper was made for a disk of {upper_bytes} bytes, not {wanted_bytes}")]
    UpperSize {
        /// Size in the upper's header.
        upper_bytes: u64,
        /// Size asked for.
        wanted_bytes: u64,
    },
    /// The layers to replace are not one run of the stack's sealed layers.
    #[error("the layers to replace are not in the stack, one after the other")]
    NoSuchRun,
    /// A replacement that does not stand for as large a disk.
    #[error("the replacement stands for a disk of {replacement_bytes} bytes, the layers for {layers_bytes}")]
    ReplacementSize {
        /// Size after the replacement.
        replacement_bytes: u64,
        /// Size before.
        layers_bytes: u64,
    },
    /// A replacement that cannot be made durable.
    #[error("cannot make {path} durable")]
    SyncReplacement {
        /// The layer file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The fresh upper of a seal holds data already.
    #[error("the fresh upper {path} is not empty; give a new pair of files")]
    FreshUpperUsed {
        /// Its data file.
        path: PathBuf,
    },
}
