//! Reads the content of a ZFile at random places (overlaybd spec 2.4).
//!
//! Invariants: a block is handed on only after its checksum and its exact length
//! were right; a read takes at most [`MAX_RUN_BYTES`] and a block of memory besides
//! the shared cache.

use std::io;
use std::sync::Arc;

use super::codec::Decoders;
use super::crc;
use super::format::{flags, Head, ZFileError, BLOCK_BYTES, CRC_BYTES};
use super::jump_table::JumpTable;
use crate::blob::Blob;
use crate::block_cache::{BlockCache, FileKey};

/// Compressed bytes read at once.
pub const MAX_RUN_BYTES: u64 = 256 << 10;
/// How often a block that proves wrong is read again, if the storage can get a
/// better copy of it.
const MAX_RETRIES: usize = 3;

/// The content of a ZFile.
pub struct ZFileBlob {
    inner: Arc<dyn Blob>,
    head: Head,
    table: JumpTable,
    decoders: Arc<Decoders>,
    cache: Arc<BlockCache>,
    key: FileKey,
}

impl ZFileBlob {
    /// Opens the ZFile in `inner`. Blocks are cached in `cache` under `key`, which
    /// must stand for these bytes alone.
    pub fn open(
        inner: Arc<dyn Blob>,
        decoders: Arc<Decoders>,
        cache: Arc<BlockCache>,
        key: FileKey,
    ) -> Result<ZFileBlob, ZFileError> {
        let (head, limit) = read_head(inner.as_ref())?;
        let table = JumpTable::read(inner.as_ref(), &head, limit)?;
        Ok(ZFileBlob {
            inner,
            head,
            table,
            decoders,
            cache,
            key,
        })
    }

    /// Its header or trailer, whichever is complete.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// Bytes of memory its jump table takes.
    pub fn memory_bytes(&self) -> usize {
        self.table.memory_bytes()
    }

    /// The range of the content in a block.
    fn content_range(&self, block: u64) -> (u64, u64) {
        let block_bytes = u64::from(self.head.block_bytes);
        let start = block * block_bytes;
        (start, self.head.original_bytes.min(start + block_bytes))
    }

    /// Last block to read together with `first`: neighbours up to `last` that are
    /// not cached and together short enough.
    fn run_end(&self, first: u64, last: u64) -> u64 {
        let start = self.table.start(first);
        let fits = |block: &u64| {
            let end = self.table.start(block + 1);
            end - start <= MAX_RUN_BYTES && !self.cache.contains(self.key, *block)
        };
        (first + 1..=last).take_while(fits).last().unwrap_or(first)
    }

    /// Reads the blocks `first..=last` from storage into `target`.
    fn read_run(&self, target: &mut Slice<'_>, first: u64, last: u64) -> io::Result<()> {
        let start = self.table.start(first);
        let mut stored = vec![0; (self.table.start(last + 1) - start) as usize];
        self.inner.read_exact_at(&mut stored, start)?;
        for block in first..=last {
            let from = (self.table.start(block) - start) as usize;
            let to = (self.table.start(block + 1) - start) as usize;
            let bytes = &mut stored[from..to];
            let (content_start, content_end) = self.content_range(block);
            if let Some(whole) = target.whole(content_start, content_end) {
                self.decode(block, bytes, whole)?;
                self.cache.insert(self.key, block, whole.to_vec());
            } else {
                let mut content = vec![0; (content_end - content_start) as usize];
                self.decode(block, bytes, &mut content)?;
                target.copy(content_start, &content);
                self.cache.insert(self.key, block, content);
            }
        }
        Ok(())
    }

    /// Checks and decompresses one block; a wrong one is read again when the
    /// storage holds a mere copy of it.
    fn decode(&self, block: u64, stored: &mut [u8], content: &mut [u8]) -> io::Result<()> {
        for attempt in 0.. {
            let Err(error) = self.decode_once(stored, content) else {
                return Ok(());
            };
            let start = self.table.start(block);
            if attempt == MAX_RETRIES || !self.inner.distrust(start, stored.len() as u64) {
                let text = format!("compressed block {block} is damaged: {error}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            self.inner.read_exact_at(stored, start)?;
        }
        Ok(())
    }

    fn decode_once(&self, stored: &[u8], content: &mut [u8]) -> io::Result<()> {
        let mut body = stored;
        if self.head.verify {
            let (bytes, tail) = stored.split_at(stored.len() - CRC_BYTES as usize);
            let stated = u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]);
            let computed = crc::raw(crc::BLOCK_SEED, bytes);
            if stated != computed {
                let text = format!("checksum {computed:#010x}, it states {stated:#010x}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            body = bytes;
        }
        self.decoders.decode(self.head.algorithm, body, content)
    }
}

impl Blob for ZFileBlob {
    fn size_bytes(&self) -> u64 {
        self.head.original_bytes
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        let Some(end) = end.filter(|end| *end <= self.head.original_bytes) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        if buffer.is_empty() {
            return Ok(());
        }
        let block_bytes = u64::from(self.head.block_bytes);
        let last = (end - 1) / block_bytes;
        let mut block = offset / block_bytes;
        let mut target = Slice { buffer, offset };
        while block <= last {
            if let Some(content) = self.cache.get(self.key, block) {
                target.copy(block * block_bytes, &content);
                block += 1;
                continue;
            }
            let run_end = self.run_end(block, last);
            self.read_run(&mut target, block, run_end)?;
            block = run_end + 1;
        }
        Ok(())
    }

    fn may_wait(&self) -> bool {
        self.inner.may_wait()
    }
}

/// A caller's buffer and the place of the content it stands for.
struct Slice<'a> {
    buffer: &'a mut [u8],
    offset: u64,
}

impl Slice<'_> {
    /// The part of the buffer for `[start, end)` if all of that was asked for.
    fn whole(&mut self, start: u64, end: u64) -> Option<&mut [u8]> {
        let from = start.checked_sub(self.offset)? as usize;
        self.buffer.get_mut(from..from + (end - start) as usize)
    }

    /// Copies what was asked for of `content`, which starts at `start`.
    fn copy(&mut self, start: u64, content: &[u8]) {
        let limit = self.offset + self.buffer.len() as u64;
        let from = start.max(self.offset);
        let to = limit.min(start + content.len() as u64);
        let part = &content[(from - start) as usize..(to - start) as usize];
        self.buffer[(from - self.offset) as usize..(to - self.offset) as usize]
            .copy_from_slice(part);
    }
}

/// The complete block of the two, and the first byte after the jump table's room.
fn read_head(blob: &dyn Blob) -> Result<(Head, u64), ZFileError> {
    let mut bytes = [0; BLOCK_BYTES];
    blob.read_exact_at(&mut bytes, 0)?;
    let header = Head::decode(&bytes, "header")?;
    let size_bytes = blob.size_bytes();
    let (part, head, limit) = if header.flags & flags::OVERWRITTEN != 0 {
        ("header", header, size_bytes)
    } else {
        let limit = size_bytes.saturating_sub(BLOCK_BYTES as u64);
        blob.read_exact_at(&mut bytes, limit)?;
        ("trailer", Head::decode(&bytes, "trailer")?, limit)
    };
    let needed = head.original_bytes.div_ceil(u64::from(head.block_bytes));
    if head.blocks != needed {
        let reason = format!(
            "{} blocks of {} bytes cannot hold the {} bytes it states",
            head.blocks, head.block_bytes, head.original_bytes
        );
        return Err(ZFileError::Field { part, reason });
    }
    Ok((head, limit))
}
