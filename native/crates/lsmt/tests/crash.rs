//! What a crash, a second user or a full disk may do to an upper.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use lsmt::format::{Segment, BLOCK_BYTES, ENTRY_BYTES};
use lsmt::{
    CommitOptions, Lowers, Opener, Stack, StackError, StackSpec, Upper, UpperError, UpperLayout,
    UpperPaths,
};

const DISK_BYTES: u64 = 64 << 20;

fn paths(folder: &Path, name: &str) -> UpperPaths {
    UpperPaths {
        data: folder.join(format!("{name}.data")),
        index: folder.join(format!("{name}.index")),
    }
}

fn open(upper: &UpperPaths) -> Result<Stack, StackError> {
    Stack::open(
        &Opener::default(),
        &StackSpec {
            lowers: Vec::new(),
            upper: Some(upper.clone()),
            upper_layout: UpperLayout::default(),
            virtual_size_bytes: Some(DISK_BYTES),
        },
    )
}

fn read(stack: &Stack, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; length];
    assert_eq!(stack.read_at(&mut bytes, offset).unwrap(), length);
    bytes
}

fn size(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

fn truncate(path: &Path, size_bytes: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(size_bytes).unwrap();
}

#[test]
fn records_reach_the_index_only_with_a_flush() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    stack.write_at(&[1; 4096], 0).unwrap();
    assert_eq!(size(&upper.index), BLOCK_BYTES as u64);
    stack.flush().unwrap();
    assert_eq!(size(&upper.index), (BLOCK_BYTES + ENTRY_BYTES) as u64);
    stack.write_at(&[2; 4096], 0).unwrap();
    drop(stack);
    let stack = open(&upper).unwrap();
    assert_eq!(
        read(&stack, 0, 4096),
        [1; 4096],
        "the unflushed overwrite is gone whole"
    );
}

#[test]
fn pending_records_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    // Every other sector, so that no two records join.
    for sector in 0..65_537_u64 {
        stack
            .write_at(&[1; 512], sector * 1024 % DISK_BYTES)
            .unwrap();
    }
    assert!(
        size(&upper.index) > BLOCK_BYTES as u64,
        "the bound forced a flush"
    );
}

#[test]
fn a_truncated_data_file_loses_only_what_it_held() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    stack.write_at(&[1; 4096], 0).unwrap();
    stack.write_at(&[2; 4096], 1 << 20).unwrap();
    stack.flush().unwrap();
    drop(stack);
    truncate(&upper.data, size(&upper.data) - 512);
    assert_eq!(
        Upper::check(&upper.data, &upper.index).unwrap(),
        ENTRY_BYTES as u64
    );
    let stack = open(&upper).unwrap();
    assert_eq!(stack.dropped_bytes(), ENTRY_BYTES as u64);
    assert_eq!(read(&stack, 0, 4096), [1; 4096]);
    assert_eq!(read(&stack, 1 << 20, 4096), [0; 4096]);
    stack.write_at(&[3; 512], 1 << 20).unwrap();
    stack.flush().unwrap();
    drop(stack);
    let stack = open(&upper).unwrap();
    assert_eq!(stack.dropped_bytes(), 0);
    assert_eq!(read(&stack, 1 << 20, 512), [3; 512]);
}

#[test]
fn every_torn_index_length_opens_to_a_prefix() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    for block in 0..4_u64 {
        stack
            .write_at(&[block as u8 + 1; 512], block * 4096)
            .unwrap();
    }
    stack.flush().unwrap();
    drop(stack);
    let index = std::fs::read(&upper.index).unwrap();
    for length in (BLOCK_BYTES..=index.len()).rev() {
        std::fs::write(&upper.index, &index[..length]).unwrap();
        let stack = open(&upper).unwrap();
        let whole = (length - BLOCK_BYTES) / ENTRY_BYTES;
        for block in 0..4 {
            let expected = if block < whole { block as u8 + 1 } else { 0 };
            assert_eq!(read(&stack, block as u64 * 4096, 512), [expected; 512]);
        }
    }
}

#[test]
fn damage_in_the_middle_of_the_log_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    stack.write_at(&[1; 512], 0).unwrap();
    stack.write_at(&[2; 512], 8192).unwrap();
    stack.flush().unwrap();
    drop(stack);
    let file = OpenOptions::new().write(true).open(&upper.index).unwrap();
    let cases = [
        ([0; ENTRY_BYTES], "middle"),
        (Segment::data(0, 0, 8).encode(), "length is zero"),
        (Segment::data(0, 1, 7).encode(), "inside the header"),
    ];
    for (record, reason) in cases {
        file.write_all_at(&record, BLOCK_BYTES as u64).unwrap();
        let error = open(&upper).err().unwrap().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

/// Found by the model test: after a crash left half a sector of data, flushed
/// discards must not count as pointing past the end of the data file.
#[test]
fn discards_after_a_torn_data_tail_survive_the_next_open() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    stack.write_at(&[1; 4096], 0).unwrap();
    stack.flush().unwrap();
    drop(stack);
    truncate(&upper.data, size(&upper.data) + 700);
    let stack = open(&upper).unwrap();
    stack.discard(0, 2048).unwrap();
    stack.flush().unwrap();
    drop(stack);
    let stack = open(&upper).unwrap();
    assert_eq!(stack.dropped_bytes(), 0);
    assert_eq!(read(&stack, 0, 4096), [[0; 2048], [1; 2048]].concat());
}

/// A failed write may leave bytes past the good data; the trailer of a seal must
/// still be the last block of the file.
#[test]
fn a_seal_cuts_garbage_off() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    stack.write_at(&[1; 4096], 0).unwrap();
    truncate(&upper.data, size(&upper.data) + (1 << 20));
    stack.seal(&paths(folder.path(), "v"), true).unwrap();
    let (_, entries) = lsmt::RoLayer::open(&Opener::default(), &upper.data).unwrap();
    assert_eq!(entries.len(), 1);
}

