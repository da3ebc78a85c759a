//! Compressed and tar-wrapped layers: what is written reads back, what is damaged
//! is refused, and a wrong copy of a block is read again.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod common;

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use common::{content, encoding, encodings, layer_bytes, open_and_read, read_all, Memory};
use lsmt::zfile::format::{flags, Head, BLOCK_BYTES, MAX_BLOCKS};
use lsmt::zfile::{crc, Algorithm, Compression};
use lsmt::{Blob, Opener, RoLayer};

const LZ4: Option<(Algorithm, u32)> = Some((Algorithm::Lz4, 4096));

#[test]
fn every_encoding_reads_back() {
    // Not a whole number of any block size.
    let bytes = content(5, 300_000 / 512 * 512);
    // More than one batch of the writer.
    let long = content(6, 5_000_000 / 512 * 512);
    let batches = encoding(Some((Algorithm::Zstd, 65_536)), false);
    let cases = (encodings().into_iter()).map(|encoding| (encoding, &bytes));
    for (encoding, bytes) in cases.chain([(batches, &long)]) {
        let found = open_and_read(layer_bytes(encoding, bytes)).unwrap();
        let joined: Vec<u8> = found.iter().flat_map(|(_, data)| data.clone()).collect();
        assert!(joined == *bytes, "{encoding:?}");
        assert!(found.last().unwrap().0.is_zeroed());
    }
}

#[test]
fn compression_saves_space_and_the_wrappers_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let bytes = vec![7; 1 << 20];
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        common::write_layer(&path, encoding(Some((algorithm, 65_536)), true), &bytes);
        assert!(std::fs::metadata(&path).unwrap().len() < 64 << 10);
        let (layer, _) = RoLayer::open(&Opener::default(), &path).unwrap();
        let head = layer.wrapping().zfile.clone().unwrap();
        assert_eq!((head.algorithm, head.block_bytes), (algorithm, 65_536));
        assert_eq!(layer.wrapping().tar_offset, Some(1536));
    }
}

#[test]
fn block_sizes_are_powers_of_two_within_bounds() {
    for bad in [0, 1, 2048, 4095, 5000, 12_288, 131_072, u32::MAX] {
        assert_eq!(Compression::new(Algorithm::Lz4, bad), None);
    }
}

#[test]
fn an_unfinished_layer_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let options = lsmt::LayerOptions {
        encoding: encoding(LZ4, true),
        ..lsmt::LayerOptions::new(1 << 20)
    };
    let mut writer = lsmt::LayerWriter::create(&path, &options).unwrap();
    writer.append_data(0, &content(1, 1 << 20)).unwrap();
    drop(writer);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A compressed layer taken apart, to be spoiled in one way and put together.
struct Draft {
    blocks: Vec<u8>,
    table: Vec<u8>,
    head: Head,
    is_overwritten: bool,
}

