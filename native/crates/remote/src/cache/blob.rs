//! The cached blocks of one blob.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use nix::fcntl::{fallocate, FallocateFlags};
use parking_lot::Mutex;

use super::map::{self, Subject};
use super::Counters;

/// The cached blocks of one blob.
pub struct CachedBlob {
    subject: Subject,
    data: File,
    map: File,
    entries: Vec<AtomicU64>,
    was_read: Vec<AtomicBool>,
    kept: AtomicU64,
    /// Held while a block's bytes and its entry change together.
    change: Mutex<()>,
    counters: Arc<Counters>,
}

impl CachedBlob {
    pub(super) fn open(
        stem: &Path,
        subject: Subject,
        counters: Arc<Counters>,
    ) -> io::Result<CachedBlob> {
        let open = |extension: &str| {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false);
            options.open(stem.with_extension(extension))
        };
        let (data, map) = (open("data")?, open("map")?);
        let entries = match map::load(&map, &subject)? {
            Some(entries) => entries,
            None => {
                map::create(&map, &subject)?;
                data.set_len(0)?;
                vec![0; subject.blocks() as usize]
            }
        };
        let kept = entries.iter().filter(|entry| **entry != 0).count() as u64;
        counters.used_blocks.fetch_add(kept, Ordering::Relaxed);
        Ok(CachedBlob {
            was_read: entries.iter().map(|_| AtomicBool::new(false)).collect(),
            entries: entries.into_iter().map(AtomicU64::new).collect(),
            kept: AtomicU64::new(kept),
            change: Mutex::new(()),
            subject,
            data,
            map,
            counters,
        })
    }

    /// What it is of.
    pub(super) fn subject(&self) -> &Subject {
        &self.subject
    }

    /// Whether no block is there.
    pub(super) fn is_empty(&self) -> bool {
        self.kept.load(Ordering::Relaxed) == 0
    }

    /// Bytes of a block.
    pub fn length_of(&self, block: u64) -> usize {
        self.subject.length_of(block)
    }

    /// Whether a block seems to be there.
    pub fn contains(&self, block: u64) -> bool {
        self.entries[block as usize].load(Ordering::Acquire) != 0
    }

    /// Reads a whole block. False when it is not there, or not as it was stored.
    pub fn get(&self, block: u64, content: &mut [u8]) -> bool {
        let entry = self.entries[block as usize].load(Ordering::Acquire);
        if entry == 0 {
            return false;
        }
        let offset = block * u64::from(self.subject.block_bytes);
        let is_read = self.data.read_exact_at(content, offset).is_ok();
        if is_read && self.subject.entry(block, content) == entry {
            self.was_read[block as usize].store(true, Ordering::Relaxed);
            return true;
        }
        // Evicted meanwhile, or damaged.
        if self.remove(block, Some(entry)) {
            self.counters.damaged.fetch_add(1, Ordering::Relaxed);
        }
        false
    }

    pub(super) fn put(&self, block: u64, content: &[u8]) -> io::Result<()> {
        let _alone = self.change.lock();
        if self.contains(block) {
            return Ok(());
        }
        let offset = block * u64::from(self.subject.block_bytes);
        let entry = self.subject.entry(block, content);
        let written = self
            .data
            .write_all_at(content, offset)
            .and_then(|()| map::store(&self.map, block, entry));
        if written.is_err() {
            self.punch(block);
            return written;
        }
        self.entries[block as usize].store(entry, Ordering::Release);
        self.kept.fetch_add(1, Ordering::Relaxed);
        self.counters.used_blocks.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Takes a block out that was not read since the last call for it.
    pub(super) fn evict(&self, block: u64) -> bool {
        if !self.contains(block) || self.was_read[block as usize].swap(false, Ordering::Relaxed) {
            return false;
        }
        let is_gone = self.remove(block, None);
        if is_gone {
            self.counters.evicted.fetch_add(1, Ordering::Relaxed);
        }
        is_gone
    }

    /// Drops a block that proved wrong. Whether it was there.
    pub fn distrust(&self, block: u64) -> bool {
        let is_gone = self.remove(block, None);
        if is_gone {
            self.counters.damaged.fetch_add(1, Ordering::Relaxed);
        }
        is_gone
    }

    pub(super) fn clear(&self) {
        for block in 0..self.subject.blocks() {
            self.remove(block, None);
        }
    }

    /// Takes a block out, if it is there and still the one of `expected`.
    fn remove(&self, block: u64, expected: Option<u64>) -> bool {
        let _alone = self.change.lock();
        let entry = self.entries[block as usize].load(Ordering::Acquire);
        if entry == 0 || expected.is_some_and(|expected| expected != entry) {
            return false;
        }
        self.entries[block as usize].store(0, Ordering::Release);
        // The checksum stands in for an entry that could not be cleared.
        let _ = map::store(&self.map, block, 0);
        self.punch(block);
        self.kept.fetch_sub(1, Ordering::Relaxed);
        self.counters.used_blocks.fetch_sub(1, Ordering::Relaxed);
        true
    }

    fn punch(&self, block: u64) {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let block_bytes = i64::from(self.subject.block_bytes);
        if let Err(errno) = fallocate(&self.data, flags, block as i64 * block_bytes, block_bytes) {
            tracing::warn!(%errno, "the file system frees no parts of files; the block cache may grow beyond its limit");
        }
    }
}
