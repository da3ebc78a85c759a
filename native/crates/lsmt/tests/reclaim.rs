//! E08: an upper that is overwritten and trimmed for ever stays small, and loses nothing by it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;

use common::{content, flat, pair};
use lsmt::{Opener, Stack, StackSpec, UpperLayout};

const MIB: u64 = 1 << 20;
/// Garbage that an upper may keep, and what the file system adds.
const TOLERATED_BYTES: u64 = 16 * MIB;
const OVERHEAD_BYTES: u64 = 2 * MIB;
const BLOCK: u64 = 4096;

fn open(folder: &Path, layout: UpperLayout, size_bytes: u64) -> Stack {
    let spec = StackSpec {
        lowers: Vec::new(),
        upper: Some(pair(folder, "upper")),
        upper_layout: layout,
        virtual_size_bytes: Some(size_bytes),
    };
    Stack::open(&Opener::default(), &spec).unwrap()
}

fn allocated(folder: &Path) -> u64 {
    let metadata = std::fs::metadata(folder.join("upper.data")).unwrap();
    metadata.blocks() * 512
}

/// Numbers that look random and are the same each time.
fn scattered(round: u64, count: u64) -> impl Iterator<Item = u64> {
    let mut state = round.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % count
    })
}

/// The case's own figures, by the sixteenth: 64 MiB, overwritten at random 8 times over.
#[test]
fn overwriting_at_random_does_not_grow_the_file() {
    const LIVE: u64 = 64 * MIB;
    for layout in [UpperLayout::Append, UpperLayout::Hybrid] {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap(); // the many flushes are not the point
        let stack = open(folder.path(), layout, 2 * LIVE);
        let fill = content(1, MIB as usize);
        for at in 0..LIVE / MIB {
            stack.write_at(&fill, at * MIB).unwrap();
        }
        let mut expected = flat(&stack);
        let mut most = 0;
        for round in 0..8u64 {
            let places: Vec<u64> = scattered(round, LIVE / BLOCK).take(16_384).collect();
            for (number, block) in places.iter().enumerate() {
                let bytes = [(number % 250 + 1) as u8; BLOCK as usize];
                stack.write_at(&bytes, block * BLOCK).unwrap();
                let at = (block * BLOCK) as usize;
                expected[at..at + BLOCK as usize].copy_from_slice(&bytes);
                if number % 4096 == 0 {
                    stack.flush().unwrap();
                    most = most.max(allocated(folder.path()));
                }
            }
        }
        let bound = LIVE * 12 / 10 + TOLERATED_BYTES + OVERHEAD_BYTES;
        assert!(most <= bound, "{layout:?}: {} MiB", most / MIB);
        assert!(flat(&stack) == expected, "{layout:?}");
        stack.flush().unwrap();
        drop(stack);
        let stack = open(folder.path(), layout, 2 * LIVE);
        assert!(flat(&stack) == expected, "{layout:?}, opened again");
        stack.discard(0, LIVE).unwrap();
        stack.flush().unwrap();
        let left = allocated(folder.path());
        assert!(
            left * 10 < LIVE,
            "{layout:?}: {} MiB after a trim",
            left / MIB
        );
        assert!(stack.reads_zero(0, 2 * LIVE));
        let sealed = stack.seal(&pair(folder.path(), "next"), false).unwrap();
        let blocks = std::fs::metadata(sealed.path).unwrap().blocks();
        assert!(blocks * 512 * 10 < LIVE, "{layout:?}: sealed");
    }
}

/// Discards and writes in turn, too, which give each block a new place in every layout with a log.
#[test]
fn discarding_and_writing_again_does_not_grow_the_file() {
    for layout in [UpperLayout::Append, UpperLayout::Hybrid] {
        let folder = tempfile::tempdir().unwrap();
        let stack = open(folder.path(), layout, 32 * MIB);
        for round in 0..20 {
            stack.write_at(&content(round, 8 << 20), 4 * MIB).unwrap();
            stack.discard(4 * MIB, 8 * MIB).unwrap();
            stack.flush().unwrap();
            let bytes = allocated(folder.path());
            let bound = 8 * MIB + TOLERATED_BYTES + OVERHEAD_BYTES;
            assert!(bytes <= bound, "{layout:?} {round}: {} MiB", bytes / MIB);
        }
    }
}

/// A copy of the two files at any moment opens to the last flush or to a later state; a place that was freed is in none of them.
#[test]
fn after_a_crash_at_any_moment_nothing_flushed_is_missing() {
    const SIZE: u64 = 8 * MIB;
    let folder = tempfile::tempdir().unwrap();
    let stack = open(folder.path(), UpperLayout::Append, SIZE);
    let mut flushed = vec![0; SIZE as usize];
    let mut now = flushed.clone();
    for round in 0..12u8 {
        for (step, part) in scattered(u64::from(round), 8).take(8).enumerate() {
            let bytes = vec![round * 8 + step as u8 + 1; MIB as usize];
            stack.write_at(&bytes, part * MIB).unwrap();
            let at = (part * MIB) as usize;
            now[at..at + MIB as usize].copy_from_slice(&bytes);
            let copy = tempfile::tempdir().unwrap();
            for name in ["upper.data", "upper.index"] {
                let status = Command::new("cp")
                    .arg("--sparse=always")
                    .args([folder.path().join(name), copy.path().join(name)])
                    .status();
                assert!(status.unwrap().success());
            }
            let seen = flat(&open(copy.path(), UpperLayout::Append, SIZE));
            assert!(seen == flushed, "round {round}, step {step}");
        }
        stack.flush().unwrap();
        flushed.copy_from_slice(&now);
    }
    assert!(allocated(folder.path()) <= SIZE + TOLERATED_BYTES + OVERHEAD_BYTES);
}

/// Whoever reads while the place is superseded and freed sees the old or the new block, never its remains.
#[test]
fn readers_never_see_a_place_that_was_freed() {
    const BLOCKS: u64 = 4096;
    let folder = tempfile::tempdir().unwrap();
    let stack = open(folder.path(), UpperLayout::Append, BLOCKS * BLOCK);
    let generation = AtomicU8::new(1);
    let is_over = AtomicBool::new(false);
    stack
        .write_at(&vec![1; (BLOCKS * BLOCK) as usize], 0)
        .unwrap();
    thread::scope(|scope| {
        for reader in 0..2u64 {
            let (stack, generation, is_over) = (&stack, &generation, &is_over);
            scope.spawn(move || {
                let mut buffer = vec![0; 64 << 10];
                let mut rounds = scattered(reader + 7, BLOCKS / 16);
                while !is_over.load(Ordering::Relaxed) {
                    let least = generation.load(Ordering::SeqCst);
                    let at = rounds.next().unwrap() * 16 * BLOCK;
                    stack.read_at(&mut buffer, at).unwrap();
                    for block in buffer.chunks(BLOCK as usize) {
                        let value = block[0];
                        assert!(value >= least, "{value} after {least}");
                        assert!(block.iter().all(|byte| *byte == value));
                    }
                }
            });
        }
        for value in 2..=60 {
            for at in 0..BLOCKS / 16 {
                let bytes = vec![value; 64 << 10];
                stack.write_at(&bytes, at * 16 * BLOCK).unwrap();
            }
            generation.store(value, Ordering::SeqCst);
            stack.flush().unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
