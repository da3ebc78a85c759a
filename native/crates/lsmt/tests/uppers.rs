//! What the three layouts of an upper promise, and how deep a stack may be.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use common::{content, encoding, flat, pair, write_layer, LAYOUTS};
use lsmt::format::{flags, Block, BLOCK_BYTES, NIL_UUID};
use lsmt::lowers::Lowers;
use lsmt::{Opener, Stack, StackError, StackSpec, UpperError, UpperLayout};

const DISK_BYTES: u64 = 1 << 20;

fn spec(folder: &Path, lowers: &[PathBuf], layout: UpperLayout) -> StackSpec {
    StackSpec {
        lowers: lowers.to_vec(),
        upper: Some(pair(folder, "upper")),
        upper_layout: layout,
        virtual_size_bytes: Some(DISK_BYTES),
    }
}

fn open(spec: &StackSpec) -> Stack {
    Stack::open(&Opener::default(), spec).unwrap()
}

fn data_bytes(stack: &Stack) -> u64 {
    stack.upper_stats().unwrap().data_bytes
}

#[test]
fn only_the_log_grows_by_overwrites() {
    for layout in LAYOUTS {
        let folder = tempfile::tempdir().unwrap();
        let stack = open(&spec(folder.path(), &[], layout));
        stack.write_at(&content(1, 65_536), 4096).unwrap();
        let before = data_bytes(&stack);
        for round in 0..10 {
            stack
                .write_at(&content(round, 40_000), 8192 + u64::from(round) * 512)
                .unwrap();
        }
        let grown = data_bytes(&stack) - before;
        assert_eq!(
            grown > 0,
            layout == UpperLayout::Append,
            "{layout:?}: {grown}"
        );
        let expected = flat(&stack);
        stack.flush().unwrap();
        drop(stack);
        // The files say the layout themselves, whatever is asked for.
        let again = open(&spec(folder.path(), &[], UpperLayout::Append));
        assert_eq!(again.upper_layout(), Some(layout));
        assert!(flat(&again) == expected, "{layout:?}");
    }
}

#[test]
fn a_hybrid_upper_appends_what_has_no_place_yet() {
    let folder = tempfile::tempdir().unwrap();
    let stack = open(&spec(folder.path(), &[], UpperLayout::Hybrid));
    stack.write_at(&[1; 4096], 4096).unwrap();
    stack.write_at(&[2; 4096], 16_384).unwrap();
    stack.discard(4096, 2048).unwrap();
    let before = data_bytes(&stack);
    stack.write_at(&[3; 20_480], 0).unwrap();
    // 2048 + 4096 bytes keep their places.
    assert_eq!(data_bytes(&stack) - before, 20_480 - 6144);
    let mut expected = vec![0; DISK_BYTES as usize];
    expected[..20_480].fill(3);
    assert!(flat(&stack) == expected);
}

/// The reference loses such discards at the next open, and exposes zeros around a
/// short write.
#[test]
fn a_sparse_upper_hides_lower_layers_for_good() {
    let folder = tempfile::tempdir().unwrap();
    let lower = folder.path().join("lower");
    write_layer(&lower, encoding(None, false), &content(7, 512 << 10));
    let lowers = [lower];
    let stack = open(&spec(folder.path(), &lowers, UpperLayout::Sparse));
    let mut expected = flat(&stack);
    for (offset, length) in [(8192, 4096), (20_000, 10_000), (100_352, 512), (300_000, 5)] {
        stack.discard(offset, length).unwrap();
        expected[offset as usize..(offset + length) as usize].fill(0);
    }
    for (offset, length) in [(40_960, 512), (70_001, 3), (DISK_BYTES - 512, 512)] {
        let bytes = content(offset as u32, length);
        stack.write_at(&bytes, offset).unwrap();
        expected[offset as usize..offset as usize + length].copy_from_slice(&bytes);
    }
    assert!(flat(&stack) == expected);
    stack.flush().unwrap();
    drop(stack);
    let stack = open(&spec(folder.path(), &lowers, UpperLayout::Sparse));
    assert!(flat(&stack) == expected, "after opening again");
    let sealed = stack.seal(&pair(folder.path(), "next"), true).unwrap();
    assert_eq!(stack.upper_layout(), Some(UpperLayout::Sparse));
    assert!(flat(&stack) == expected, "after sealing");
    let lowers = [lowers[0].clone(), sealed.path];
    let opened = Lowers::open(&Opener::default(), &lowers).unwrap();
    assert_eq!(
        opened.layers()[1].trailer().flags & flags::SPARSE,
        flags::SPARSE
    );
    assert!(flat(&Stack::from_lowers(opened, DISK_BYTES)) == expected);
}

#[test]
fn a_discard_frees_the_room_of_a_sparse_upper() {
    let folder = tempfile::tempdir().unwrap();
    let spec = spec(folder.path(), &[], UpperLayout::Sparse);
    let stack = open(&spec);
    let data = &spec.upper.as_ref().unwrap().data;
    let used = || std::fs::metadata(data).unwrap().blocks();
    let empty = used();
    stack.write_at(&content(1, 1 << 19), 0).unwrap();
    stack.flush().unwrap();
    assert!(used() >= empty + 1024);
    stack.discard(0, 1 << 19).unwrap();
    stack.flush().unwrap();
    assert!(used() <= empty + 8);
    assert!(stack.reads_zero(0, DISK_BYTES));
}