#[test]
fn padding_in_the_middle_of_the_log_is_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    stack.write_at(&[1; 512], 0).unwrap();
    stack.flush().unwrap();
    drop(stack);
    let mut index = std::fs::read(&upper.index).unwrap();
    let record = index.split_off(BLOCK_BYTES);
    index.extend_from_slice(&Segment::PADDING.encode());
    index.extend_from_slice(&record);
    std::fs::write(&upper.index, index).unwrap();
    assert_eq!(read(&open(&upper).unwrap(), 0, 512), [1; 512]);
}

#[test]
fn an_upper_has_one_user() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    let error = open(&upper).err().unwrap();
    assert!(
        matches!(error, StackError::Upper(UpperError::Busy { .. })),
        "{error}"
    );
    drop(stack);
    open(&upper).unwrap();
}

#[test]
fn a_sealed_layer_is_not_an_upper_again() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    stack.write_at(&[1; 512], 0).unwrap();
    stack.flush().unwrap();
    let index = std::fs::read(&upper.index).unwrap();
    stack.seal(&paths(folder.path(), "v"), false).unwrap();
    drop(stack);
    let incomplete = open(&upper).err().unwrap();
    assert!(matches!(
        incomplete,
        StackError::Upper(UpperError::Incomplete { .. })
    ));
    // As after a crash between the seal and the removal of the index file.
    std::fs::write(&upper.index, index).unwrap();
    let sealed = open(&upper).err().unwrap();
    assert!(
        matches!(sealed, StackError::Upper(UpperError::Sealed { .. })),
        "{sealed}"
    );
}

#[test]
fn files_of_two_uppers_do_not_mix() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (paths(folder.path(), "1"), paths(folder.path(), "2"));
    drop((open(&one).unwrap(), open(&two).unwrap()));
    let mixed = UpperPaths {
        data: one.data.clone(),
        index: two.index.clone(),
    };
    let error = open(&mixed).err().unwrap();
    assert!(
        matches!(error, StackError::Upper(UpperError::Mismatch { .. })),
        "{error}"
    );
}

#[test]
fn an_interrupted_creation_is_created_again() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    std::fs::write(&upper.data, [0; 100]).unwrap();
    let stack = open(&upper).unwrap();
    stack.write_at(&[1; 512], 0).unwrap();
    stack.flush().unwrap();
    drop(stack);
    std::fs::remove_file(&upper.index).unwrap();
    let error = open(&upper).err().unwrap();
    assert!(
        matches!(error, StackError::Upper(UpperError::Incomplete { .. })),
        "{error}"
    );
}

#[test]
fn a_failed_seal_leaves_the_stack_working() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    stack.write_at(&[1; 512], 0).unwrap();
    let nowhere = paths(&folder.path().join("absent"), "v");
    stack.seal(&nowhere, true).unwrap_err();
    let used = paths(folder.path(), "w");
    let other = open(&used).unwrap();
    other.write_at(&[9; 512], 0).unwrap();
    other.flush().unwrap();
    drop(other);
    let error = stack.seal(&used, true).unwrap_err();
    assert!(
        matches!(error, StackError::FreshUpperUsed { .. }),
        "{error}"
    );
    assert!(used.data.exists(), "a foreign upper is left alone");
    stack.write_at(&[2; 512], 512).unwrap();
    stack.flush().unwrap();
    drop(stack);
    let stack = open(&upper).unwrap();
    assert_eq!(read(&stack, 0, 1024), [[1; 512], [2; 512]].concat());
}

#[test]
fn long_ranges_are_split_and_joined_right() {
    let folder = tempfile::tempdir().unwrap();
    let upper = paths(folder.path(), "u");
    let stack = open(&upper).unwrap();
    let long: Vec<u8> = (0..20_u32 << 20).map(|at| (at >> 9) as u8).collect();
    stack.write_at(&long, 1536).unwrap();
    stack.discard(5 << 20, 10 << 20).unwrap();
    let mut expected = long.clone();
    expected[(5 << 20) - 1536..(15 << 20) - 1536].fill(0);
    assert_eq!(read(&stack, 1536, long.len()), expected);
    stack.seal(&paths(folder.path(), "v"), false).unwrap();
    assert_eq!(read(&stack, 1536, long.len()), expected);
    let flat = folder.path().join("flat");
    let lowers = Lowers::open(&Opener::default(), &stack.lower_paths()).unwrap();
    let layer = lsmt::commit(&lowers, &flat, &CommitOptions::default()).unwrap();
    assert_eq!(layer.stored_bytes, 10 << 20);
}

#[test]
fn writes_during_seals_are_never_lost() {
    let folder = tempfile::tempdir().unwrap();
    let stack = Arc::new(open(&paths(folder.path(), "u0")).unwrap());
    let writers: Vec<_> = (0..3_u64)
        .map(|writer| {
            let stack = stack.clone();
            std::thread::spawn(move || {
                for round in 0..300_u64 {
                    // Odd places: neighbours share sectors with other writers.
                    let offset = (round * 3 + writer) * 100;
                    stack.write_at(&[writer as u8 + 1; 100], offset).unwrap();
                }
            })
        })
        .collect();
    for seal in 1..20 {
        let fresh = paths(folder.path(), &format!("u{seal}"));
        stack.seal(&fresh, seal % 2 == 0).unwrap();
    }
    for writer in writers {
        writer.join().unwrap();
    }
    for block in 0..900_u64 {
        let expected = (block % 3) as u8 + 1;
        assert_eq!(
            read(&stack, block * 100, 100),
            [expected; 100],
            "block {block}"
        );
    }
}
