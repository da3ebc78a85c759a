//! Random operations against a plain byte array.
//!
//! The model keeps two images: what the disk reads now, and what must be there
//! after a crash (the state of the last flush or seal).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod common;

use std::path::PathBuf;

use lsmt::{Opener, Stack, StackSpec, UpperLayout, UpperPaths};
use proptest::prelude::*;
use tempfile::TempDir;

/// Small enough that random ranges overlap often; not a multiple of 4 KiB.
const DISK_BYTES: usize = 129 * 512;

#[derive(Debug, Clone)]
enum Operation {
    Write {
        offset: usize,
        length: usize,
        seed: u8,
    },
    Discard {
        offset: usize,
        length: usize,
    },
    Flush,
    Seal {
        sync: bool,
    },
    Reopen,
    Crash(Damage),
    Flatten,
}

#[derive(Debug, Clone, Copy)]
enum Damage {
    None,
    TornRecord(usize),
    ZeroTail,
    RecordPastData,
    DataTail,
}

/// Places at `grain`: 512 for aligned ranges, 1 for odd ones.
fn range(grain: usize) -> impl Strategy<Value = (usize, usize)> {
    let slots = DISK_BYTES / grain;
    (0..slots)
        .prop_flat_map(move |start| {
            let longest = (slots - start).min(20 * 512 / grain);
            (Just(start), 1..=longest)
        })
        .prop_map(move |(start, length)| (start * grain, length * grain))
}

fn layouts() -> impl Strategy<Value = UpperLayout> {
    prop_oneof![
        Just(UpperLayout::Append),
        Just(UpperLayout::Hybrid),
        Just(UpperLayout::Sparse),
    ]
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        Just(Damage::None),
        (1_usize..16).prop_map(Damage::TornRecord),
        Just(Damage::ZeroTail),
        Just(Damage::RecordPastData),
        Just(Damage::DataTail),
    ]
}

fn operation(grain: usize) -> impl Strategy<Value = Operation> {
    prop_oneof![
        12 => (range(grain), any::<u8>()).prop_map(|((offset, length), seed)| {
            Operation::Write { offset, length, seed }
        }),
        4 => range(grain).prop_map(|(offset, length)| Operation::Discard { offset, length }),
        2 => Just(Operation::Flush),
        2 => any::<bool>().prop_map(|sync| Operation::Seal { sync }),
        1 => Just(Operation::Reopen),
        2 => damage().prop_map(Operation::Crash),
        1 => Just(Operation::Flatten),
    ]
}

fn content(seed: u8, length: usize) -> Vec<u8> {
    let mut state = u32::from(seed) + 1;
    let bytes = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    bytes.take(length).collect()
}

struct Harness {
    folder: TempDir,
    spec: StackSpec,
    stack: Option<Stack>,
    generation: usize,
    now: Vec<u8>,
    durable: Vec<u8>,
}

impl Harness {
    fn new(layout: UpperLayout) -> Harness {
        let folder = tempfile::tempdir().unwrap();
        let mut harness = Harness {
            spec: StackSpec {
                lowers: Vec::new(),
                upper: None,
                upper_layout: layout,
                virtual_size_bytes: Some(DISK_BYTES as u64),
            },
            folder,
            stack: None,
            generation: 0,
            now: vec![0; DISK_BYTES],
            durable: vec![0; DISK_BYTES],
        };
        harness.spec.upper = Some(harness.fresh());
        harness.open();
        harness
    }

    fn path(&mut self, name: &str) -> PathBuf {
        self.generation += 1;
        self.folder
            .path()
            .join(format!("{}-{name}", self.generation))
    }

    fn fresh(&mut self) -> UpperPaths {
        UpperPaths {
            data: self.path("data"),
            index: self.path("index"),
        }
    }

    fn open(&mut self) {
        self.stack = Some(Stack::open(&Opener::default(), &self.spec).unwrap());
    }

    fn stack(&self) -> &Stack {
        self.stack.as_ref().unwrap()
    }

    fn run(&mut self, operation: &Operation) {
        match *operation {
            Operation::Write {
                offset,
                length,
                seed,
            } => {
                let bytes = content(seed, length);
                self.stack().write_at(&bytes, offset as u64).unwrap();
                self.now[offset..offset + length].copy_from_slice(&bytes);
            }
            Operation::Discard { offset, length } => {
                self.stack().discard(offset as u64, length as u64).unwrap();
                self.now[offset..offset + length].fill(0);
            }
            Operation::Flush => {
                self.stack().flush().unwrap();
                self.durable.clone_from(&self.now);
            }
            Operation::Seal { sync } => self.seal(sync),
            Operation::Reopen => {
                self.stack().flush().unwrap();
                self.durable.clone_from(&self.now);
                self.stack = None;
                self.open();
            }
            Operation::Crash(damage) => {
                if self.spec.upper_layout != UpperLayout::Append {
                    // What is overwritten in place may be there before the flush.
                    self.stack().flush().unwrap();
                    self.durable.clone_from(&self.now);
                }
                self.stack = None;
                self.damage(damage);
                self.open();
                self.now.clone_from(&self.durable);
            }
            Operation::Flatten => self.flatten(),
        }
        self.check();
    }

