//! Bytes of an LSMT file (overlaybd spec 1.1 to 1.5), all little-endian.
//!
//! ```text
//! sealed file                         header / trailer block (4096 bytes)
//! +--------------------+ 0            +-----+------+---------------------------+
//! | header block       |              |   0 |    8 | magic0 "LSMT\0\1\2\0"     |
//! +--------------------+ 4096         |   8 |   16 | magic1                    |
//! | data (sectors)     |              |  24 |    4 | size of the struct, 390   |
//! +--------------------+ index_offset |  28 |    4 | flags                     |
//! | index, 16 B each   |              |  32 |    8 | index_offset, bytes       |
//! +--------------------+              |  40 |    8 | index_size, entries       |
//! | padding            |              |  48 |    8 | virtual_size, bytes       |
//! +--------------------+ size - 4096  |  56 |   37 | uuid, ASCII + NUL         |
//! | trailer block      |              |  93 |   37 | parent uuid               |
//! +--------------------+ size         | 130 |    2 | reserved, 0               |
//!                                     | 132 |    1 | version 1                 |
//! upper data file = header + data     | 133 |    1 | sub version 1             |
//! upper index file = header + records | 134 |  256 | user tag, zero padded     |
//!                                     | 390 | 3706 | zero                      |
//!                                     +-----+------+---------------------------+
//!
//! index entry (16 bytes): word 0 = offset:50 | length:14
//!                         word 1 = moffset:55 | zeroed:1 | tag:8
//! ```
//! `offset`, `length` and `moffset` count sectors. `tag` has no meaning on disk:
//! it is ignored when read and written as 0; in memory it names the layer.

use thiserror::Error;

/// Bytes in a sector, the unit of every index entry.
pub const SECTOR_BYTES: u64 = 512;
/// Bytes of a header or trailer block.
pub const BLOCK_BYTES: usize = 4096;
/// Bytes of one index entry.
pub const ENTRY_BYTES: usize = 16;
/// First sector that may hold data, right after the header block.
pub const FIRST_DATA_SECTOR: u64 = 8;
/// Longest range one entry can name (14 bits).
pub const MAX_ENTRY_SECTORS: u64 = 16_383;
/// Largest virtual sector number; also the mark of a padding entry.
pub const INVALID_SECTOR: u64 = (1 << 50) - 1;
/// Largest number of entries accepted from one sealed layer: 128 MiB of memory.
/// (The reference stops at 1,000,000; an upper that took many small random
/// writes can pass that, and must still seal and open again.)
pub const MAX_LAYER_ENTRIES: u64 = 8_000_000;
/// Largest number of records replayed from an upper's index file.
pub const MAX_UPPER_RECORDS: u64 = 128_000_000;
/// Most layers in one stack: the in-memory tag is 8 bits wide.
pub const MAX_LAYERS: usize = 255;

const MAGIC0: [u8; 8] = *b"LSMT\0\x01\x02\0";
const MAGIC1: [u8; 16] = [
    0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44, 0x08, 0x4c, 0xa2, 0xd2, 0xc8, 0xec, 0x4f, 0xcf, 0xae, 0x8a,
];
const STRUCT_BYTES: u32 = 390;
const UUID_BYTES: usize = 37;
const USER_TAG_BYTES: usize = 256;
const MOFFSET_MASK: u64 = (1 << 55) - 1;
const ZEROED_BIT: u64 = 1 << 55;

/// Flag bits of a header or trailer block.
pub mod flags {
    /// Set in a header, clear in a trailer.
    pub const HEADER: u32 = 1;
    /// Set in a data file, clear in an index file.
    pub const DATA: u32 = 1 << 1;
    /// The file is complete and immutable.
    pub const SEALED: u32 = 1 << 2;
    /// The upper was written as a sparse file.
    pub const SPARSE: u32 = 1 << 4;
    /// The upper overwrote its own data in place.
    pub const HYBRID: u32 = 1 << 5;
}

