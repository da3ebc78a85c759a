//! An ext4 file system inside a stack of layers, changed without a mount.
//!
//! [`Tree`] is the edge: paths in, a new sealed layer out. Below it, [`Volume`]
//! owns the bitmaps and counters, and [`Disk`] the blocks that have changed.
//!
//! Invariants: what comes out depends only on what was there and on the calls
//! made, never on time, chance or the machine; the file system is clean after
//! every layer; nothing is written anywhere but into the new layer. A file
//! system with features this module does not know is refused.

mod bytes;
mod content;
mod directory;
mod disk;
mod extents;
mod hash;
mod inode;
mod tree;
mod volume;
mod xattrs;

use std::io;

use lsmt::{StackError, WriteError};
use thiserror::Error;

pub use content::Content;
pub use disk::Disk;
pub use inode::{Kind, Meta};
pub use tree::Tree;
pub use volume::Volume;

/// Bytes of a block: the only size supported.
pub const BLOCK_BYTES: usize = 4096;

/// Why the file system could not be changed.
#[derive(Debug, Error)]
pub enum Ext4Error {
    /// A lower layer could not be opened or read.
    #[error(transparent)]
    Lower(#[from] StackError),
    /// The new layer could not be written.
    #[error(transparent)]
    Output(#[from] WriteError),
    /// The file that holds changed blocks meanwhile failed.
    #[error("cannot keep changed blocks: {0}")]
    Staging(#[from] io::Error),
    /// The file system below is damaged, or is none.
    #[error("the file system below is damaged: {0}")]
    Damaged(String),
    /// The file system below was made in a way this program does not know.
    #[error("the file system below cannot be built upon: {0}")]
    Foreign(String),
    /// No free block is left.
    #[error("the content does not fit on a disk of {disk_mb} MiB")]
    NoBlocks {
        /// Size of the disk.
        disk_mb: u64,
    },
    /// No free inode is left.
    #[error("the content has more files than a disk of {disk_mb} MiB can hold")]
    NoInodes {
        /// Size of the disk.
        disk_mb: u64,
    },
    /// Something the tree cannot hold.
    #[error("{path}: {problem}")]
    Entry {
        /// Where.
        path: String,
        /// What is wrong.
        problem: String,
    },
}

/// A problem with the entry at `path`.
pub(crate) fn entry_error(path: &[u8], problem: impl Into<String>) -> Ext4Error {
    Ext4Error::Entry {
        path: String::from_utf8_lossy(path).into_owned(),
        problem: problem.into(),
    }
}
