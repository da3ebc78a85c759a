//! Decompressed blocks of all open files, bounded together.
//!
//! Many stacks read the same layers, often past the page cache; what one of them
//! has decompressed the others need not. Blocks of closed files fade by themselves.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use quick_cache::sync::Cache;
use quick_cache::Weighter;

/// Default size of the cache.
pub const DEFAULT_BYTES: u64 = 128 << 20;
/// Bytes of bookkeeping counted for each block.
const OVERHEAD_BYTES: u64 = 128;
/// Block size the cache expects, to size its tables.
const USUAL_BLOCK_BYTES: u64 = 4096;

/// What names the content of one file: the same for every opening of it, another
/// once the file was written to or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileKey([u64; 4]);

impl FileKey {
    /// The key of a file. Its change time makes sure of the content.
    pub fn of(metadata: &Metadata) -> FileKey {
        let changed_ns = metadata
            .ctime()
            .wrapping_mul(1_000_000_000)
            .wrapping_add(metadata.ctime_nsec());
        let changed_ns = changed_ns as u64;
        FileKey([metadata.dev(), metadata.ino(), changed_ns, metadata.len()])
    }

    /// The key of content that is known by its SHA-256, wherever it is.
    pub fn of_digest(digest: &[u8; 32]) -> FileKey {
        let mut parts = [0; 4];
        for (part, bytes) in parts.iter_mut().zip(digest.chunks_exact(8)) {
            *part = bytes
                .iter()
                .fold(0, |value, byte| value << 8 | u64::from(*byte));
        }
        FileKey(parts)
    }
}

/// Blocks by file and number.
pub struct BlockCache {
    blocks: Cache<(FileKey, u64), Arc<Vec<u8>>, Weigh>,
    next_key: AtomicU64,
}

#[derive(Clone)]
struct Weigh;

impl Weighter<(FileKey, u64), Arc<Vec<u8>>> for Weigh {
    fn weight(&self, _key: &(FileKey, u64), block: &Arc<Vec<u8>>) -> u64 {
        block.len() as u64 + OVERHEAD_BYTES
    }
}

impl BlockCache {
    /// A cache that holds up to `size_bytes`, bookkeeping included; 0 keeps nothing.
    pub fn new(size_bytes: u64) -> BlockCache {
        let blocks = size_bytes / (USUAL_BLOCK_BYTES + OVERHEAD_BYTES);
        BlockCache {
            blocks: Cache::with_weighter(blocks as usize, size_bytes, Weigh),
            next_key: AtomicU64::new(0),
        }
    }

    /// A key for content that is no file.
    pub fn fresh_key(&self) -> FileKey {
        let number = self.next_key.fetch_add(1, Ordering::Relaxed);
        // No device has this number.
        FileKey([u64::MAX, number, 0, 0])
    }

    /// A block, if it is there.
    pub fn get(&self, file: FileKey, block: u64) -> Option<Arc<Vec<u8>>> {
        self.blocks.get(&(file, block))
    }

    /// Whether a block is there, without counting as its use.
    pub fn contains(&self, file: FileKey, block: u64) -> bool {
        self.blocks.contains_key(&(file, block))
    }

    /// Keeps a block, at the cost of others when the cache is full.
    pub fn insert(&self, file: FileKey, block: u64, content: Vec<u8>) {
        self.blocks.insert((file, block), Arc::new(content));
    }

    /// Bytes held now, bookkeeping included.
    pub fn used_bytes(&self) -> u64 {
        self.blocks.weight()
    }
}

impl Default for BlockCache {
    fn default() -> BlockCache {
        BlockCache::new(DEFAULT_BYTES)
    }
}