/// Why bytes are not a usable LSMT structure.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FormatError {
    /// The file cannot hold even one block.
    #[error("file of {size_bytes} bytes is too short for an LSMT {part}")]
    TooShort {
        /// `header` or `trailer`.
        part: &'static str,
        /// Size of the file.
        size_bytes: u64,
    },
    /// The magic numbers are absent.
    #[error("no LSMT magic in the {part}")]
    BadMagic {
        /// `header` or `trailer`.
        part: &'static str,
    },
    /// The struct size field is not 390.
    #[error("LSMT {part} declares a struct of {found} bytes, expected 390")]
    BadStructSize {
        /// `header` or `trailer`.
        part: &'static str,
        /// Value of the field.
        found: u32,
    },
    /// A version this crate does not read.
    #[error("LSMT version {version}.{sub_version} is not supported, expected 1.x")]
    Version {
        /// Major version.
        version: u8,
        /// Minor version.
        sub_version: u8,
    },
    /// Flags that contradict the place or the use of the block.
    #[error("LSMT {part} has flags {flags:#b}: {reason}")]
    Flags {
        /// `header` or `trailer`.
        part: &'static str,
        /// The flags as read.
        flags: u32,
        /// What is wrong with them.
        reason: &'static str,
    },
    /// The index does not fit where the trailer says it is.
    #[error("index of {entries} entries at byte {index_offset} does not fit before byte {limit}")]
    IndexBounds {
        /// Declared start.
        index_offset: u64,
        /// Declared number of entries.
        entries: u64,
        /// First byte the index must not reach.
        limit: u64,
    },
    /// More entries than the crate accepts.
    #[error("index of {entries} entries exceeds the limit of {limit}")]
    TooManyEntries {
        /// Declared number of entries.
        entries: u64,
        /// The limit.
        limit: u64,
    },
    /// One entry is wrong.
    #[error("index entry {position}: {reason}")]
    Entry {
        /// Position of the entry in the index.
        position: u64,
        /// What is wrong with it.
        reason: &'static str,
    },
}

/// One index entry: `length` sectors of the virtual disk starting at `offset`
/// lie at sector `moffset` of the layer file, or read as zero.
///
/// Packed as on disk, so a big index costs 16 bytes an entry. The accessors
/// never overflow: `offset + length` fits in 51 bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    place: u64,
    target: u64,
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.is_zeroed() { "zero" } else { "data" };
        write!(
            f,
            "{kind} {}+{} -> {} tag {}",
            self.offset(),
            self.length(),
            self.moffset(),
            self.tag()
        )
    }
}

impl Segment {
    /// The filler entry that readers skip.
    pub const PADDING: Segment = Segment {
        place: INVALID_SECTOR,
        target: 0,
    };

    /// An entry whose data is at sector `moffset` of the file.
    pub fn data(offset: u64, length: u64, moffset: u64) -> Segment {
        debug_assert!(offset < INVALID_SECTOR && length <= MAX_ENTRY_SECTORS);
        Segment {
            place: offset | (length << 50),
            target: moffset & MOFFSET_MASK,
        }
    }

    /// An entry that reads as zero and hides what is below it.
    pub fn zeroed(offset: u64, length: u64, moffset: u64) -> Segment {
        let mut segment = Segment::data(offset, length, moffset);
        segment.target |= ZEROED_BIT;
        segment
    }

    /// First sector of the virtual range.
    pub fn offset(&self) -> u64 {
        self.place & INVALID_SECTOR
    }

    /// Sectors in the range.
    pub fn length(&self) -> u64 {
        self.place >> 50
    }

    /// First sector after the range.
    pub fn end(&self) -> u64 {
        self.offset() + self.length()
    }

    /// First sector of the data in the layer file.
    pub fn moffset(&self) -> u64 {
        self.target & MOFFSET_MASK
    }

    /// First sector of the layer file after the data; a zeroed entry has none.
    pub fn mend(&self) -> u64 {
        if self.is_zeroed() {
            self.moffset()
        } else {
            self.moffset() + self.length()
        }
    }

    /// Whether the range reads as zero.
    pub fn is_zeroed(&self) -> bool {
        self.target & ZEROED_BIT != 0
    }

    /// Which layer of a stack the entry belongs to (in memory only).
    pub fn tag(&self) -> u8 {
        (self.target >> 56) as u8
    }

