//! Blocks of remote blobs on this machine's disk, bounded together.
//!
//! ```text
//! <folder>/lock          held by the one process that uses the folder
//! <folder>/<hex>.data    one blob, each block at its place, holes where none is
//! <folder>/<hex>.map     which blocks are there (see `map`)
//! ```
//!
//! Invariants: a block is handed on only if its checksum is right, so eviction needs no
//! reader's consent and a crash at any point costs blocks, never right bytes; nothing is
//! synced; a full disk makes blocks pass through unkept, and one that is nearly full makes
//! new blocks take the place of old ones.

mod blob;
mod map;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use nix::fcntl::{Flock, FlockArg};
use parking_lot::{Mutex, RwLock};

pub use blob::CachedBlob;
use map::Subject;

/// Bytes of a block: what is checked, kept and evicted by itself.
pub const BLOCK_BYTES: u32 = 64 << 10;
/// Blocks kept between two looks at the disk's free space (4 MiB).
const LOOK_EVERY: u64 = 64;
/// Blocks looked at for one eviction, at most: two rounds of a large cache.
const MAX_LOOKS: u64 = 64 << 20;

/// What happened since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Bytes kept now.
    pub used_bytes: u64,
    /// Bytes kept at most.
    pub limit_bytes: u64,
    /// Blocks evicted.
    pub evicted_blocks: u64,
    /// Blocks whose content had changed on the disk.
    pub damaged_blocks: u64,
    /// Blocks that could not be kept, as the disk was full or failed.
    pub unkept_blocks: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub used_blocks: AtomicU64,
    pub evicted: AtomicU64,
    pub damaged: AtomicU64,
    pub unkept: AtomicU64,
}

/// The cache.
pub struct Cache {
    folder: PathBuf,
    limit_blocks: u64,
    reserve_bytes: u64,
    puts: AtomicU64,
    is_scarce: AtomicBool,
    counters: Arc<Counters>,
    blobs: RwLock<Vec<Arc<CachedBlob>>>,
    by_digest: Mutex<HashMap<[u8; 32], Arc<CachedBlob>>>,
    hand: Mutex<(usize, u64)>,
    is_full_told: AtomicBool,
    _lock: Option<Flock<File>>,
}