#[test]
fn a_sparse_upper_does_without_an_index_file_but_not_without_a_size() {
    let folder = tempfile::tempdir().unwrap();
    let spec = spec(folder.path(), &[], UpperLayout::Sparse);
    let stack = open(&spec);
    stack.write_at(&content(1, 5000), 777).unwrap();
    let expected = flat(&stack);
    stack.flush().unwrap();
    drop(stack);
    let upper = spec.upper.as_ref().unwrap();
    std::fs::write(&upper.index, "").unwrap();
    assert!(flat(&open(&spec)) == expected);
    let nowhere = StackSpec {
        upper: Some(pair(folder.path(), "other")),
        virtual_size_bytes: None,
        ..spec
    };
    let error = Stack::open(&Opener::default(), &nowhere).err().unwrap();
    assert!(
        matches!(error, StackError::Upper(UpperError::NoSize { .. })),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

/// The reference's tools make every upper but the first with a size of 0.
#[test]
fn an_upper_without_a_size_takes_that_of_the_layers_below() {
    let folder = tempfile::tempdir().unwrap();
    let lower = folder.path().join("lower");
    write_layer(&lower, encoding(None, false), &content(7, 512 << 10));
    let header = Block {
        flags: flags::HEADER | flags::DATA,
        index_offset: 0,
        index_size: 0,
        virtual_size_bytes: 0,
        uuid: lsmt::format::new_uuid(),
        parent_uuid: NIL_UUID.to_owned(),
        user_tag: "kept".to_owned(),
    };
    let index_header = Block {
        flags: flags::HEADER,
        index_offset: BLOCK_BYTES as u64,
        ..header.clone()
    };
    let upper = pair(folder.path(), "upper");
    let mut data = header.encode().to_vec();
    data.extend_from_slice(&[9; 512]);
    std::fs::write(&upper.data, data).unwrap();
    let mut index = index_header.encode().to_vec();
    index.extend_from_slice(&lsmt::format::Segment::data(1, 1, 8).encode());
    std::fs::write(&upper.index, index).unwrap();
    let spec = StackSpec {
        lowers: vec![lower],
        upper: Some(upper.clone()),
        upper_layout: UpperLayout::default(),
        virtual_size_bytes: None,
    };
    let stack = open(&spec);
    assert_eq!(stack.virtual_size_bytes(), DISK_BYTES);
    assert_eq!(flat(&stack)[512..1024], [9; 512]);
    drop(stack);
    for (path, part_flags) in [
        (&upper.data, header.flags),
        (&upper.index, index_header.flags),
    ] {
        let bytes = std::fs::read(path).unwrap();
        let block = Block::decode(bytes[..BLOCK_BYTES].try_into().unwrap(), "header").unwrap();
        assert_eq!(block.virtual_size_bytes, DISK_BYTES);
        assert_eq!((block.flags, block.user_tag.as_str()), (part_flags, "kept"));
    }
    assert_eq!(flat(&open(&spec))[512..1024], [9; 512]);
}

#[test]
fn a_stack_has_up_to_255_layers() {
    let folder = tempfile::tempdir().unwrap();
    let mut expected = vec![0; DISK_BYTES as usize];
    let mut lowers = Vec::new();
    for number in 0..256_usize {
        let path = folder.path().join(format!("{number}"));
        let options = lsmt::LayerOptions::new(DISK_BYTES);
        let mut writer = lsmt::LayerWriter::create(&path, &options).unwrap();
        let bytes = content(number as u32, 4096);
        writer.append_data(number as u64 * 4, &bytes).unwrap();
        writer.finish(false).unwrap();
        if number < 255 {
            expected[number * 2048..][..4096].copy_from_slice(&bytes);
        }
        lowers.push(path);
    }
    let error = Lowers::open(&Opener::default(), &lowers).err().unwrap();
    assert!(error.to_string().contains("commit some of them"), "{error}");
    let deepest = spec(folder.path(), &lowers[..255], UpperLayout::Append);
    let stack = open(&deepest);
    assert!(flat(&stack) == expected);
    stack.write_at(&[5; 700], 300).unwrap();
    expected[300..1000].fill(5);
    let error = stack.seal(&pair(folder.path(), "next"), true).unwrap_err();
    assert!(error.to_string().contains("256 layers exceed"), "{error}");
    assert!(flat(&stack) == expected, "goes on as before");
    assert!(!pair(folder.path(), "next").data.exists());
    // Compacted it goes on growing.
    let output = folder.path().join("merged");
    common::commit(&lowers[..200], &output, encoding(None, true));
    stack.replace(&lowers[..200], &output).unwrap();
    assert!(flat(&stack) == expected);
    stack.seal(&pair(folder.path(), "next"), true).unwrap();
    assert!(flat(&stack) == expected);
}
