//! The content of one file on its way to the disk.

use lsmt::commit::is_zero;

use super::extents::{push, Extent};
use super::volume::Volume;
use super::{Ext4Error, BLOCK_BYTES};

/// Bytes gathered before blocks are looked for.
const CHUNK_BYTES: usize = 1 << 20;

/// Takes bytes at rising offsets. Blocks of zeros take no room: they are holes, as are parts never given.
pub struct Content {
    chunk: Vec<u8>,
    chunk_at: u64,
    filled: usize,
    extents: Vec<Extent>,
}

impl Content {
    /// An empty file.
    pub fn new() -> Content {
        Content {
            chunk: Vec::new(),
            chunk_at: 0,
            filled: 0,
            extents: Vec::new(),
        }
    }

    /// Adds bytes. `offset` is never before the end of what was given already.
    pub fn write(
        &mut self,
        volume: &mut Volume,
        mut offset: u64,
        mut bytes: &[u8],
    ) -> Result<(), Ext4Error> {
        while !bytes.is_empty() {
            if offset >= self.chunk_at + CHUNK_BYTES as u64 {
                self.flush(volume)?;
                self.chunk_at = offset - offset % BLOCK_BYTES as u64;
            }
            let at = (offset - self.chunk_at) as usize;
            let count = bytes.len().min(CHUNK_BYTES - at);
            let end = (at + count).next_multiple_of(BLOCK_BYTES);
            if self.chunk.len() < end {
                self.chunk.resize(end, 0);
            }
            self.chunk[at..at + count].copy_from_slice(&bytes[..count]);
            self.filled = at + count;
            offset += count as u64;
            bytes = &bytes[count..];
        }
        Ok(())
    }

    fn flush(&mut self, volume: &mut Volume) -> Result<(), Ext4Error> {
        let blocks = self.filled.div_ceil(BLOCK_BYTES);
        let block = |index: usize| index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES;
        let mut index = 0;
        while index < blocks {
            let has_data = |i: &usize| !is_zero(&self.chunk[block(*i)]);
            let run = (index..blocks).take_while(has_data).count();
            if run == 0 {
                index += 1;
                continue;
            }
            let (first, count) = volume.take_blocks(run as u64)?;
            let bytes = &self.chunk[index * BLOCK_BYTES..(index + count as usize) * BLOCK_BYTES];
            volume.disk.write(first, bytes)?;
            let logical = self.chunk_at / BLOCK_BYTES as u64 + index as u64;
            push(&mut self.extents, logical, first, count);
            index += count as usize;
        }
        self.chunk.clear();
        self.filled = 0;
        Ok(())
    }

    /// Where everything went.
    pub fn finish(mut self, volume: &mut Volume) -> Result<Vec<Extent>, Ext4Error> {
        self.flush(volume)?;
        Ok(self.extents)
    }
}
