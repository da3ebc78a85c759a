//! What several tests share.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lsmt::format::Segment;
use lsmt::lowers::Lowers;
use lsmt::zfile::{Algorithm, Compression};
use lsmt::{
    Blob, CommitOptions, Encoding, LayerOptions, LayerWriter, Opener, RoLayer, Stack, UpperLayout,
    UpperPaths,
};

/// Every way to write an upper.
pub const LAYOUTS: [UpperLayout; 3] = [
    UpperLayout::Append,
    UpperLayout::Hybrid,
    UpperLayout::Sparse,
];

/// The two files of an upper.
pub fn pair(folder: &Path, name: &str) -> UpperPaths {
    UpperPaths {
        data: folder.join(format!("{name}.data")),
        index: folder.join(format!("{name}.index")),
    }
}

/// A blob in memory.
pub struct Memory(pub Vec<u8>);

impl Blob for Memory {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let end = start.checked_add(buffer.len());
        let bytes = end.and_then(|end| self.0.get(start..end));
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Repeatable bytes; every third page of them compresses well.
pub fn content(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut bytes: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(length)
    .collect();
    for page in bytes.chunks_mut(4096).step_by(3) {
        page.fill(seed as u8 | 1);
    }
    bytes
}

pub fn encoding(compression: Option<(Algorithm, u32)>, tar: bool) -> Encoding {
    Encoding {
        compression: compression.map(|(algorithm, block_bytes)| {
            Compression::new(algorithm, block_bytes).expect("a good block size")
        }),
        tar,
    }
}

/// Every kind of wrapping.
pub fn encodings() -> Vec<Encoding> {
    let mut all = Vec::new();
    for tar in [false, true] {
        all.push(encoding(None, tar));
        for block_bytes in [4096, 8192, 16_384, 32_768, 65_536] {
            all.push(encoding(Some((Algorithm::Lz4, block_bytes)), tar));
            all.push(encoding(Some((Algorithm::Zstd, block_bytes)), tar));
        }
    }
    all
}

/// Writes a layer with one range of data and one of zeros.
pub fn write_layer(path: &Path, encoding: Encoding, bytes: &[u8]) {
    let options = LayerOptions {
        encoding,
        ..LayerOptions::new(2 * bytes.len() as u64)
    };
    let mut writer = LayerWriter::create(path, &options).unwrap();
    writer.append_data(3, bytes).unwrap();
    writer
        .append_zeroed(3 + bytes.len() as u64 / 512, 5)
        .unwrap();
    writer.finish(false).unwrap();
}

/// The bytes of a written layer.
pub fn layer_bytes(encoding: Encoding, bytes: &[u8]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    write_layer(&path, encoding, bytes);
    std::fs::read(path).unwrap()
}

/// Opens bytes as a layer and reads all data of it.
pub fn open_and_read(bytes: Vec<u8>) -> Result<Vec<(Segment, Vec<u8>)>, String> {
    read_all(&Opener::new(1 << 20), Arc::new(Memory(bytes)))
}

pub fn read_all(opener: &Opener, blob: Arc<dyn Blob>) -> Result<Vec<(Segment, Vec<u8>)>, String> {
    let key = opener.cache().fresh_key();
    let (blob, _) = opener
        .unwrap(blob, key)
        .map_err(|error| error.to_string())?;
    let opened = RoLayer::from_blob(Path::new("memory"), blob);
    let (layer, entries) = opened.map_err(|error| error.to_string())?;
    let mut found = Vec::new();
    for entry in entries {
        let mut data = Vec::new();
        if !entry.is_zeroed() {
            data.resize(entry.length() as usize * 512, 0);
            let read = layer.blob().read_exact_at(&mut data, entry.moffset() * 512);
            read.map_err(|error| error.to_string())?;
        }
        found.push((entry, data));
    }
    Ok(found)
}

pub fn flat(stack: &Stack) -> Vec<u8> {
    let mut bytes = vec![0xee; stack.virtual_size_bytes() as usize];
    assert_eq!(stack.read_at(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

/// Commits the layers into `output`.
pub fn commit(layers: &[PathBuf], output: &Path, encoding: Encoding) {
    let options = CommitOptions {
        encoding,
        ..CommitOptions::default()
    };
    let lowers = Lowers::open(&Opener::default(), layers).unwrap();
    lsmt::commit(&lowers, output, &options).unwrap();
}
