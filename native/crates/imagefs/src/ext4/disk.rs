//! The blocks of the disk: those of the layers below, and those changed since.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use lsmt::commit::is_zero;
use lsmt::writer::LayerOptions;
use lsmt::{LayerInfo, LayerWriter, Lowers, Opener, Stack};
use rustix::fs::{Mode, OFlags};

use super::{Ext4Error, BLOCK_BYTES};

/// Metadata blocks kept in memory before they go to the staging file: 128 MiB.
const CACHED_BLOCKS_MAX: usize = 32 << 10;
/// Blocks copied into the layer at a time.
const COPY_BLOCKS: u64 = 256;
const SECTORS_PER_BLOCK: u64 = BLOCK_BYTES as u64 / 512;

/// A stack of layers with changes on top, kept in a nameless file until they
/// become a layer of their own.
pub struct Disk {
    lowers: Stack,
    staging: File,
    /// One bit per block: whether the staging file has it.
    staged: Vec<u64>,
    /// Changed metadata blocks.
    cache: BTreeMap<u64, Vec<u8>>,
    blocks: u64,
}

impl Disk {
    /// Opens the layers, bottom first. `folder` takes the staging file, which
    /// has no name and goes with the process.
    pub fn open(lowers: &[PathBuf], folder: &Path) -> Result<Disk, Ext4Error> {
        let lowers = Lowers::open(&Opener::default(), lowers)?;
        let size_bytes = lowers.virtual_size_bytes();
        let lowers = Stack::from_lowers(lowers, size_bytes);
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let staging = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR);
        let staging = File::from(staging.map_err(std::io::Error::from)?);
        let blocks = lowers.virtual_size_bytes() / BLOCK_BYTES as u64;
        Ok(Disk {
            lowers,
            staging,
            staged: vec![0; blocks.div_ceil(64) as usize],
            cache: BTreeMap::new(),
            blocks,
        })
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The block's bytes as they are now.
    pub fn read(&self, block: u64) -> Result<Vec<u8>, Ext4Error> {
        if let Some(bytes) = self.cache.get(&block) {
            return Ok(bytes.clone());
        }
        if block >= self.blocks {
            let what = format!("block {block} is past the end of the disk");
            return Err(Ext4Error::Damaged(what));
        }
        let mut bytes = vec![0; BLOCK_BYTES];
        let offset = block * BLOCK_BYTES as u64;
        if self.is_staged(block) {
            self.staging.read_exact_at(&mut bytes, offset)?;
        } else {
            self.lowers.read_at(&mut bytes, offset)?;
        }
        Ok(bytes)
    }

    /// The block's bytes, to be changed.
    pub fn change(&mut self, block: u64) -> Result<&mut Vec<u8>, Ext4Error> {
        if !self.cache.contains_key(&block) {
            let bytes = self.read(block)?;
            self.put(block, bytes)?;
        }
        self.cache
            .get_mut(&block)
            .ok_or_else(|| Ext4Error::Damaged(format!("block {block} is nowhere")))
    }

    /// Replaces a metadata block.
    pub fn put(&mut self, block: u64, bytes: Vec<u8>) -> Result<(), Ext4Error> {
        debug_assert_eq!(bytes.len(), BLOCK_BYTES);
        if block >= self.blocks {
            let what = format!("block {block} is past the end of the disk");
            return Err(Ext4Error::Damaged(what));
        }
        if self.cache.len() >= CACHED_BLOCKS_MAX {
            self.spill()?;
        }
        self.cache.insert(block, bytes);
        Ok(())
    }

    /// Replaces whole blocks of file content.
    pub fn write(&mut self, first: u64, bytes: &[u8]) -> Result<(), Ext4Error> {
        debug_assert_eq!(bytes.len() % BLOCK_BYTES, 0);
        self.staging
            .write_all_at(bytes, first * BLOCK_BYTES as u64)?;
        for block in first..first + (bytes.len() / BLOCK_BYTES) as u64 {
            self.staged[(block / 64) as usize] |= 1 << (block % 64);
        }
        Ok(())
    }

    /// Forgets changes of a block that is free now.
    pub fn forget(&mut self, block: u64) {
        self.cache.remove(&block);
        self.staged[(block / 64) as usize] &= !(1 << (block % 64));
    }

    fn is_staged(&self, block: u64) -> bool {
        self.staged[(block / 64) as usize] >> (block % 64) & 1 == 1
    }

    fn spill(&mut self) -> Result<(), Ext4Error> {
        for (block, bytes) in std::mem::take(&mut self.cache) {
            self.write(block, &bytes)?;
        }
        Ok(())
    }

    /// Writes every changed block into one sealed layer. `uuid` is its identity.
    pub fn into_layer(mut self, output: &Path, uuid: &str) -> Result<LayerInfo, Ext4Error> {
        self.spill()?;
        let options = LayerOptions {
            uuid: Some(uuid.to_owned()),
            parent_uuid: self.lowers.top_uuid(),
            ..LayerOptions::new(self.lowers.virtual_size_bytes())
        };
        let mut writer = LayerWriter::create(output, &options)?;
        let mut buffer = vec![0; COPY_BLOCKS as usize * BLOCK_BYTES];
        let mut block = 0;
        while block < self.blocks {
            if self.staged[(block / 64) as usize] == 0 {
                block = (block / 64 + 1) * 64;
                continue;
            }
            let start = block;
            while block < self.blocks && block - start < COPY_BLOCKS && self.is_staged(block) {
                block += 1;
            }
            if block == start {
                block += 1;
                continue;
            }
            let bytes = &mut buffer[..(block - start) as usize * BLOCK_BYTES];
            self.staging
                .read_exact_at(bytes, start * BLOCK_BYTES as u64)?;
            self.append(&mut writer, start, bytes)?;
        }
        Ok(writer.finish(true)?)
    }

    /// Zeros are data only where they hide something.
    fn append(&self, writer: &mut LayerWriter, first: u64, bytes: &[u8]) -> Result<(), Ext4Error> {
        for (block, content) in (first..).zip(bytes.chunks(BLOCK_BYTES)) {
            let sector = block * SECTORS_PER_BLOCK;
            if !is_zero(content) {
                writer.append_data(sector, content)?;
            } else if !self
                .lowers
                .reads_zero(block * BLOCK_BYTES as u64, BLOCK_BYTES as u64)
            {
                writer.append_zeroed(sector, SECTORS_PER_BLOCK)?;
            }
        }
        Ok(())
    }
}
