//! A layer's file mapped, for answers that the kernel copies from its page cache.
//! The only module with `unsafe`.
//!
//! Invariant: this process never touches the mapped bytes, it only names them to
//! system calls. Those fail with `EFAULT` where the file has become shorter; a touch
//! would be a signal.
#![allow(unsafe_code, reason = "mapping a file is unsafe by its kind")]

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{Advice, Mmap, UncheckedAdvice};
use nix::sys::statfs::{fstatfs, OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC};

/// Bytes handed out before the mapped pages are given back: they count as memory of
/// this process, although they are the page cache's.
const KEPT_BYTES: u64 = 64 << 20;

/// A whole file, mapped read-only.
pub struct Mapping {
    map: Mmap,
    handed_out_bytes: AtomicU64,
}

impl Mapping {
    /// Maps all of a file. Fails for one whose holes a mapped read would fill.
    pub fn of(file: &File) -> io::Result<Mapping> {
        if filled_by_reading(file)? {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // SAFETY: layers are immutable, and their bytes are not touched here even if
        // someone breaks that rule (see the invariant above).
        let map = unsafe { Mmap::map(file) }?;
        map.advise(Advice::Sequential)?; // what is not in the page cache is read ahead of
        Ok(Mapping {
            map,
            handed_out_bytes: AtomicU64::new(0),
        })
    }

    /// A part of the file, to name to a system call and nothing else. `None` when the
    /// file was shorter than that when it was mapped.
    pub fn part(&self, offset: u64, length_bytes: u64) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(length_bytes).ok()?)?;
        let part = self.map.get(start..end)?;
        let before = self
            .handed_out_bytes
            .fetch_add(length_bytes, Ordering::Relaxed);
        if before / KEPT_BYTES != (before + length_bytes) / KEPT_BYTES {
            // SAFETY: pages of a shared file mapping that are dropped come back from
            // the page cache with the same bytes. Best effort.
            let _ = unsafe { self.map.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
        Some(part)
    }
}

/// A file system in memory takes a page for each hole that is read through a mapping,
/// and fails the read when it is full. A plain read takes none.
fn filled_by_reading(file: &File) -> io::Result<bool> {
    const BLOCK_BYTES: u64 = 512; // of `st_blocks`, everywhere
    let in_memory = [TMPFS_MAGIC, OVERLAYFS_SUPER_MAGIC]; // the latter may stand on the former
    let about = file.metadata()?;
    Ok(about.blocks() * BLOCK_BYTES < about.len()
        && in_memory.contains(&fstatfs(file)?.filesystem_type()))
}
