//! The map of one blob's cached blocks.
//!
//! ```text
//! 0   8  "AENVBC1\0"
//! 8   4  bytes of a block          12  4  zero
//! 16  8  bytes of the blob         24 32  its SHA-256
//! 56  4  CRC32C of bytes 0 to 56   60  4  zero
//! 64  8 for each block: CRC32C of its content, then a mark made of digest, number
//!     and that CRC; zero when it is not there
//! ```
//!
//! An entry vouches for the content by itself, so no order of writes matters: after a
//! crash an entry whose content is not there is found by reading it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const MAGIC: &[u8; 8] = b"AENVBC1\0";
const HEADER_BYTES: usize = 64;
const CHECKED_BYTES: usize = 56;
const ENTRY_BYTES: u64 = 8;

/// What a map is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// SHA-256 of the blob.
    pub digest: [u8; 32],
    /// Its size.
    pub size_bytes: u64,
    /// Bytes of a block; the last one may be shorter.
    pub block_bytes: u32,
}

impl Subject {
    /// Blocks of the blob.
    pub fn blocks(&self) -> u64 {
        self.size_bytes.div_ceil(u64::from(self.block_bytes))
    }

    /// Bytes of one block.
    pub fn length_of(&self, block: u64) -> usize {
        let start = block * u64::from(self.block_bytes);
        (self.size_bytes - start).min(u64::from(self.block_bytes)) as usize
    }

    /// The entry for a block with this content.
    pub fn entry(&self, block: u64, content: &[u8]) -> u64 {
        self.entry_of(block, crc32c::crc32c(content))
    }

    fn entry_of(&self, block: u64, crc: u32) -> u64 {
        let mut mark = crc32c::crc32c(&self.digest);
        mark = crc32c::crc32c_append(mark, &block.to_le_bytes());
        mark = crc32c::crc32c_append(mark, &crc.to_le_bytes());
        u64::from(crc) | u64::from(mark | 1) << 32
    }

    fn header(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&self.block_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes[24..56].copy_from_slice(&self.digest);
        let crc = crc32c::crc32c(&bytes[..CHECKED_BYTES]);
        bytes[56..60].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

/// Starts an empty map.
pub fn create(file: &File, subject: &Subject) -> io::Result<()> {
    file.set_len(0)?;
    file.write_all_at(&subject.header(), 0)
}

/// The entries of a map, all of them plausible; `None` when it is of something else.
pub fn load(file: &File, subject: &Subject) -> io::Result<Option<Vec<u64>>> {
    let mut header = [0; HEADER_BYTES];
    let length = file.metadata()?.len();
    if length < HEADER_BYTES as u64 {
        return Ok(None);
    }
    file.read_exact_at(&mut header, 0)?;
    if header != subject.header() {
        return Ok(None);
    }
    let mut entries = vec![0; subject.blocks() as usize];
    let stored = ((length - HEADER_BYTES as u64) / ENTRY_BYTES).min(subject.blocks());
    let mut bytes = vec![0; (stored * ENTRY_BYTES) as usize];
    file.read_exact_at(&mut bytes, HEADER_BYTES as u64)?;
    for (block, chunk) in bytes.chunks_exact(ENTRY_BYTES as usize).enumerate() {
        let entry = chunk
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte));
        // What a torn write left does not count.
        if entry == subject.entry_of(block as u64, entry as u32) {
            entries[block] = entry;
        }
    }
    Ok(Some(entries))
}

/// What the header of a map says; `None` when it is none.
pub fn subject_of(file: &File) -> io::Result<Option<Subject>> {
    let mut header = [0; HEADER_BYTES];
    if file.metadata()?.len() < HEADER_BYTES as u64 {
        return Ok(None);
    }
    file.read_exact_at(&mut header, 0)?;
    let mut digest = [0; 32];
    digest.copy_from_slice(&header[24..56]);
    let number = |range: std::ops::Range<usize>| {
        header[range]
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte))
    };
    let subject = Subject {
        digest,
        size_bytes: number(16..24),
        block_bytes: number(8..12) as u32,
    };
    let is_whole = subject.block_bytes > 0 && subject.header() == header;
    Ok(is_whole.then_some(subject))
}

/// Writes one entry; 0 takes the block out.
pub fn store(file: &File, block: u64, entry: u64) -> io::Result<()> {
    file.write_all_at(
        &entry.to_le_bytes(),
        HEADER_BYTES as u64 + block * ENTRY_BYTES,
    )
}
