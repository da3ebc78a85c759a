//! overlaybd LSMT layers: read, write, stack and seal them.
//!
//! A *layer* maps ranges of a virtual disk to ranges of one file; a *stack* is
//! an ordered list of sealed layers with at most one writable *upper* on top.
//! Everything is counted in 512-byte sectors on disk and in bytes at the public
//! edge ([`Stack::read_at`], [`Stack::write_at`]).
//!
//! What this crate owns:
//! - the byte layout ([`format`]) and all checks of untrusted files;
//! - sealed layers ([`RoLayer`]) over any [`Blob`], plain, compressed ([`zfile`])
//!   or wrapped in a tar archive ([`tar_wrapper`]);
//! - the writable upper ([`Upper`]), as an append log or in place, and its crash
//!   rules;
//! - the one merged index of all lowers ([`MergedIndex`]);
//! - writing a sealed file in one pass ([`LayerWriter`], [`commit`]), wrapped as
//!   asked for ([`Encoding`]).
//!
//! Invariants: no input file makes the crate allocate more than a fixed bound;
//! a failed operation leaves no partial output and an unharmed stack; only one
//! process at a time holds an upper.
#![deny(unsafe_code)]

pub mod blob;
pub mod block_cache;
pub mod commit;
pub mod extents;
pub mod format;
pub mod layer;
pub mod lowers;
mod mapping;
pub mod merge;
pub mod recorder;
pub mod sink;
pub mod stack;
pub mod stack_error;
mod sys;
pub mod tar_wrapper;
pub mod upper;
pub mod writer;
pub mod zfile;

pub use blob::{Blob, BlobError, Elsewhere, FileBlob, Opener, Wrapping};
pub use commit::{commit, import_raw, CommitOptions};
pub use layer::{LayerError, RoLayer};
pub use lowers::Lowers;
pub use merge::MergedIndex;
pub use recorder::Recorder;
pub use sink::Encoding;
pub use stack::{InPlace, SealedUpper, Stack, StackSpec, UpperPaths};
pub use stack_error::StackError;
pub use upper::{Upper, UpperError, UpperLayout, UpperStats};
pub use writer::{LayerInfo, LayerOptions, LayerWriter, WriteError};
