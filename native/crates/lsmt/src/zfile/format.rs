//! Bytes of a ZFile (overlaybd spec 2.1 to 2.3), all little-endian.
//!
//! ```text
//! file                                 header / trailer block (512 bytes)
//! +---------------------+ 0            +----+----+------------------------------+
//! | header block        |              |  0 |  8 | magic0 "ZFile\0\1\0"         |
//! +---------------------+ 512          |  8 | 16 | magic1                       |
//! | block 0 [crc u32]   |              | 24 |  4 | size of the struct, 96       |
//! | block 1 [crc u32]   |              | 28 |  4 | digest of this block         |
//! | ...                 |              | 32 |  8 | flags                        |
//! +---------------------+ index_offset | 40 |  8 | index_offset, bytes          |
//! | jump table, u32     |              | 48 |  8 | index_size, blocks           |
//! | each: stored bytes  |              | 56 |  8 | original size, bytes         |
//! +---------------------+ size - 512   | 64 |  4 | crc of the jump table        |
//! | trailer block       |              | 72 |  4 | block size, bytes            |
//! +---------------------+ size         | 76 |  1 | 1 lz4, 2 zstd                |
//!                                      | 77 |  1 | level, 0                     |
//!                                      | 78 |  1 | use_dict, 0                  |
//!                                      | 84 |  4 | dict_size, 0                 |
//!                                      | 88 |  1 | 1: blocks carry a crc        |
//!                                      +----+----+------------------------------+
//! ```
//! A header with the overwrite flag has all fields of the trailer, which then is
//! not needed. Checksums are those of [`super::crc`].

use std::io;

use thiserror::Error;

use super::crc;
use crate::format::read_u64;

/// Bytes of a header or trailer block.
pub const BLOCK_BYTES: usize = 512;
/// Smallest and largest block of a file.
pub const BLOCK_SIZES: std::ops::RangeInclusive<u32> = 4096..=65_536;
/// Bytes of a block's checksum.
pub const CRC_BYTES: u64 = 4;
/// Bytes of a jump table entry.
pub const ENTRY_BYTES: u64 = 4;
/// Most blocks accepted from one file: 512 GiB in blocks of 4 KiB, which take
/// 528 MiB of memory. A file has to be half as long as that memory to need it.
pub const MAX_BLOCKS: u64 = 1 << 27;

const MAGIC: [u8; 24] = *b"ZFile\0\x01\0tuji.yyf@Alibaba";
const STRUCT_BYTES: u32 = 96;

/// Flag bits of a header or trailer block.
pub mod flags {
    /// Set in a header, clear in a trailer.
    pub const HEADER: u64 = 1;
    /// Always set in a data file.
    pub const DATA: u64 = 1 << 1;
    /// Set in a trailer.
    pub const SEALED: u64 = 1 << 2;
    /// The header has the fields of the trailer.
    pub const OVERWRITTEN: u64 = 1 << 3;
    /// The block's digest and the jump table's checksum are there.
    pub const DIGEST: u64 = 1 << 4;
    /// The jump table is compressed; nobody ever wrote that.
    pub const INDEX_COMPRESSED: u64 = 1 << 5;
}

/// How blocks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// LZ4 block format, without frame or length.
    Lz4,
    /// One Zstandard frame for each block.
    Zstd,
}

impl Algorithm {
    /// Its usual name.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Lz4 => "lz4",
            Algorithm::Zstd => "zstd",
        }
    }
}

/// Why bytes are not a usable ZFile.
#[derive(Debug, Error)]
pub enum ZFileError {
    /// The file could not be read.
    #[error("cannot read: {0}")]
    Io(#[from] io::Error),
    /// The trailer is not where it must be.
    #[error("no ZFile magic in the {part}; the file is cut off or has bytes after its end")]
    BadMagic {
        /// `header` or `trailer`.
        part: &'static str,
    },
    /// The block is damaged.
    #[error(
        "digest of the {part} is {computed:#010x}, it states {stated:#010x}: the file is damaged"
    )]
    Digest {
        /// `header`, `trailer` or `jump table`.
        part: &'static str,
        /// As written in the file.
        stated: u32,
        /// Of the bytes read.
        computed: u32,
    },
    /// A field has a value that this crate cannot work with.
    #[error("{part}: {reason}")]
    Field {
        /// `header` or `trailer`.
        part: &'static str,
        /// Which field, and why.
        reason: String,
    },
    /// The jump table does not fit.
    #[error(
        "jump table of {blocks} blocks at byte {index_offset} does not fit before byte {limit}"
    )]
    IndexBounds {
        /// Declared number of blocks.
        blocks: u64,
        /// Declared start.
        index_offset: u64,
        /// First byte it must not reach.
        limit: u64,
    },
    /// One entry of the jump table is wrong.
    #[error("jump table entry {position}: {reason}")]
    Entry {
        /// Which block.
        position: u64,
        /// What is wrong with it.
        reason: &'static str,
    },
}

