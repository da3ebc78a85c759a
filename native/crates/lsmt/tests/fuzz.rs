//! Seeded damage to every structure a layer's file has: whatever is opened, it
//! opens or fails, reads or fails, never panics, and never takes much memory.
//!
//! Checksums are mended after half of the damage, so that it gets past them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod common;

use std::path::Path;

use common::{content, encoding, layer_bytes, open_and_read, LAYOUTS};
use lsmt::format::BLOCK_BYTES as LSMT_BLOCK;
use lsmt::lowers::Lowers;
use lsmt::zfile::format::BLOCK_BYTES as ZFILE_BLOCK;
use lsmt::zfile::{crc, is_zfile, Algorithm};
use lsmt::{Opener, Stack, StackSpec, Upper, UpperLayout, UpperPaths};

/// Most memory the whole program may ever have had.
const MAX_MEMORY_KIB: u64 = 256 << 10;
/// Numbers that overflow, vanish or just miss a limit.
const NUMBERS: [u64; 12] = [
    0,
    1,
    4,
    511,
    4096,
    8_000_001,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 50,
    1 << 63,
    u64::MAX - 4095,
    u64::MAX,
];

/// Repeatable random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit.max(1)
    }

    /// A place, more often one near the start, the end or `hot`.
    fn place(&mut self, length: usize, hot: &[usize]) -> usize {
        let at = match self.below(4) {
            0 => self.below(length),
            1 => self.below(600),
            2 => length.saturating_sub(1 + self.below(600)),
            _ => hot[self.below(hot.len())] + self.below(100),
        };
        at.min(length.saturating_sub(1))
    }

    fn damage(&mut self, bytes: &mut Vec<u8>, hot: &[usize]) {
        if bytes.is_empty() {
            return;
        }
        let at = self.place(bytes.len(), hot);
        match self.below(8) {
            0 | 1 => bytes[at] ^= 1 << self.below(8),
            2 => bytes[at] = self.below(256) as u8,
            3 | 4 => {
                // A whole field, where fields lie.
                let at = at / 4 * 4;
                let number = NUMBERS[self.below(NUMBERS.len())].to_le_bytes();
                let end = bytes.len().min(at + 4 + 4 * self.below(2));
                bytes[at..end].copy_from_slice(&number[..end - at]);
            }
            5 => bytes.truncate(at),
            6 => {
                let extra = self.below(5000);
                bytes.resize(bytes.len() + extra, self.below(256) as u8);
            }
            _ => {
                let from = self.below(bytes.len());
                let length = self.below(64).min(bytes.len() - from.max(at));
                bytes.copy_within(from..from + length, at);
            }
        }
    }
}

/// Makes the digests of a damaged ZFile right again.
fn mend(bytes: &mut [u8], start: usize) {
    let read = |bytes: &[u8], at: usize| {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
    };
    let ends = [start, bytes.len().saturating_sub(ZFILE_BLOCK)];
    for at in ends {
        if bytes.len() < at + ZFILE_BLOCK || !is_zfile(&bytes[at..]) {
            continue;
        }
        let table = start.saturating_add(read(bytes, at + 40));
        let end = table.saturating_add(read(bytes, at + 48).saturating_mul(4));
        if let Some(table) = bytes.get(table..end) {
            let checksum = crc::raw(0, table);
            bytes[at + 64..at + 68].copy_from_slice(&checksum.to_le_bytes());
        }
        bytes[at + 28..at + 32].fill(0);
        let digest = crc::raw(0, &bytes[at..at + ZFILE_BLOCK]);
        bytes[at + 28..at + 32].copy_from_slice(&digest.to_le_bytes());
    }
}

/// Most memory this process ever had.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    line.unwrap()
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap()
}

#[test]
fn damaged_layers_of_every_wrapping() {
    let lz4 = Some((Algorithm::Lz4, 4096));
    let zstd = Some((Algorithm::Zstd, 8192));
    let kinds = [
        (encoding(None, false), 0),
        (encoding(None, true), 1536),
        (encoding(lz4, false), 0),
        (encoding(zstd, false), 0),
        (encoding(lz4, true), 1536),
        (encoding(zstd, true), 1536),
    ];
    let mut outcomes = [0, 0];
    for (number, (encoding, start)) in kinds.into_iter().enumerate() {
        let whole = layer_bytes(encoding, &content(number as u32, 12_288));
        let mut random = Random(0x9e37_79b9_7f4a_7c15 + number as u64);
        // Where the inner header, the index and the jump table begin.
        let hot = [
            start,
            start + 56,
            whole.len() * 3 / 4,
            whole.len() - 2 * LSMT_BLOCK,
        ];
        for _ in 0..1200 {
            let mut bytes = whole.clone();
            for _ in 0..=random.below(3) {
                random.damage(&mut bytes, &hot);
            }
            if random.below(2) == 0 {
                mend(&mut bytes, start);
            }
            outcomes[usize::from(open_and_read(bytes).is_ok())] += 1;
        }
    }
    // Both happen, or the damage is too much or too little to find anything.
    assert!(outcomes[0] > 500 && outcomes[1] > 250, "{outcomes:?}");
    assert!(peak_kib() < MAX_MEMORY_KIB, "{} KiB", peak_kib());
}