impl Draft {
    fn new() -> Draft {
        let bytes = layer_bytes(encoding(LZ4, false), &content(1, 40_960));
        let head: [u8; BLOCK_BYTES] = bytes[..BLOCK_BYTES].try_into().unwrap();
        let head = Head::decode(&head, "header").unwrap();
        let index = head.index_offset as usize;
        Draft {
            blocks: bytes[BLOCK_BYTES..index].to_vec(),
            table: bytes[index..bytes.len() - BLOCK_BYTES].to_vec(),
            head,
            is_overwritten: true,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut header = self.head.clone();
        if !self.is_overwritten {
            header.flags &= !flags::OVERWRITTEN;
            (header.index_offset, header.blocks, header.index_crc) = (0, 0, 0);
        }
        let trailer = Head {
            flags: self.head.flags & !flags::HEADER & !flags::OVERWRITTEN | flags::SEALED,
            ..self.head.clone()
        };
        let parts: [&[u8]; 4] = [
            &header.encode(),
            &self.blocks,
            &self.table,
            &trailer.encode(),
        ];
        parts.concat()
    }

    fn set_entry(&mut self, position: usize, stored: u32) {
        self.table[position * 4..][..4].copy_from_slice(&stored.to_le_bytes());
        self.head.index_crc = crc::raw(0, &self.table);
    }
}

#[test]
fn bad_heads_and_tables_are_refused() {
    type Spoil = fn(&mut Draft);
    let cases: &[(&str, Spoil)] = &[
        ("does not fit", |d| d.head.index_offset = u64::MAX - 3),
        ("does not fit", |d| d.head.index_offset = 511),
        ("cannot hold", |d| d.head.blocks += 1),
        ("cannot hold", |d| d.head.original_bytes = u64::MAX),
        ("does not fit", |d| {
            d.head.blocks = MAX_BLOCKS + 1;
            d.head.original_bytes = d.head.blocks * 4096;
        }),
        ("does not fit", |d| {
            d.head.blocks = u64::MAX / 4096;
            d.head.original_bytes = d.head.blocks * 4096;
        }),
        ("no content", |d| d.set_entry(3, 0)),
        ("no content", |d| d.set_entry(3, 4)),
        ("longer than its content", |d| {
            d.set_entry(3, 4096 + 32 + 512 + 5)
        }),
        ("longer than its content", |d| d.set_entry(3, u32::MAX)),
        ("into the jump table", |d| d.set_entry(9, 4600)),
        ("digest of the jump table", |d| d.head.index_crc ^= 1),
        ("block size", |d| d.head.block_bytes = 2048),
        ("block size", |d| d.head.block_bytes = 1 << 20),
        ("block size", |d| d.head.block_bytes = 5000),
        ("flags", |d| d.head.flags &= !flags::DATA),
        ("compressed jump table", |d| {
            d.head.flags |= flags::INDEX_COMPRESSED
        }),
        ("damaged", |d| d.blocks[100] ^= 1),
    ];
    for (reason, spoil) in cases {
        for is_overwritten in [true, false] {
            let mut draft = Draft::new();
            draft.is_overwritten = is_overwritten;
            spoil(&mut draft);
            let error = open_and_read(draft.bytes()).expect_err(reason);
            assert!(error.contains(reason), "wanted {reason:?}, got {error:?}");
        }
    }
}

#[test]
fn both_kinds_of_head_are_read() {
    let mut draft = Draft::new();
    let expected = open_and_read(draft.bytes()).unwrap();
    // A complete header needs no trailer, and does not mind what follows.
    let mut bytes = draft.bytes();
    bytes.truncate(bytes.len() - BLOCK_BYTES);
    assert_eq!(open_and_read(bytes.clone()).unwrap(), expected);
    bytes.extend_from_slice(&[9; 700]);
    assert_eq!(open_and_read(bytes).unwrap(), expected);
    // Without it the trailer must be the last block.
    draft.is_overwritten = false;
    assert_eq!(open_and_read(draft.bytes()).unwrap(), expected);
    let mut bytes = draft.bytes();
    bytes.push(0);
    assert!(open_and_read(bytes).unwrap_err().contains("trailer"));
    // Without the digest flag neither digest nor table checksum count.
    draft.is_overwritten = true;
    draft.head.flags &= !flags::DIGEST;
    draft.head.index_crc = 1;
    assert_eq!(open_and_read(draft.bytes()).unwrap(), expected);
}

/// Raw bytes of a header, spoiled where [`Head`] cannot say it.
#[test]
fn foreign_kinds_are_named() {
    let whole = layer_bytes(encoding(LZ4, false), &content(1, 8192));
    let cases = [
        (76, 0, "compression 0"),
        (76, 9, "compression 9"),
        (78, 1, "dictionary"),
        (84, 1, "dictionary"),
        (24, 1, "struct of 1 bytes"),
    ];
    for (at, value, reason) in cases {
        let mut bytes = whole.clone();
        bytes[at] = value;
        assert!(open_and_read(bytes.clone()).unwrap_err().contains("digest"));
        // Without the digest flag the field itself is seen.
        bytes[32] &= !(flags::DIGEST as u8);
        let error = open_and_read(bytes).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_block_without_checksum_is_still_checked_by_its_length() {
    let content = content(3, 4096);
    let mut stored = lz4_flex::block::compress(&content);
    let head = |stored: &[u8]| Head {
        flags: flags::HEADER | flags::DATA | flags::OVERWRITTEN,
        index_offset: (BLOCK_BYTES + stored.len()) as u64,
        blocks: 1,
        original_bytes: 4096,
        index_crc: 0,
        block_bytes: 4096,
        algorithm: Algorithm::Lz4,
        verify: false,
    };
    let read = |stored: &[u8]| {
        let length = (stored.len() as u32).to_le_bytes();
        let parts: [&[u8]; 3] = [&head(stored).encode(), stored, &length];
        let opener = Opener::default();
        let key = opener.cache().fresh_key();
        let opened = opener.unwrap(Arc::new(Memory(parts.concat())), key);
        let (blob, _) = opened.unwrap();
        let mut bytes = vec![0; 4096];
        blob.read_exact_at(&mut bytes, 0).map(|()| bytes)
    };
    assert_eq!(read(&stored).unwrap(), content);
    stored.truncate(stored.len() / 2);
    let error = read(&stored).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    let shorter = lz4_flex::block::compress(&content[..4095]);
    assert!(read(&shorter)
        .unwrap_err()
        .to_string()
        .contains("4095 bytes"));
}

#[test]
fn reads_end_with_the_content() {
    let opener = Opener::default();
    let bytes = layer_bytes(encoding(LZ4, false), &content(1, 8192));
    let key = opener.cache().fresh_key();
    let (blob, _) = opener.unwrap(Arc::new(Memory(bytes)), key).unwrap();
    let size = blob.size_bytes();
    let mut two = [0; 2];
    blob.read_exact_at(&mut two, size - 2).unwrap();
    blob.read_exact_at(&mut [], size).unwrap();
    for offset in [size - 1, size, size + 1, u64::MAX - 1] {
        let error = blob.read_exact_at(&mut two, offset).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}

/// A blob that spoils the first few reads of blocks.
struct Flaky {
    good: Memory,
    bad_reads: AtomicUsize,
    distrusted: AtomicUsize,
    is_copy: bool,
}

impl Blob for Flaky {
    fn size_bytes(&self) -> u64 {
        self.good.size_bytes()
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.good.read_exact_at(buffer, offset)?;
        let is_block = (2048..self.size_bytes() / 2).contains(&offset);
        let spoil = self.bad_reads.load(Ordering::Relaxed) > 0 && is_block;
        if spoil {
            self.bad_reads.fetch_sub(1, Ordering::Relaxed);
            buffer[0] ^= 0xff;
        }
        Ok(())
    }

    fn distrust(&self, _offset: u64, _length_bytes: u64) -> bool {
        self.distrusted.fetch_add(1, Ordering::Relaxed);
        self.is_copy
    }
}

#[test]
fn a_wrong_copy_of_a_block_is_read_again_a_few_times() {
    let bytes = content(1, 40_960);
    let layer = layer_bytes(encoding(LZ4, true), &bytes);
    for (is_copy, bad_reads, works) in [
        (true, 0, true),
        (true, 1, true),
        (true, 3, true),
        (true, 100, false),
        (false, 1, false),
    ] {
        let flaky = Arc::new(Flaky {
            good: Memory(layer.clone()),
            bad_reads: AtomicUsize::new(bad_reads),
            distrusted: AtomicUsize::new(0),
            is_copy,
        });
        let result = read_all(&Opener::default(), flaky.clone());
        assert_eq!(result.is_ok(), works, "{bad_reads} bad reads");
        let distrusted = flaky.distrusted.load(Ordering::Relaxed);
        assert!(distrusted <= 5, "tries are bounded");
        assert_eq!(distrusted > 0, bad_reads > 0);
    }
}

#[test]
fn a_full_cache_changes_nothing_and_stays_in_its_bounds() {
    let bytes = content(9, 2 << 20);
    let opener = Opener::new(64 << 10);
    let layer: Arc<dyn Blob> = Arc::new(Memory(layer_bytes(encoding(LZ4, false), &bytes)));
    for _ in 0..2 {
        let found = read_all(&opener, layer.clone()).unwrap();
        let joined: Vec<u8> = found.iter().flat_map(|(_, data)| data.clone()).collect();
        assert!(joined == bytes);
        assert!(opener.cache().used_bytes() <= 64 << 10);
    }
    assert!(opener.cache().used_bytes() > 0);
}

#[test]
fn tar_wrappers_of_other_writers_are_read() {
    let layer = layer_bytes(encoding(LZ4, false), &content(1, 8192));
    let expected = open_and_read(layer.clone()).unwrap();
    let build = |gnu: bool, long_name: bool| {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = if gnu {
            tar::Header::new_gnu()
        } else {
            tar::Header::new_ustar()
        };
        header.set_size(layer.len() as u64);
        header.set_mode(0o444);
        if long_name {
            let comment = "x".repeat(900);
            let records = [("comment", comment.as_bytes()), ("mtime", b"1.5")];
            builder.append_pax_extensions(records).unwrap();
        }
        builder
            .append_data(&mut header, "overlaybd.commit", layer.as_slice())
            .unwrap();
        builder.into_inner().unwrap()
    };
    for (gnu, long_name) in [(false, false), (true, false), (false, true)] {
        let mut bytes = build(gnu, long_name);
        assert_eq!(open_and_read(bytes.clone()).unwrap(), expected);
        // The end of the archive may be missing or followed by more.
        bytes.extend_from_slice(&[1; 3000]);
        assert_eq!(open_and_read(bytes.clone()).unwrap(), expected);
        let end = bytes.len() - 3000 - 1024;
        bytes.truncate(end);
        assert_eq!(open_and_read(bytes).unwrap(), expected);
    }
}

#[test]
fn bad_tar_wrappers_are_refused() {
    let whole = layer_bytes(encoding(None, true), &content(1, 8192));
    let mut cut = whole.clone();
    cut.truncate(6000);
    assert!(open_and_read(cut).unwrap_err().contains("promises"));
    let mut unfinished = whole.clone();
    unfinished[257..262].copy_from_slice(b"xxtar");
    assert!(open_and_read(unfinished)
        .unwrap_err()
        .contains("unfinished"));
    // A header whose checksum is wrong is no tar header at all.
    let mut chance = whole.clone();
    chance[0] ^= 1;
    assert!(open_and_read(chance).unwrap_err().contains("LSMT magic"));
    let mut folder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::Directory);
    header.set_size(0);
    folder
        .append_data(&mut header, "etc/", io::empty())
        .unwrap();
    let bytes = folder.into_inner().unwrap();
    assert!(open_and_read(bytes).unwrap_err().contains("wraps no layer"));
    // Extended headers without end take bounded memory and end in an error.
    let mut endless = Vec::new();
    while endless.len() < 1 << 20 {
        let mut builder = tar::Builder::new(Vec::new());
        let long = "y".repeat(30_000);
        builder
            .append_pax_extensions([("comment", long.as_bytes())])
            .unwrap();
        let bytes = builder.into_inner().unwrap();
        endless.extend_from_slice(&bytes[..bytes.len() - 1024]);
    }
    open_and_read(endless).unwrap_err();
}

/// The wrapper the reference expects: one record, 1536 bytes before the layer.
#[test]
fn a_written_wrapper_has_the_shape_of_the_reference() {
    let bytes = layer_bytes(encoding(None, true), &content(1, 8192));
    let layer = layer_bytes(encoding(None, false), &content(1, 8192));
    assert_eq!(&bytes[..14], b"overlaybd.pax\0");
    let record = format!("14 size={}\n", layer.len());
    let record = record.replacen("14", &record.len().to_string(), 1);
    assert_eq!(&bytes[512..512 + record.len()], record.as_bytes());
    assert_eq!(bytes[156], b'x');
    assert_eq!(&bytes[1024..1040], b"overlaybd.commit");
    assert_eq!(bytes[1024 + 156], b'0');
    assert_eq!(bytes.len() % 512, 0);
    assert_eq!(bytes.len(), 1536 + layer.len().next_multiple_of(512) + 1024);
}