/// The fields of a header or trailer block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// See [`flags`].
    pub flags: u64,
    /// Where the jump table starts, bytes.
    pub index_offset: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Size of the content.
    pub original_bytes: u64,
    /// Checksum of the jump table.
    pub index_crc: u32,
    /// Bytes of content in each block but the last.
    pub block_bytes: u32,
    /// How blocks are compressed.
    pub algorithm: Algorithm,
    /// Whether each block carries a checksum.
    pub verify: bool,
}

/// Whether a file that starts so is a ZFile.
pub fn is_zfile(start: &[u8]) -> bool {
    start.starts_with(&MAGIC)
}

impl Head {
    /// Reads and checks a block. `part` is `header` or `trailer`.
    pub fn decode(bytes: &[u8; BLOCK_BYTES], part: &'static str) -> Result<Head, ZFileError> {
        if !is_zfile(bytes) {
            return Err(ZFileError::BadMagic { part });
        }
        let flags = read_u64(bytes, 32);
        if flags & flags::DIGEST != 0 {
            let (stated, computed) = (read_u32(bytes, 28), digest(bytes));
            if stated != computed {
                return Err(ZFileError::Digest {
                    part,
                    stated,
                    computed,
                });
            }
        }
        let field = |reason: String| Err(ZFileError::Field { part, reason });
        if read_u32(bytes, 24) != STRUCT_BYTES {
            return field(format!("struct of {} bytes, not 96", read_u32(bytes, 24)));
        }
        let is_header = flags & flags::HEADER != 0;
        let is_complete = is_header || flags & flags::SEALED != 0;
        if is_header != (part == "header") || flags & flags::DATA == 0 || !is_complete {
            return field(format!(
                "flags {flags:#b} do not fit the place of the block"
            ));
        }
        if flags & flags::INDEX_COMPRESSED != 0 {
            return field("a compressed jump table is not supported".to_owned());
        }
        let block_bytes = read_u32(bytes, 72);
        if !BLOCK_SIZES.contains(&block_bytes) || !block_bytes.is_power_of_two() {
            return field(format!(
                "block size {block_bytes} is not a power of two from 4096 to 65536"
            ));
        }
        let algorithm = match bytes[76] {
            1 => Algorithm::Lz4,
            2 => Algorithm::Zstd,
            other => return field(format!("compression {other} is neither lz4 nor zstd")),
        };
        if bytes[78] != 0 || read_u32(bytes, 84) != 0 {
            return field("a compression dictionary is not supported".to_owned());
        }
        Ok(Head {
            flags,
            index_offset: read_u64(bytes, 40),
            blocks: read_u64(bytes, 48),
            original_bytes: read_u64(bytes, 56),
            index_crc: read_u32(bytes, 64),
            block_bytes,
            algorithm,
            verify: bytes[88] == 1,
        })
    }

    /// Writes the block, with its digest.
    pub fn encode(&self) -> [u8; BLOCK_BYTES] {
        let mut bytes = [0; BLOCK_BYTES];
        bytes[..24].copy_from_slice(&MAGIC);
        bytes[24..28].copy_from_slice(&STRUCT_BYTES.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.flags.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.index_offset.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.blocks.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.original_bytes.to_le_bytes());
        bytes[64..68].copy_from_slice(&self.index_crc.to_le_bytes());
        bytes[72..76].copy_from_slice(&self.block_bytes.to_le_bytes());
        bytes[76] = match self.algorithm {
            Algorithm::Lz4 => 1,
            Algorithm::Zstd => 2,
        };
        bytes[88] = u8::from(self.verify);
        let digest = digest(&bytes);
        bytes[28..32].copy_from_slice(&digest.to_le_bytes());
        bytes
    }

    /// Bytes that a stored block has at most. Both compressors stay below this
    /// for content that does not compress at all.
    pub fn max_stored_bytes(&self) -> u64 {
        let block_bytes = u64::from(self.block_bytes);
        block_bytes + block_bytes / 128 + 512
    }
}

/// Checksum of a block, whose own field counts as zero.
fn digest(bytes: &[u8; BLOCK_BYTES]) -> u32 {
    let mut register = crc::raw(0, &bytes[..28]);
    register = crc::raw(register, &[0; 4]);
    crc::raw(register, &bytes[32..])
}

fn read_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}
