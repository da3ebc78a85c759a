#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::Duration;

use super::*;

const SIZE: usize = 24 << 20;

fn open(folder: &Path) -> (Stack, UpperPaths) {
    let upper = UpperPaths {
        data: folder.join("data"),
        index: folder.join("index"),
    };
    let spec = StackSpec {
        lowers: Vec::new(),
        upper: Some(upper.clone()),
        upper_layout: UpperLayout::Append,
        virtual_size_bytes: Some(SIZE as u64),
    };
    (Stack::open(&Opener::default(), &spec).unwrap(), upper)
}

/// A read that has looked a place up stands still while the place is superseded and the superseding is flushed.
#[test]
fn a_place_is_not_freed_while_somebody_may_still_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let (stack, paths) = open(folder.path());
    stack.write_at(&vec![1; SIZE], 0).unwrap();
    let upper = stack.state.read().upper.clone().unwrap();
    let allocated = || std::fs::metadata(&paths.data).unwrap().blocks() * 512;
    thread::scope(|scope| {
        let reader = stack.state.read();
        let mut looked_up = Vec::new();
        upper.lookup(0, 8, &mut looked_up);
        let flusher = scope.spawn(|| {
            stack.write_at(&vec![2; SIZE], 0).unwrap();
            stack.flush().unwrap();
        });
        while upper.stats().records < 2 * (SIZE as u64 / (16 << 20)) {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(500)); // the flush has come as far as it can
        assert!(!flusher.is_finished(), "it waits for the reader");
        let mut bytes = [0; 4096];
        upper
            .read_data(&mut bytes, looked_up[0].moffset() * SECTOR_BYTES)
            .unwrap();
        assert_eq!(bytes, [1; 4096]);
        drop(reader);
        flusher.join().unwrap();
    });
    assert!(
        allocated() < SIZE as u64 + (2 << 20),
        "{} bytes",
        allocated()
    );
}

/// A sealed layer is content-addressed: nothing in it may change any more.
#[test]
fn garbage_of_a_sealed_upper_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (stack, paths) = open(folder.path());
    stack.write_at(&vec![1; SIZE], 0).unwrap();
    stack.write_at(&vec![2; SIZE], 0).unwrap();
    let upper = stack.state.read().upper.clone().unwrap();
    upper.flush().unwrap(); // now there is garbage, which nobody has freed
    let fresh = UpperPaths {
        data: folder.path().join("fresh"),
        index: folder.path().join("fresh.index"),
    };
    stack.seal(&fresh, false).unwrap();
    let before = std::fs::read(&paths.data).unwrap();
    stack.flush().unwrap();
    stack.write_at(&[3; 4096], 0).unwrap();
    assert!(std::fs::read(&paths.data).unwrap() == before);
    let garbage = upper.take_garbage();
    assert!(garbage.is_some(), "there was none to leave alone");
}

#[test]
fn pages_of_zeros_take_no_room_and_hide_what_they_come_to_lie_upon() {
    let folder = tempfile::tempdir().unwrap();
    let (below, under) = open(folder.path());
    below.write_at(&vec![1; SIZE], 0).unwrap();
    let sealed = |stack: &Stack, name: &str| {
        let fresh = UpperPaths {
            data: folder.path().join(name),
            index: folder.path().join(format!("{name}.index")),
        };
        stack.seal(&fresh, false).unwrap();
    };
    sealed(&below, "unused-below");

    let upper = UpperPaths {
        data: folder.path().join("capture"),
        index: folder.path().join("capture.index"),
    };
    let spec = StackSpec {
        lowers: Vec::new(),
        upper: Some(upper.clone()),
        upper_layout: UpperLayout::Hybrid,
        virtual_size_bytes: Some(SIZE as u64),
    };
    let stack = Stack::open(&Opener::default(), &spec).unwrap();
    let mut content = vec![0; SIZE - BLOCK_BYTES];
    content[5 * BLOCK_BYTES..7 * BLOCK_BYTES].fill(7);
    content[9 * BLOCK_BYTES + 1] = 8;
    let (early, late) = content.split_at(3 * BLOCK_BYTES + 100); // not at a page
    stack
        .write_recording_zeros(late, early.len() as u64)
        .unwrap();
    stack.write_recording_zeros(early, 0).unwrap();
    stack
        .write_recording_zeros(&[0; 100], 5 * BLOCK_BYTES as u64)
        .unwrap(); // no page
    content[5 * BLOCK_BYTES..5 * BLOCK_BYTES + 100].fill(0);
    sealed(&stack, "unused");
    assert!(std::fs::metadata(&upper.data).unwrap().len() < 32 * BLOCK_BYTES as u64);

    let both = StackSpec {
        lowers: vec![under.data, upper.data],
        upper: None,
        upper_layout: UpperLayout::Append,
        virtual_size_bytes: None,
    };
    let both = Stack::open(&Opener::default(), &both).unwrap();
    let mut found = vec![9; SIZE];
    both.read_at(&mut found, 0).unwrap();
    content.extend([1; BLOCK_BYTES]); // which nobody has written
    assert!(found == content);
}
