//! Layer files made to harm the reader: each is refused with its reason.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod common;

use std::path::Path;
use std::sync::Arc;

use common::Memory;
use lsmt::format::{
    encode_entries, flags, new_uuid, Block, Segment, BLOCK_BYTES, MAX_LAYER_ENTRIES, NIL_UUID,
};
use lsmt::{Opener, RoLayer};

const DATA_SECTORS: u64 = 16;

/// A small valid layer that each case spoils in one way.
struct Draft {
    header: Block,
    entries: Vec<Segment>,
    trailer: Block,
}

impl Draft {
    fn new() -> Draft {
        let header = Block {
            flags: flags::HEADER | flags::DATA | flags::SEALED,
            index_offset: 0,
            index_size: 0,
            virtual_size_bytes: 1 << 20,
            uuid: new_uuid(),
            parent_uuid: NIL_UUID.to_owned(),
            user_tag: String::new(),
        };
        let entries = vec![Segment::data(0, 8, 8), Segment::zeroed(8, 8, 24)];
        let trailer = Block {
            flags: flags::DATA | flags::SEALED,
            index_offset: (8 + DATA_SECTORS) * 512,
            index_size: entries.len() as u64,
            ..header.clone()
        };
        Draft {
            header,
            entries,
            trailer,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.header.encode().to_vec();
        bytes.resize(bytes.len() + DATA_SECTORS as usize * 512, 7);
        bytes.extend_from_slice(&encode_entries(&self.entries));
        bytes.extend_from_slice(&self.trailer.encode());
        bytes
    }
}

fn open(bytes: &[u8]) -> Result<Vec<Segment>, String> {
    let blob = Arc::new(Memory(bytes.to_vec()));
    let result = RoLayer::from_blob(Path::new("memory"), blob);
    result
        .map(|(_, entries)| entries)
        .map_err(|error| error.to_string())
}

#[test]
fn the_draft_itself_is_fine() {
    assert_eq!(open(&Draft::new().bytes()).unwrap().len(), 2);
}

#[test]
fn bad_trailers_and_entries_are_refused() {
    type Spoil = fn(&mut Draft);
    let cases: &[(&str, Spoil)] = &[
        ("does not fit", |d| d.trailer.index_offset = u64::MAX - 8),
        ("does not fit", |d| d.trailer.index_offset = 4095),
        ("does not fit", |d| d.trailer.index_size = 1000),
        ("exceeds the limit", |d| {
            d.trailer.index_size = MAX_LAYER_ENTRIES + 1
        }),
        ("exceeds the limit", |d| d.trailer.index_size = u64::MAX),
        ("exclude each other", |d| {
            d.trailer.flags |= flags::SPARSE | flags::HYBRID
        }),
        ("header bit", |d| d.trailer.flags |= flags::HEADER),
        ("sealed data file", |d| d.trailer.flags &= !flags::SEALED),
        ("sealed data file", |d| d.trailer.flags &= !flags::DATA),
        ("not a layer", |d| d.header.flags &= !flags::DATA),
        ("not sorted", |d| d.entries.swap(0, 1)),
        ("overlap", |d| d.entries[1] = Segment::data(7, 1, 16)),
        ("overlap", |d| d.entries[1] = d.entries[0]),
        ("length is zero", |d| d.entries[0] = Segment::data(0, 0, 8)),
        ("inside the header", |d| {
            d.entries[0] = Segment::data(0, 8, 7)
        }),
        ("inside the header", |d| {
            d.entries[1] = Segment::zeroed(8, 8, 0)
        }),
        ("past the start of the index", |d| {
            d.entries[0] = Segment::data(0, 8, 17)
        }),
        ("past the start of the index", |d| {
            d.entries[1] = Segment::zeroed(8, 8, 25)
        }),
        ("past the start of the index", |d| {
            d.entries[0] = Segment::data(0, 8, (1 << 55) - 1);
        }),
        ("past the largest disk", |d| {
            d.entries[1] = Segment::data((1 << 50) - 2, 8, 8);
        }),
    ];
    for (reason, spoil) in cases {
        let mut draft = Draft::new();
        spoil(&mut draft);
        let error = open(&draft.bytes()).expect_err(reason);
        assert!(error.contains(reason), "wanted {reason:?}, got {error:?}");
    }
}

#[test]
fn what_the_reference_accepts_is_accepted() {
    type Change = fn(&mut Draft);
    let cases: &[(&str, usize, Change)] = &[
        ("padding", 2, |d| {
            d.entries.push(Segment::PADDING);
            d.trailer.index_size += 1;
        }),
        ("entry beyond the virtual size is never read", 1, |d| {
            d.trailer.virtual_size_bytes = 4096
        }),
        ("no size", 2, |d| d.trailer.virtual_size_bytes = 0),
        ("unsealed header of an in-place seal", 2, |d| {
            d.header.flags &= !flags::SEALED
        }),
        ("hybrid bit", 2, |d| d.trailer.flags |= flags::HYBRID),
    ];
    for (name, expected, change) in cases {
        let mut draft = Draft::new();
        change(&mut draft);
        assert_eq!(open(&draft.bytes()).expect(name).len(), *expected, "{name}");
    }
}

#[test]
fn an_entry_across_the_virtual_size_is_clipped() {
    let mut draft = Draft::new();
    draft.trailer.virtual_size_bytes = 2048;
    let entries = open(&draft.bytes()).unwrap();
    assert_eq!((entries.len(), entries[0].length()), (1, 4));
}

#[test]
fn short_and_foreign_files_are_refused() {
    let whole = Draft::new().bytes();
    for length in [0, 1, 511, BLOCK_BYTES, 2 * BLOCK_BYTES - 1, whole.len() - 1] {
        open(&whole[..length]).expect_err("a cut file");
    }
    let mut magic = whole.clone();
    magic[9] ^= 1;
    assert!(open(&magic)
        .unwrap_err()
        .contains("no LSMT magic in the header"));
    let mut size = whole.clone();
    size[24] = 0;
    assert!(open(&size).unwrap_err().contains("struct of 256 bytes"));
    let mut version = whole.clone();
    version[132] = 2;
    assert!(open(&version).unwrap_err().contains("version 2.1"));
    assert!(RoLayer::open(&Opener::default(), Path::new("/")).is_err());
}

/// Any single flipped byte either opens or fails; it never panics, and what
/// opens still points into the data.
#[test]
fn flipped_bytes_never_escape_the_data() {
    let whole = Draft::new().bytes();
    let data_end = 8 + DATA_SECTORS;
    for position in 0..whole.len() {
        for mask in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[position] ^= mask;
            let Ok(entries) = open(&bytes) else { continue };
            for entry in entries {
                assert!(
                    entry.moffset() >= 8 && entry.mend() <= data_end + 8,
                    "at {position}"
                );
            }
        }
    }
}
