//! Layers made by the reference implementation must read exactly.
//!
//! The files are not part of the repository; without them the tests say so on
//! stderr and check nothing, which a run meant to be complete must look for.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::path::{Path, PathBuf};

use lsmt::lowers::Lowers;
use lsmt::{AppendUpper, RoLayer, Stack, StackSpec, UpperPaths};
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

    /// Layers stored as plain LSMT, with their operations, bottom first.
    fn raw_layers(&self) -> Vec<(PathBuf, &Value)> {
        let layers = self.manifest["layers"].as_array().unwrap().iter();
        let raw = layers.filter(|layer| layer["file"].as_str().unwrap().ends_with(".lsmt"));
        raw.map(|layer| {
            (
                self.folder.join(layer["file"].as_str().unwrap()),
                &layer["ops"],
            )
        })
        .collect()
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

/// The reference's own digest, so that the expected images are not only ours.
#[test]
fn the_first_layer_has_the_reference_digest() {
    let Some(golden) = Golden::open() else { return };
    let first = &golden.manifest["layers"][0];
    let path = golden.folder.join(first["file"].as_str().unwrap());
    let lowers = Lowers::open(&[path]).unwrap();
    let flat = flat_bytes(&Stack::from_lowers(lowers, golden.size() as u64));
    let digest: String = Sha256::digest(flat)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(digest, first["flat_sha256_through_here"].as_str().unwrap());
}

#[test]
fn every_raw_layer_reads_alone() {
    let Some(golden) = Golden::open() else { return };
    let layers = golden.raw_layers();
    assert_eq!(layers.len(), 4, "raw, sealed append, sparse and hybrid");
    for (path, operations) in layers {
        let mut expected = vec![0; golden.size()];
        apply(&mut expected, operations);
        let lowers = Lowers::open(std::slice::from_ref(&path)).unwrap();
        let stack = Stack::from_lowers(lowers, golden.size() as u64);
        assert_eq!(flat_bytes(&stack), expected, "{}", path.display());
    }
}

#[test]
fn the_upper_reads_over_the_raw_layers() {
    let Some(golden) = Golden::open() else { return };
    let mut expected = vec![0; golden.size()];
    let mut layers = Vec::new();
    for (path, operations) in golden.raw_layers() {
        apply(&mut expected, operations);
        layers.push(RoLayer::open(&path).unwrap());
    }
    let (data, index, operations) = golden.upper();
    apply(&mut expected, operations);
    layers.push(AppendUpper::open_read_only(&data, &index).unwrap());
    let lowers = Lowers::from_layers(layers).unwrap();
    let stack = Stack::from_lowers(lowers, golden.size() as u64);
    assert_eq!(flat_bytes(&stack), expected);
    assert_eq!(AppendUpper::check(&data, &index).unwrap(), 0);
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
    for (path, operations) in golden.raw_layers() {
        apply(&mut expected, operations);
        lowers.push(path);
    }
    apply(&mut expected, operations);
    let spec = StackSpec {
        lowers,
        upper: Some(upper),
        virtual_size_bytes: None,
    };
    let stack = Stack::open(&spec).unwrap();
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
    lsmt::commit(&stack.lower_paths(), &output, true).unwrap();
    let lowers = Lowers::open(std::slice::from_ref(&output)).unwrap();
    let flat = Stack::from_lowers(lowers, golden.size() as u64);
    assert_eq!(flat_bytes(&flat), expected);
    assert_eq!(sealed.path, folder.path().join("data"));
}

#[test]
fn wrapped_layers_are_named_as_unsupported() {
    let Some(golden) = Golden::open() else { return };
    for (file, kind) in [
        ("01-lz4-4k.zfile", "ZFile"),
        ("03-lz4-4k.tar", "tar-wrapped"),
    ] {
        let error = RoLayer::open(&golden.folder.join(file)).err().unwrap();
        assert!(error.to_string().contains(kind), "{error}");
    }
}
