//! Writes a ZFile in one pass (overlaybd spec 2.4).
//!
//! The header is written last, over a first one without figures: a reader of a
//! file whose writer was interrupted finds no jump table and refuses it.

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::os::unix::fs::FileExt;

use zstd::bulk::Compressor;

use super::crc;
use super::format::{
    flags, Algorithm, Head, BLOCK_BYTES, BLOCK_SIZES, CRC_BYTES, ENTRY_BYTES, MAX_BLOCKS,
};

/// Bytes compressed at once, by all workers together.
const BATCH_BYTES: usize = 4 << 20;
/// Most workers: reading and writing the disk keep up with few.
const MAX_WORKERS: usize = 8;
/// The level both reference implementations use.
const ZSTD_LEVEL: i32 = 3;

/// How to compress a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compression {
    algorithm: Algorithm,
    block_bytes: u32,
}

impl Compression {
    /// Blocks of `block_bytes`, a power of two from 4096 to 65536; `None` for any
    /// other size. The reference cannot read incompressible blocks of 65536.
    pub fn new(algorithm: Algorithm, block_bytes: u32) -> Option<Compression> {
        let is_good = BLOCK_SIZES.contains(&block_bytes) && block_bytes.is_power_of_two();
        is_good.then_some(Compression {
            algorithm,
            block_bytes,
        })
    }
}

/// Compresses what is appended, into a file from byte `start` on.
pub(crate) struct Encoder {
    compression: Compression,
    start: u64,
    position: u64,
    batch: Vec<u8>,
    stored_lengths: Vec<u8>,
    original_bytes: u64,
}

impl Encoder {
    pub(crate) fn new(compression: Compression, start: u64) -> Encoder {
        Encoder {
            compression,
            start,
            position: start + BLOCK_BYTES as u64,
            batch: Vec::with_capacity(BATCH_BYTES),
            stored_lengths: Vec::new(),
            original_bytes: 0,
        }
    }

    pub(crate) fn append(&mut self, file: &File, mut bytes: &[u8]) -> io::Result<()> {
        self.original_bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let room = BATCH_BYTES - self.batch.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.batch.extend_from_slice(now);
            bytes = later;
            if self.batch.len() == BATCH_BYTES {
                self.write_batch(file)?;
            }
        }
        Ok(())
    }

    /// Writes what is left, the jump table, trailer and header. Returns the first
    /// byte after the ZFile.
    pub(crate) fn finish(mut self, file: &File) -> io::Result<u64> {
        self.write_batch(file)?;
        let table = std::mem::take(&mut self.stored_lengths);
        let trailer = Head {
            flags: flags::DATA | flags::SEALED | flags::DIGEST,
            index_offset: self.position - self.start,
            blocks: table.len() as u64 / ENTRY_BYTES,
            original_bytes: self.original_bytes,
            index_crc: crc::raw(0, &table),
            block_bytes: self.compression.block_bytes,
            algorithm: self.compression.algorithm,
            verify: true,
        };
        let header = Head {
            flags: flags::HEADER | flags::DATA | flags::OVERWRITTEN | flags::DIGEST,
            ..trailer.clone()
        };
        file.write_all_at(&table, self.position)?;
        self.position += table.len() as u64;
        file.write_all_at(&trailer.encode(), self.position)?;
        file.write_all_at(&header.encode(), self.start)?;
        Ok(self.position + BLOCK_BYTES as u64)
    }

    fn write_batch(&mut self, file: &File) -> io::Result<()> {
        let block_bytes = self.compression.block_bytes as usize;
        let blocks = self.batch.len().div_ceil(block_bytes);
        let done = self.stored_lengths.len() as u64 / ENTRY_BYTES;
        if done + blocks as u64 > MAX_BLOCKS {
            let text = format!("more than {MAX_BLOCKS} blocks; use a larger block size");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let workers = std::thread::available_parallelism().map_or(1, NonZero::get);
        let share = blocks.div_ceil(workers.clamp(1, MAX_WORKERS)).max(1) * block_bytes;
        let compression = self.compression;
        let parts: Vec<io::Result<Part>> = std::thread::scope(|scope| {
            let running: Vec<_> = (self.batch.chunks(share))
                .map(|bytes| scope.spawn(move || Part::compress(compression, bytes)))
                .collect();
            let gone = || io::Error::other("a compressing thread failed");
            let joined = running.into_iter().map(|thread| thread.join());
            joined
                .map(|result| result.map_err(|_| gone()).and_then(|part| part))
                .collect()
        });
        for part in parts {
            let part = part?;
            file.write_all_at(&part.stored, self.position)?;
            self.position += part.stored.len() as u64;
            self.stored_lengths.extend_from_slice(&part.lengths);
        }
        self.batch.clear();
        Ok(())
    }
}

/// Some blocks in their stored form, and their jump table entries.
#[derive(Default)]
struct Part {
    stored: Vec<u8>,
    lengths: Vec<u8>,
}

impl Part {
    fn compress(compression: Compression, bytes: &[u8]) -> io::Result<Part> {
        let mut part = Part::default();
        let block_bytes = compression.block_bytes as usize;
        let bound = match compression.algorithm {
            Algorithm::Lz4 => lz4_flex::block::get_maximum_output_size(block_bytes),
            Algorithm::Zstd => zstd::zstd_safe::compress_bound(block_bytes),
        };
        let mut packed = vec![0; bound];
        let mut zstd = Compressor::new(ZSTD_LEVEL)?;
        for block in bytes.chunks(block_bytes) {
            let count = match compression.algorithm {
                Algorithm::Lz4 => {
                    lz4_flex::block::compress_into(block, &mut packed).map_err(io::Error::other)?
                }
                Algorithm::Zstd => zstd.compress_to_buffer(block, packed.as_mut_slice())?,
            };
            let stored = &packed[..count];
            let length = count as u32 + CRC_BYTES as u32;
            part.lengths.extend_from_slice(&length.to_le_bytes());
            part.stored.extend_from_slice(stored);
            let checksum = crc::raw(crc::BLOCK_SEED, stored);
            part.stored.extend_from_slice(&checksum.to_le_bytes());
        }
        Ok(part)
    }
}
