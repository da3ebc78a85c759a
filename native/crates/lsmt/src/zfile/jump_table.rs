//! Where each block of a ZFile lies.
//!
//! The file gives stored lengths; the places are their sums. Kept in 33 bits a
//! block: the place of every 64th one, and for each the distance from it, which
//! 64 blocks of at most 66 KiB keep far below 4 GiB.

use super::format::{Head, ZFileError, BLOCK_BYTES, CRC_BYTES, ENTRY_BYTES};
use super::{crc, format};
use crate::blob::Blob;

/// Blocks that share one full place.
const GROUP: u64 = 64;
/// Bytes of the table read at a time.
const CHUNK_BYTES: u64 = 1 << 18;

/// Places of all blocks, in the order of the content.
#[derive(Debug)]
pub struct JumpTable {
    groups: Vec<u64>,
    distances: Vec<u32>,
    end: u64,
}

impl JumpTable {
    /// Reads and checks the table that `head` names. `limit` is the first byte of
    /// the file that it must not reach.
    pub fn read(blob: &dyn Blob, head: &Head, limit: u64) -> Result<JumpTable, ZFileError> {
        let blocks = head.blocks;
        let bounds = ZFileError::IndexBounds {
            blocks,
            index_offset: head.index_offset,
            limit,
        };
        let end = blocks
            .checked_mul(ENTRY_BYTES)
            .and_then(|length| head.index_offset.checked_add(length));
        let fits = end.is_some_and(|end| end <= limit);
        if !fits || blocks > format::MAX_BLOCKS || head.index_offset < BLOCK_BYTES as u64 {
            return Err(bounds);
        }
        let mut table = JumpTable {
            groups: Vec::new(),
            distances: Vec::new(),
            end: BLOCK_BYTES as u64,
        };
        // Grows with what proves right, not with what the header promises.
        let length = blocks * ENTRY_BYTES;
        let mut bytes = vec![0; CHUNK_BYTES.min(length) as usize];
        let mut register = 0;
        let mut done = 0;
        while done < length {
            let chunk = &mut bytes[..CHUNK_BYTES.min(length - done) as usize];
            blob.read_exact_at(chunk, head.index_offset + done)?;
            register = crc::raw(register, chunk);
            for raw in chunk.chunks_exact(ENTRY_BYTES as usize) {
                let stored = u32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
                table.push(head, u64::from(stored))?;
            }
            done += chunk.len() as u64;
        }
        if head.flags & format::flags::DIGEST != 0 && register != head.index_crc {
            return Err(ZFileError::Digest {
                part: "jump table",
                stated: head.index_crc,
                computed: register,
            });
        }
        table.distances.shrink_to_fit();
        Ok(table)
    }

    fn push(&mut self, head: &Head, stored: u64) -> Result<(), ZFileError> {
        let position = self.distances.len() as u64;
        let least = if head.verify { CRC_BYTES + 1 } else { 1 };
        let reason = if stored < least {
            "the block has no content"
        } else if stored > head.max_stored_bytes() + CRC_BYTES {
            "the block is longer than its content can be"
        } else if self.end + stored > head.index_offset {
            "the block reaches into the jump table"
        } else {
            if position % GROUP == 0 {
                self.groups.push(self.end);
            }
            let group = self.groups[(position / GROUP) as usize];
            self.distances.push((self.end - group) as u32);
            self.end += stored;
            return Ok(());
        };
        Err(ZFileError::Entry { position, reason })
    }

    /// First byte of a block, or of what follows the last one.
    pub fn start(&self, block: u64) -> u64 {
        match self.distances.get(block as usize) {
            Some(distance) => self.groups[(block / GROUP) as usize] + u64::from(*distance),
            None => self.end,
        }
    }

    /// Bytes of memory it takes.
    pub fn memory_bytes(&self) -> usize {
        self.groups.capacity() * 8 + self.distances.capacity() * 4
    }
}
