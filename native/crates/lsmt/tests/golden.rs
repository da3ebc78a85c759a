//! Layers made by the reference implementation must read exactly.
//!
//! The files are not part of the repository; without them the tests say so on
//! stderr and check nothing, which a run meant to be complete must look for.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod common;

use std::path::{Path, PathBuf};

use lsmt::lowers::Lowers;
use lsmt::zfile::Algorithm;
use lsmt::{Opener, RoLayer, Stack, StackSpec, Upper, UpperLayout, UpperPaths};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn golden_folder() -> Option<PathBuf> {
    let shared = std::env::var_os("AENV_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../shared"),
        PathBuf::from,
    );
    let folder = shared.join("golden/overlaybd");
    if folder.join("manifest.json").exists() {
        return Some(folder);
    }
    eprintln!("SKIPPED: golden files not found at {}", folder.display());
    None
}

/// The fill of the manifest: a linear congruential generator, word by word.
fn fill(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed as u32;
    let words = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_le_bytes()
    });
    words
        .take(length.div_ceil(4))
        .flatten()
        .take(length)
        .collect()
}

fn apply(flat: &mut [u8], operations: &Value) {
    for operation in operations.as_array().unwrap() {
        let number = |name: &str| operation[name].as_u64().unwrap();
        let (offset, length) = (number("off") as usize, number("len") as usize);
        let target = &mut flat[offset..offset + length];
        match operation["op"].as_str().unwrap() {
            "w" => target.copy_from_slice(&fill(number("seed"), length)),
            "d" => target.fill(0),
            other => panic!("unknown operation {other}"),
        }
    }
}

struct Golden {
    folder: PathBuf,
    manifest: Value,
}

impl Golden {
    fn open() -> Option<Golden> {
        let folder = golden_folder()?;
        let text = std::fs::read(folder.join("manifest.json")).unwrap();
        let manifest = serde_json::from_slice(&text).unwrap();
        Some(Golden { folder, manifest })
    }

    fn size(&self) -> usize {
        self.manifest["virtual_size"].as_u64().unwrap() as usize
    }

    /// All layers with their operations, bottom first.
    fn layers(&self) -> Vec<(PathBuf, &Value)> {
        let layers = self.manifest["layers"].as_array().unwrap().iter();
        let place = |layer: &Value| self.folder.join(layer["file"].as_str().unwrap());
        layers.map(|layer| (place(layer), &layer["ops"])).collect()
    }

    /// The digest of the flat image of the lowest layers, by the reference.
    fn flat_sha256(&self, depth: usize) -> &str {
        let top = &self.manifest["layers"][depth - 1];
        top["flat_sha256_through_here"].as_str().unwrap()
    }

    fn upper(&self) -> (PathBuf, PathBuf, &Value) {
        let upper = &self.manifest["upper"];
        let path = |name: &str| self.folder.join(upper[name].as_str().unwrap());
        (path("data"), path("index"), &upper["ops"])
    }
}