/// Index entries alone, since there every bit has a meaning.
#[test]
fn damaged_indexes() {
    let bytes = content(1, 12_288);
    let whole = layer_bytes(encoding(None, false), &bytes);
    let index = LSMT_BLOCK + bytes.len();
    let mut random = Random(77);
    for _ in 0..2500 {
        let mut bytes = whole.clone();
        for _ in 0..=random.below(2) {
            let at = index + random.below(48);
            bytes[at] = random.below(256) as u8;
        }
        for (entry, data) in open_and_read(bytes).unwrap_or_default() {
            assert!(entry.is_zeroed() || data.len() as u64 == entry.length() * 512);
        }
    }
}

fn make_upper(folder: &Path, layout: UpperLayout) -> UpperPaths {
    let upper = UpperPaths {
        data: folder.join("data"),
        index: folder.join("index"),
    };
    let spec = StackSpec {
        lowers: Vec::new(),
        upper: Some(upper.clone()),
        upper_layout: layout,
        virtual_size_bytes: Some(65_536),
    };
    let stack = Stack::open(&Opener::default(), &spec).unwrap();
    for place in 0..6 {
        stack
            .write_at(&content(place, 3000), u64::from(place) * 4000)
            .unwrap();
    }
    stack.discard(8192, 8192).unwrap();
    stack.flush().unwrap();
    upper
}

#[test]
fn damaged_uppers_of_every_layout() {
    for (number, layout) in LAYOUTS.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let upper = make_upper(folder.path(), layout);
        let whole = [&upper.data, &upper.index].map(|path| std::fs::read(path).unwrap());
        let mut random = Random(1234 + number as u64);
        let mut opened = 0;
        for _ in 0..250 {
            let mut files = whole.clone();
            for _ in 0..=random.below(2) {
                let which = random.below(2);
                random.damage(&mut files[which], &[28, 48, 4096]);
            }
            std::fs::write(&upper.data, &files[0]).unwrap();
            std::fs::write(&upper.index, &files[1]).unwrap();
            let read_only = Upper::open_read_only(&upper.data, &upper.index);
            if let Ok(layer) = read_only {
                let lowers = Lowers::from_layers(vec![layer]).unwrap();
                // A short data file is an error, not zeros.
                let _ = Stack::from_lowers(lowers, 65_536).read_at(&mut [0; 65_536], 0);
            }
            if let Ok(upper) = Upper::open(&upper.data, &upper.index) {
                opened += 1;
                upper.flush().unwrap();
            }
        }
        assert!(opened > 30 && opened < 250, "{layout:?}: {opened}");
    }
    assert!(peak_kib() < MAX_MEMORY_KIB, "{} KiB", peak_kib());
}

/// Promises of a header that no file can keep cost nothing.
#[test]
fn huge_promises_over_a_sparse_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let mut bytes = layer_bytes(
        encoding(Some((Algorithm::Lz4, 4096)), false),
        &content(1, 4096),
    );
    let blocks = (1_u64 << 27) - 1;
    let (size, index) = (1_u64 << 40, 1_u64 << 39);
    bytes.truncate(ZFILE_BLOCK);
    bytes[40..48].copy_from_slice(&index.to_le_bytes());
    bytes[48..56].copy_from_slice(&blocks.to_le_bytes());
    bytes[56..64].copy_from_slice(&(blocks * 4096).to_le_bytes());
    mend(&mut bytes, 0);
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(size).unwrap();
    let error = lsmt::RoLayer::open(&Opener::default(), &path)
        .err()
        .unwrap();
    assert!(error.to_string().contains("entry 0"), "{error}");
    let upper = make_upper(folder.path(), UpperLayout::Append);
    let index = std::fs::OpenOptions::new().write(true).open(&upper.index);
    index.unwrap().set_len(1 << 40).unwrap();
    let error = Upper::open(&upper.data, &upper.index).err().unwrap();
    assert!(error.to_string().contains("exceeds the limit"), "{error}");
    assert!(peak_kib() < MAX_MEMORY_KIB, "{} KiB", peak_kib());
}