    fn seal(&mut self, sync: bool) {
        let fresh = self.fresh();
        let sealed = self.stack().seal(&fresh, sync).unwrap();
        let old = self.spec.upper.replace(fresh).unwrap();
        assert_eq!(sealed.path, old.data);
        assert!(!old.index.exists());
        self.spec.lowers.push(old.data);
        assert_eq!(self.stack().lower_paths(), self.spec.lowers);
        self.durable.clone_from(&self.now);
    }

    /// Compacts all lowers into one layer, wrapped in one way or another, and reopens over it.
    fn flatten(&mut self) {
        if self.spec.lowers.is_empty() {
            return;
        }
        let output = self.path("flat");
        let encodings = common::encodings();
        let encoding = encodings[self.generation % encodings.len()];
        common::commit(&self.spec.lowers, &output, encoding);
        self.stack().flush().unwrap();
        self.durable.clone_from(&self.now);
        self.stack = None;
        self.spec.lowers = vec![output];
        self.open();
    }

    /// What a crash may leave behind the last flushed byte of either file.
    fn damage(&self, damage: Damage) {
        use std::io::Write;
        let upper = self.spec.upper.as_ref().unwrap();
        let append = |path: &PathBuf, bytes: &[u8]| {
            let file = std::fs::OpenOptions::new().append(true).open(path);
            file.unwrap().write_all(bytes).unwrap();
        };
        match damage {
            Damage::None => {}
            Damage::TornRecord(length) => append(&upper.index, &vec![0x55; length]),
            Damage::ZeroTail => append(&upper.index, &[0; 4096]),
            Damage::RecordPastData => {
                let record = lsmt::format::Segment::data(3, 5, 1 << 30);
                append(&upper.index, &record.encode());
            }
            Damage::DataTail => append(&upper.data, &[0xaa; 700]),
        }
    }

    fn check(&self) {
        let mut bytes = vec![0xee; DISK_BYTES + 10];
        let count = self.stack().read_at(&mut bytes, 0).unwrap();
        assert_eq!(count, DISK_BYTES);
        assert!(
            bytes[..count] == self.now,
            "first difference at {:?}",
            self.difference(&bytes)
        );
        // An odd piece must equal the same piece of the whole.
        let mut piece = vec![0xee; 1000];
        let offset = 777 * self.generation % (DISK_BYTES - 1000);
        self.stack().read_at(&mut piece, offset as u64).unwrap();
        assert_eq!(piece, self.now[offset..offset + 1000]);
        self.check_holes();
    }

    fn difference(&self, bytes: &[u8]) -> Option<usize> {
        bytes.iter().zip(&self.now).position(|(a, b)| a != b)
    }

    /// Holes tile the disk with data, and every hole reads as zero.
    fn check_holes(&self) {
        let mut cursor = 0;
        while cursor < DISK_BYTES as u64 {
            let data = self.stack().next_data(cursor).unwrap_or(DISK_BYTES as u64);
            assert!(self.now[cursor as usize..data as usize]
                .iter()
                .all(|byte| *byte == 0));
            if data == DISK_BYTES as u64 {
                return;
            }
            let hole = self.stack().next_hole(data);
            assert!(hole > data, "data at {data} must not be a hole");
            cursor = hole;
        }
    }
}

fn run(layout: UpperLayout, lowers: &[Vec<Operation>], operations: &[Operation]) {
    let mut harness = Harness::new(layout);
    for layer in lowers {
        for operation in layer {
            harness.run(operation);
        }
        harness.seal(false);
    }
    for operation in operations {
        harness.run(operation);
    }
}

fn cases() -> ProptestConfig {
    ProptestConfig {
        cases: 128,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn sectors_match_the_model(
        layout in layouts(),
        lowers in prop::collection::vec(prop::collection::vec(operation(512), 0..8), 0..4),
        operations in prop::collection::vec(operation(512), 1..40),
    ) {
        run(layout, &lowers, &operations);
    }

    #[test]
    fn odd_ranges_match_the_model(
        layout in layouts(),
        lowers in prop::collection::vec(prop::collection::vec(operation(1), 0..8), 0..4),
        operations in prop::collection::vec(operation(1), 1..40),
    ) {
        run(layout, &lowers, &operations);
    }
}