fn flat_bytes(stack: &Stack) -> Vec<u8> {
    let mut bytes = vec![0xee; stack.virtual_size_bytes() as usize];
    assert_eq!(stack.read_at(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Against the reference's own digests, so that what is expected is not only ours.
#[test]
fn the_stack_reads_right_at_every_depth() {
    let Some(golden) = Golden::open() else { return };
    let paths: Vec<PathBuf> = golden.layers().into_iter().map(|(path, _)| path).collect();
    assert_eq!(paths.len(), 7);
    for depth in 1..=paths.len() {
        let lowers = Lowers::open(&Opener::default(), &paths[..depth]).unwrap();
        let stack = Stack::from_lowers(lowers, golden.size() as u64);
        assert_eq!(
            sha256(&flat_bytes(&stack)),
            golden.flat_sha256(depth),
            "{depth} layers"
        );
    }
}

#[test]
fn every_layer_reads_alone_in_pieces_of_any_size() {
    let Some(golden) = Golden::open() else { return };
    for (path, operations) in golden.layers() {
        let mut expected = vec![0; golden.size()];
        apply(&mut expected, operations);
        // One cache that holds everything, one that holds next to nothing.
        for cache_bytes in [64 << 20, 5000] {
            let opener = Opener::new(cache_bytes);
            let lowers = Lowers::open(&opener, std::slice::from_ref(&path)).unwrap();
            let stack = Stack::from_lowers(lowers, golden.size() as u64);
            assert_eq!(flat_bytes(&stack), expected, "{}", path.display());
            for size in [512, 4096, 5000, 70_001] {
                let mut bytes = vec![0; size];
                for at in (0..expected.len() - size).step_by(7919) {
                    stack.read_at(&mut bytes, at as u64).unwrap();
                    assert!(bytes == expected[at..at + size], "{}", path.display());
                }
            }
        }
    }
}

#[test]
fn what_is_wrapped_around_a_layer_is_told() {
    let Some(golden) = Golden::open() else { return };
    let found: Vec<_> = (golden.layers().into_iter().take(5))
        .map(|(path, _)| {
            let (layer, _) = RoLayer::open(&Opener::default(), &path).unwrap();
            let wrapping = layer.wrapping().clone();
            let zfile = wrapping.zfile;
            let zfile = zfile.map(|head| (head.algorithm, head.block_bytes, head.verify));
            (wrapping.tar_offset, zfile)
        })
        .collect();
    let lz4 = Some((Algorithm::Lz4, 4096, true));
    let expected = vec![
        (None, None),
        (None, lz4),
        (None, Some((Algorithm::Zstd, 16_384, true))),
        (Some(1536), lz4),
        (None, None),
    ];
    assert_eq!(found, expected);
}

#[test]
fn the_upper_reads_over_the_layers() {
    let Some(golden) = Golden::open() else { return };
    let mut expected = vec![0; golden.size()];
    let mut layers = Vec::new();
    for (path, operations) in golden.layers() {
        apply(&mut expected, operations);
        layers.push(RoLayer::open(&Opener::default(), &path).unwrap());
    }
    let (data, index, operations) = golden.upper();
    apply(&mut expected, operations);
    layers.push(Upper::open_read_only(&data, &index).unwrap());
    let lowers = Lowers::from_layers(layers).unwrap();
    let stack = Stack::from_lowers(lowers, golden.size() as u64);
    let flat = flat_bytes(&stack);
    assert_eq!(flat, expected);
    let stated = &golden.manifest["upper"]["flat_sha256"];
    assert_eq!(sha256(&flat), stated.as_str().unwrap());
    assert_eq!(Upper::check(&data, &index).unwrap(), 0);
}

#[test]
fn a_reference_upper_goes_on_under_our_writes_and_seals() {
    let Some(golden) = Golden::open() else { return };
    let folder = tempfile::tempdir().unwrap();
    let copy = |from: &Path, name: &str| {
        let to = folder.path().join(name);
        std::fs::write(&to, std::fs::read(from).unwrap()).unwrap();
        to
    };
    let (data, index, operations) = golden.upper();
    let upper = UpperPaths {
        data: copy(&data, "data"),
        index: copy(&index, "index"),
    };
    let mut expected = vec![0; golden.size()];
    let mut lowers = Vec::new();
    for (path, operations) in golden.layers() {
        apply(&mut expected, operations);
        lowers.push(path);
    }
    apply(&mut expected, operations);
    let spec = StackSpec {
        lowers,
        upper: Some(upper),
        upper_layout: UpperLayout::default(),
        virtual_size_bytes: None,
    };
    let stack = Stack::open(&Opener::default(), &spec).unwrap();
    stack.write_at(&fill(99, 5000), 3333).unwrap();
    expected[3333..8333].copy_from_slice(&fill(99, 5000));
    assert_eq!(flat_bytes(&stack), expected);
    let fresh = UpperPaths {
        data: folder.path().join("data2"),
        index: folder.path().join("index2"),
    };
    let sealed = stack.seal(&fresh, true).unwrap();
    assert_eq!(flat_bytes(&stack), expected);
    let output = folder.path().join("flat");
    common::commit(&stack.lower_paths(), &output, common::encodings()[3]);
    let lowers = Lowers::open(&Opener::default(), std::slice::from_ref(&output)).unwrap();
    let flat = Stack::from_lowers(lowers, golden.size() as u64);
    assert_eq!(flat_bytes(&flat), expected);
    assert_eq!(sealed.path, folder.path().join("data"));
}