    /// The same entry for layer `tag`.
    pub fn with_tag(self, tag: u8) -> Segment {
        Segment {
            place: self.place,
            target: (self.target & (MOFFSET_MASK | ZEROED_BIT)) | (u64::from(tag) << 56),
        }
    }

    /// Whether this is the filler entry.
    pub fn is_padding(&self) -> bool {
        self.offset() == INVALID_SECTOR
    }

    /// The part of the entry inside `[start, end)`, which must overlap it.
    pub fn clip(&self, start: u64, end: u64) -> Segment {
        let from = self.offset().max(start);
        let to = self.end().min(end);
        debug_assert!(from < to);
        let shift = if self.is_zeroed() {
            0
        } else {
            from - self.offset()
        };
        Segment {
            place: from | ((to - from) << 50),
            target: self.target + shift,
        }
    }

    /// The two words as on disk, with tag 0.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..8].copy_from_slice(&self.place.to_le_bytes());
        bytes[8..].copy_from_slice(&self.with_tag(0).target.to_le_bytes());
        bytes
    }

    /// Reads an entry without judging it; the tag on disk is dropped.
    pub fn decode(bytes: &[u8; ENTRY_BYTES]) -> Segment {
        Segment {
            place: read_u64(bytes, 0),
            target: read_u64(bytes, 8) & (MOFFSET_MASK | ZEROED_BIT),
        }
    }
}

/// Entries as one byte string, tags written as 0.
pub fn encode_entries(entries: &[Segment]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(entries.len() * ENTRY_BYTES);
    for entry in entries {
        bytes.extend_from_slice(&entry.encode());
    }
    bytes
}

/// A header or trailer block with the fields that matter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// See [`flags`].
    pub flags: u32,
    /// Where the index starts, bytes.
    pub index_offset: u64,
    /// Number of index entries (padding included).
    pub index_size: u64,
    /// Size of the virtual disk; 0 means "as below".
    pub virtual_size_bytes: u64,
    /// Identity, lower-case text; the nil uuid stands for "none".
    pub uuid: String,
    /// Identity of the layer below, likewise.
    pub parent_uuid: String,
    /// Free text.
    pub user_tag: String,
}

/// The uuid that stands for "none".
pub const NIL_UUID: &str = "00000000-0000-0000-0000-000000000000";

impl Block {
    /// Reads a block. `part` is `header` or `trailer` and decides which flag
    /// bits must be present.
    pub fn decode(bytes: &[u8; BLOCK_BYTES], part: &'static str) -> Result<Block, FormatError> {
        if bytes[..8] != MAGIC0 || bytes[8..24] != MAGIC1 {
            return Err(FormatError::BadMagic { part });
        }
        let found = u32::from_le_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]);
        if found != STRUCT_BYTES {
            return Err(FormatError::BadStructSize { part, found });
        }
        if bytes[132] != 1 {
            return Err(FormatError::Version {
                version: bytes[132],
                sub_version: bytes[133],
            });
        }
        let flags = u32::from_le_bytes([bytes[28], bytes[29], bytes[30], bytes[31]]);
        let bad = |reason| {
            Err(FormatError::Flags {
                part,
                flags,
                reason,
            })
        };
        if (flags & flags::HEADER != 0) != (part == "header") {
            return bad("header bit does not match the place of the block");
        }
        if flags & flags::SPARSE != 0 && flags & flags::HYBRID != 0 {
            return bad("sparse and hybrid exclude each other");
        }
        Ok(Block {
            flags,
            index_offset: read_u64(bytes, 32),
            index_size: read_u64(bytes, 40),
            virtual_size_bytes: read_u64(bytes, 48),
            uuid: read_uuid(&bytes[56..56 + UUID_BYTES]),
            parent_uuid: read_uuid(&bytes[93..93 + UUID_BYTES]),
            user_tag: read_text(&bytes[134..134 + USER_TAG_BYTES]),
        })
    }

    /// Writes the block. The uuid goes out in upper case like the reference's;
    /// a user tag is cut at 256 bytes.
    pub fn encode(&self) -> [u8; BLOCK_BYTES] {
        let mut bytes = [0; BLOCK_BYTES];
        bytes[..8].copy_from_slice(&MAGIC0);
        bytes[8..24].copy_from_slice(&MAGIC1);
        bytes[24..28].copy_from_slice(&STRUCT_BYTES.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.flags.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.index_offset.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.index_size.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.virtual_size_bytes.to_le_bytes());
        put_text(&mut bytes[56..92], &self.uuid.to_uppercase());
        put_text(&mut bytes[93..129], &self.parent_uuid.to_uppercase());
        bytes[132] = 1;
        bytes[133] = 1;
        put_text(&mut bytes[134..134 + USER_TAG_BYTES], &self.user_tag);
        bytes
    }
}

