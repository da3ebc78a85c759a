//! What a process that was killed had told its guests is there: with a journal also what
//! no flush had made durable. A kill is a copy of the files as they are at that moment.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod common;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use common::{content, flat, pair, LAYOUTS};
use lsmt::{Opener, Stack, StackError, StackSpec, UpperLayout};

const DISK_BYTES: u64 = 1 << 20;

fn open(
    folder: &Path,
    lowers: &[PathBuf],
    upper: &str,
    layout: UpperLayout,
) -> Result<Stack, StackError> {
    let spec = StackSpec {
        lowers: lowers.to_vec(),
        upper: Some(pair(folder, upper)),
        upper_layout: layout,
        virtual_size_bytes: Some(DISK_BYTES),
    };
    let mut stack = Stack::open(&Opener::default(), &spec)?;
    stack.keep_journals(&folder.join("journals"))?;
    Ok(stack)
}

fn new_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("journals")).unwrap();
    folder
}

/// What the next process finds.
fn killed(folder: &Path) -> tempfile::TempDir {
    let copy = new_folder();
    for part in ["", "journals"] {
        for entry in std::fs::read_dir(folder.join(part)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                let target = copy.path().join(part).join(path.file_name().unwrap());
                std::fs::copy(&path, target).unwrap();
            }
        }
    }
    copy
}

fn journals(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.join("journals")).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_kill_at_any_moment_loses_no_write() {
    for layout in LAYOUTS {
        let folder = new_folder();
        let stack = open(folder.path(), &[], "upper", layout).unwrap();
        for round in 0..60_u32 {
            let offset = u64::from(round * 7919 % 200) * 4096;
            match round % 5 {
                4 => stack.discard(offset, 12_288).unwrap(),
                _ => stack.write_at(&content(round, 10_000), offset).unwrap(),
            }
            if round % 11 == 10 {
                stack.flush().unwrap();
            }
            if round % 3 == 0 {
                let copy = killed(folder.path());
                let again = open(copy.path(), &[], "upper", layout).unwrap();
                assert!(flat(&again) == flat(&stack), "{layout:?}, round {round}");
                // Recovery is a flush: what it found is durable, so the journal is empty.
                drop(again);
                let bytes = |path: &PathBuf| path.metadata().unwrap().len();
                assert!(journals(copy.path()).iter().map(bytes).sum::<u64>() == 0);
            }
        }
    }
}

#[test]
fn a_seal_goes_on_with_a_journal_of_the_fresh_upper() {
    let folder = new_folder();
    let stack = open(folder.path(), &[], "first", UpperLayout::Hybrid).unwrap();
    stack.write_at(&content(1, 50_000), 512).unwrap();
    stack.seal(&pair(folder.path(), "second"), false).unwrap();
    assert_eq!(
        journals(folder.path()).len(),
        1,
        "that of the sealed one is gone"
    );
    stack.write_at(&content(2, 50_000), 30_000).unwrap();
    let copy = killed(folder.path());
    let lowers = [copy.path().join("first.data")];
    let again = open(copy.path(), &lowers, "second", UpperLayout::Hybrid).unwrap();
    assert!(flat(&again) == flat(&stack));
}

#[test]
fn a_torn_record_is_dropped_and_a_wrong_one_refused() {
    let folder = new_folder();
    let stack = open(folder.path(), &[], "upper", UpperLayout::Append).unwrap();
    stack.write_at(&content(1, 4096), 0).unwrap();
    let expected = flat(&stack);
    for (tail, is_fine) in [(&[7; 9][..], true), (&[0; 16], false), (&[255; 16], false)] {
        let copy = killed(folder.path());
        let journal = &journals(copy.path())[0];
        let file = OpenOptions::new().write(true).open(journal).unwrap();
        file.write_all_at(tail, journal.metadata().unwrap().len())
            .unwrap();
        match open(copy.path(), &[], "upper", UpperLayout::Append) {
            Ok(again) => assert!(is_fine && flat(&again) == expected, "{tail:?}"),
            Err(error) => assert!(!is_fine && error.to_string().contains("journal"), "{error}"),
        }
    }
}

#[test]
fn an_ended_journal_leaves_no_file() {
    let folder = new_folder();
    let stack = open(folder.path(), &[], "upper", UpperLayout::Append).unwrap();
    stack.write_at(&content(1, 4096), 0).unwrap();
    stack.flush().unwrap();
    stack.end_journal();
    assert_eq!(journals(folder.path()).len(), 0);
}