impl Cache {
    /// Takes a folder over with what an earlier process left in it. With a limit of 0
    /// nothing is kept. It grows only while the disk has more than `reserve_bytes` free.
    pub fn open(folder: &Path, limit_bytes: u64, reserve_bytes: u64) -> io::Result<Cache> {
        std::fs::create_dir_all(folder)?;
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(folder.join("lock"))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
            let text = format!(
                "another process uses the block cache in {}: {errno}",
                folder.display()
            );
            io::Error::new(io::ErrorKind::ResourceBusy, text)
        })?;
        let cache = Cache {
            folder: folder.to_owned(),
            limit_blocks: limit_bytes / u64::from(BLOCK_BYTES),
            reserve_bytes,
            puts: AtomicU64::new(0),
            is_scarce: AtomicBool::new(false),
            counters: Arc::default(),
            blobs: RwLock::default(),
            by_digest: Mutex::default(),
            hand: Mutex::default(),
            is_full_told: AtomicBool::new(false),
            _lock: Some(lock),
        };
        cache.take_over()?;
        while cache.counters.used_blocks.load(Ordering::Relaxed) > cache.limit_blocks
            && cache.evict()
        {}
        Ok(cache)
    }

    /// Figures for people.
    pub fn stats(&self) -> CacheStats {
        let bytes = |blocks: u64| blocks * u64::from(BLOCK_BYTES);
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CacheStats {
            used_bytes: bytes(read(&self.counters.used_blocks)),
            limit_bytes: bytes(self.limit_blocks),
            evicted_blocks: read(&self.counters.evicted),
            damaged_blocks: read(&self.counters.damaged),
            unkept_blocks: read(&self.counters.unkept),
        }
    }

    /// The cached part of a blob; one for all its readers.
    pub fn blob(&self, digest: [u8; 32], size_bytes: u64) -> io::Result<Arc<CachedBlob>> {
        let mut by_digest = self.by_digest.lock();
        let subject = Subject {
            digest,
            size_bytes,
            block_bytes: BLOCK_BYTES,
        };
        if let Some(found) = by_digest.get(&digest) {
            if *found.subject() == subject {
                return Ok(found.clone());
            }
            let text = format!(
                "the blob {} has {} bytes elsewhere, here {size_bytes}",
                hex(&digest),
                found.subject().size_bytes
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let blob = Arc::new(CachedBlob::open(
            &self.folder.join(hex(&digest)),
            subject,
            self.counters.clone(),
        )?);
        by_digest.insert(digest, blob.clone());
        self.blobs.write().push(blob.clone());
        Ok(blob)
    }

    /// Keeps a block, at the cost of others that nobody read lately.
    pub fn put(&self, blob: &CachedBlob, block: u64, content: &[u8]) {
        if self.limit_blocks == 0 {
            return;
        }
        if self.is_scarce() && !self.evict() {
            return;
        }
        while self.counters.used_blocks.load(Ordering::Relaxed) >= self.limit_blocks {
            if !self.evict() {
                return;
            }
        }
        if let Err(error) = blob.put(block, content) {
            self.counters.unkept.fetch_add(1, Ordering::Relaxed);
            if !self.is_full_told.swap(true, Ordering::Relaxed) {
                tracing::warn!(folder = %self.folder.display(), %error, "blocks cannot be cached; reads go on from the registry");
            }
        }
    }

    /// Takes blocks out, what nobody read lately first, until they make so many bytes;
    /// returns the bytes freed.
    pub fn shrink(&self, bytes: u64) -> u64 {
        let mut freed_bytes = 0;
        while freed_bytes < bytes && self.evict() {
            freed_bytes += u64::from(BLOCK_BYTES);
        }
        freed_bytes
    }

    /// Whether the disk has no room for the cache to grow. Looks now and then only.
    fn is_scarce(&self) -> bool {
        if self.puts.fetch_add(1, Ordering::Relaxed) % LOOK_EVERY == 0 {
            let free_bytes = nix::sys::statvfs::statvfs(&self.folder).map_or(u64::MAX, |found| {
                found
                    .blocks_available()
                    .saturating_mul(found.fragment_size())
            });
            let is_scarce = free_bytes < self.reserve_bytes;
            self.is_scarce.store(is_scarce, Ordering::Relaxed);
        }
        self.is_scarce.load(Ordering::Relaxed)
    }

    /// Forgets a blob's blocks: it is on this machine as a whole.
    pub fn forget(&self, blob: &CachedBlob) {
        blob.clear();
    }

    fn take_over(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let Some("map" | "data") = path.extension().and_then(|extension| extension.to_str())
            else {
                continue;
            };
            let map = path.with_extension("map");
            let subject = File::open(&map)
                .ok()
                .and_then(|file| map::subject_of(&file).ok().flatten());
            let known = subject.filter(|subject| {
                subject.block_bytes == BLOCK_BYTES
                    && map
                        .file_stem()
                        .is_some_and(|stem| stem == hex(&subject.digest).as_str())
            });
            let blob = match known {
                Some(subject) => self.blob(subject.digest, subject.size_bytes).ok(),
                None => None,
            };
            if blob.is_none_or(|blob| blob.is_empty()) {
                self.drop_files(&path);
            }
        }
        Ok(())
    }

    /// Removes the files of what is of no use; they are made anew when needed.
    fn drop_files(&self, path: &Path) {
        let stem = path.file_stem().unwrap_or_default().to_owned();
        self.by_digest
            .lock()
            .retain(|digest, _| stem != hex(digest).as_str());
        self.blobs
            .write()
            .retain(|blob| stem != hex(&blob.subject().digest).as_str());
        for extension in ["map", "data"] {
            // It may be gone already: both files lead here.
            let _ = std::fs::remove_file(path.with_extension(extension));
        }
    }

    /// Takes one block out that was not read since the hand last passed it.
    fn evict(&self) -> bool {
        let blobs = self.blobs.read();
        let mut hand = self.hand.lock();
        let mut looks = 0;
        // Three rounds: one clears the marks, the next finds one without.
        for _ in 0..=3 * blobs.len() {
            if hand.0 >= blobs.len() {
                *hand = (0, 0);
            }
            let Some(blob) = blobs.get(hand.0) else {
                return false;
            };
            while !blob.is_empty() && hand.1 < blob.subject().blocks() && looks < MAX_LOOKS {
                let block = hand.1;
                hand.1 += 1;
                looks += 1;
                if blob.evict(block) {
                    return true;
                }
            }
            *hand = (hand.0 + 1, 0);
        }
        false
    }
}

/// A digest as text.
pub fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