/// An identity given by a person in any usual form, as this crate writes it.
pub fn parse_uuid(text: &str) -> Option<String> {
    let uuid = uuid::Uuid::try_parse(text).ok()?;
    Some(uuid.hyphenated().to_string())
}

/// A fresh random identity.
pub fn new_uuid() -> String {
    uuid::Uuid::new_v4().hyphenated().to_string()
}

/// The little-endian field at `at`.
pub(crate) fn read_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn read_text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]).into_owned()
}

fn read_uuid(bytes: &[u8]) -> String {
    let text = read_text(bytes).to_lowercase();
    if text.is_empty() {
        NIL_UUID.to_owned()
    } else {
        text
    }
}

fn put_text(target: &mut [u8], text: &str) {
    let length = text.len().min(target.len());
    target[..length].copy_from_slice(&text.as_bytes()[..length]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn entries_have_the_reference_bytes() {
        let cases = [
            (Segment::data(8, 8, 8), "08000000000020000800000000000000"),
            (
                Segment::data(100, 10, 16),
                "64000000000028001000000000000000",
            ),
            (Segment::PADDING, "ffffffffffff03000000000000000000"),
        ];
        for (segment, expected) in cases {
            assert_eq!(hex(&segment.encode()), expected);
            assert_eq!(Segment::decode(&segment.encode()), segment);
        }
        // The fourth golden entry carries tag 3, which disk encoding drops.
        let mut tagged = [0; ENTRY_BYTES];
        for (index, byte) in tagged.iter_mut().enumerate() {
            let text = &"001000000000fcff2000000000008003"[index * 2..index * 2 + 2];
            *byte = u8::from_str_radix(text, 16).unwrap();
        }
        assert_eq!(
            Segment::decode(&tagged),
            Segment::zeroed(0x1000, MAX_ENTRY_SECTORS, 0x20)
        );
        let encoded = Segment::zeroed(0x1000, MAX_ENTRY_SECTORS, 0x20).with_tag(3);
        assert_eq!(encoded.tag(), 3);
        assert_eq!(hex(&encoded.encode()), "001000000000fcff2000000000008000");
    }

    #[test]
    fn clipping_moves_data_but_not_zeros() {
        let data = Segment::data(10, 10, 100).clip(12, 15);
        assert_eq!((data.offset(), data.length(), data.moffset()), (12, 3, 102));
        let zero = Segment::zeroed(10, 10, 100).with_tag(7).clip(12, 15);
        assert_eq!((zero.offset(), zero.length(), zero.moffset()), (12, 3, 100));
        assert_eq!((zero.mend(), zero.tag()), (100, 7));
    }

    #[test]
    fn blocks_survive_a_round_trip() {
        let block = Block {
            flags: flags::DATA | flags::SEALED,
            index_offset: 8192,
            index_size: 3,
            virtual_size_bytes: 1 << 30,
            uuid: new_uuid(),
            parent_uuid: NIL_UUID.to_owned(),
            user_tag: "x".repeat(256),
        };
        assert_eq!(Block::decode(&block.encode(), "trailer"), Ok(block.clone()));
        assert!(Block::decode(&block.encode(), "header").is_err());
        let mut no_uuid = block.encode();
        no_uuid[56..93].fill(0);
        let read = Block::decode(&no_uuid, "trailer").unwrap();
        assert_eq!(read.uuid, NIL_UUID);
    }
}
