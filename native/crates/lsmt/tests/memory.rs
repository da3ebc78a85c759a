//! What a large index costs. Alone in its program, whose peak it measures.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::time::Instant;

use lsmt::lowers::Lowers;
use lsmt::{LayerOptions, LayerWriter, Opener};

const LAYERS: u64 = 4;
const ENTRIES: u64 = 1_000_000;
/// Bound on what opening takes at its peak.
const MAX_BYTES: u64 = 64 << 20;

fn status_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name));
    let kib: u64 = line
        .unwrap()
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    kib << 10
}

#[test]
fn a_merged_index_of_a_million_entries_is_small() {
    let folder = tempfile::tempdir().unwrap();
    let mut paths = Vec::new();
    for layer in 0..LAYERS {
        let path = folder.path().join(format!("{layer}"));
        let options = LayerOptions::new(ENTRIES * 16 * 512);
        let mut writer = LayerWriter::create(&path, &options).unwrap();
        for entry in 0..ENTRIES / LAYERS {
            writer
                .append_zeroed((entry * LAYERS + layer) * 16, 8)
                .unwrap();
        }
        writer.finish(false).unwrap();
        paths.push(path);
    }
    // From here on the peak counts anew.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status_bytes("VmRSS:");
    let began = Instant::now();
    let lowers = Lowers::open(&Opener::default(), &paths).unwrap();
    let took = began.elapsed();
    assert_eq!(lowers.index().segments().len() as u64, ENTRIES);
    let peak = status_bytes("VmHWM:").saturating_sub(before);
    let kept = status_bytes("VmRSS:").saturating_sub(before);
    eprintln!("{ENTRIES} entries: {took:?}, peak {peak} bytes, kept {kept} bytes");
    assert!(peak < MAX_BYTES, "peak of {peak} bytes");
}
