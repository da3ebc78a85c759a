//! Superblock, group descriptors and the two bitmaps: what is free, and taking and giving it back.
//!
//! Without checksums (`metadata_csum`, `uninit_bg`), so that every field stands for itself.

use std::collections::BTreeMap;

use super::bytes::{high, le16, le32, low, put16, put32};
use super::disk::Disk;
use super::inode::{Inode, INODE_BYTES};
use super::{Ext4Error, BLOCK_BYTES};

const SUPERBLOCK_AT: usize = 1024;
const DESCRIPTOR_BYTES: usize = 64;
const MAGIC: u16 = 0xef53;
const STATE_CLEAN: u16 = 1;
const SIGNED_HASH: u32 = 1;
/// filetype, extent, 64bit, flex_bg: all of them are needed.
const INCOMPAT: u32 = 0x2 | 0x40 | 0x80 | 0x200;
const INCOMPAT_RECOVER: u32 = 0x4;
/// sparse_super, large_file, huge_file, dir_nlink, extra_isize: nothing else may be there.
const RO_COMPAT: u32 = 0x1 | 0x2 | 0x8 | 0x20 | 0x40;
/// has_journal, ext_attr, resize_inode, dir_index, sparse_super2: nothing else may be there.
const COMPAT: u32 = 0x4 | 0x8 | 0x10 | 0x20 | 0x200;

struct Group {
    block_bitmap: u64,
    inode_bitmap: u64,
    inode_table: u64,
    free_blocks: u32,
    free_inodes: u32,
    directories: u32,
    changed: bool,
}

/// The file system's own bookkeeping.
pub struct Volume {
    /// The blocks.
    pub disk: Disk,
    groups: Vec<Group>,
    blocks: u64,
    blocks_per_group: u64,
    inodes_per_group: u32,
    first_inode: u32,
    /// Seed of the directory hash.
    pub hash_seed: [u32; 4],
    bitmaps: BTreeMap<u64, Bitmap>,
    next_block: u64,
    next_inode: u32,
}

struct Bitmap {
    bytes: Vec<u8>,
    changed: bool,
}

impl Volume {
    /// Reads the bookkeeping. Refuses a file system with other features than those it was made with.
    pub fn open(disk: Disk) -> Result<Volume, Ext4Error> {
        if disk.blocks() < 2 {
            return Err(Ext4Error::Damaged("the disk is too small".into()));
        }
        let first = disk.read(0)?;
        let sb = &first[SUPERBLOCK_AT..SUPERBLOCK_AT * 2];
        check_features(sb)?;
        let blocks = u64::from(le32(sb, 0x4)) | u64::from(le32(sb, 0x150)) << 32;
        let blocks_per_group = u64::from(le32(sb, 0x20));
        let inodes_per_group = le32(sb, 0x28);
        let bits = BLOCK_BYTES as u64 * 8;
        let per_block = (BLOCK_BYTES / INODE_BYTES) as u32;
        let is_sane = blocks_per_group == bits
            && inodes_per_group > 0
            && u64::from(inodes_per_group) <= bits
            && inodes_per_group % per_block == 0
            && blocks > 1
            && blocks <= disk.blocks();
        if !is_sane {
            return Err(Ext4Error::Damaged(
                "its superblock contradicts itself".into(),
            ));
        }
        let mut volume = Volume {
            groups: Vec::new(),
            blocks,
            blocks_per_group,
            inodes_per_group,
            first_inode: le32(sb, 0x54).max(11),
            hash_seed: [0, 4, 8, 12].map(|at| le32(sb, 0xec + at)),
            bitmaps: BTreeMap::new(),
            next_block: 0,
            next_inode: 0,
            disk,
        };
        volume.next_inode = volume.first_inode;
        volume.groups = volume.read_groups()?;
        Ok(volume)
    }

    fn read_groups(&self) -> Result<Vec<Group>, Ext4Error> {
        let count = self.blocks.div_ceil(self.blocks_per_group);
        let mut groups = Vec::new();
        let per_block = (BLOCK_BYTES / DESCRIPTOR_BYTES) as u64;
        for table in 0..count.div_ceil(per_block) {
            let bytes = self.disk.read(1 + table)?;
            let left = (count - table * per_block).min(per_block) as usize;
            for d in bytes.chunks(DESCRIPTOR_BYTES).take(left) {
                let wide =
                    |lo: usize, hi: usize| u64::from(le32(d, lo)) | u64::from(le32(d, hi)) << 32;
                let half =
                    |lo: usize, hi: usize| u32::from(le16(d, lo)) | u32::from(le16(d, hi)) << 16;
                groups.push(Group {
                    block_bitmap: wide(0x0, 0x20),
                    inode_bitmap: wide(0x4, 0x24),
                    inode_table: wide(0x8, 0x28),
                    free_blocks: half(0xc, 0x2c),
                    free_inodes: half(0xe, 0x2e),
                    directories: half(0x10, 0x30),
                    changed: false,
                });
            }
        }
        Ok(groups)
    }

    /// Size of the file system.
    pub fn size_mb(&self) -> u64 {
        (self.blocks * BLOCK_BYTES as u64) >> 20
    }

    /// Up to `wanted` free blocks that lie together, now taken: the first and how many.
    pub fn take_blocks(&mut self, wanted: u64) -> Result<(u64, u64), Ext4Error> {
        let start = self.next_block;
        for (from, to) in [(start, self.blocks), (0, start)] {
            if let Some((first, count)) = self.find_blocks(from, to, wanted)? {
                self.mark_blocks(first, count, true)?;
                self.next_block = first + count;
                return Ok((first, count));
            }
        }
        let disk_mb = self.size_mb();
        Err(Ext4Error::NoBlocks { disk_mb })
    }

    fn find_blocks(
        &mut self,
        from: u64,
        to: u64,
        wanted: u64,
    ) -> Result<Option<(u64, u64)>, Ext4Error> {
        let mut block = from;
        while block < to {
            let group = (block / self.blocks_per_group) as usize;
            let base = group as u64 * self.blocks_per_group;
            let end = (base + self.blocks_per_group).min(to);
            if self.groups[group].free_blocks > 0 {
                let bitmap = self.bitmap(self.groups[group].block_bitmap)?;
                if let Some(bit) = first_clear(
                    &bitmap.bytes,
                    (block - base) as usize,
                    (end - base) as usize,
                ) {
                    let most = (base + bit as u64 + wanted).min(end);
                    let free = (bit + 1..(most - base) as usize)
                        .take_while(|b| !is_set(&bitmap.bytes, *b));
                    let count = 1 + free.count() as u64;
                    return Ok(Some((base + bit as u64, count)));
                }
            }
            block = end;
        }
        Ok(None)
    }

    /// Gives blocks back, and forgets what was written to them.
    pub fn free_blocks(&mut self, first: u64, count: u64) -> Result<(), Ext4Error> {
        self.mark_blocks(first, count, false)?;
        for block in first..first + count {
            self.disk.forget(block);
        }
        Ok(())
    }

    fn mark_blocks(&mut self, first: u64, count: u64, taken: bool) -> Result<(), Ext4Error> {
        if count > self.blocks || first > self.blocks - count {
            return Err(Ext4Error::Damaged(format!(
                "blocks {first}+{count} are past the end"
            )));
        }
        for block in first..first + count {
            let group = (block / self.blocks_per_group) as usize;
            let bit = (block % self.blocks_per_group) as usize;
            let bitmap = self.bitmap(self.groups[group].block_bitmap)?;
            if is_set(&bitmap.bytes, bit) == taken {
                return Err(Ext4Error::Damaged(format!(
                    "block {block} is taken or freed twice"
                )));
            }
            bitmap.flip(bit);
            let group = &mut self.groups[group];
            group.free_blocks = if taken {
                group.free_blocks.wrapping_sub(1)
            } else {
                group.free_blocks + 1
            };
            group.changed = true;
        }
        Ok(())
    }

    /// A free inode, now taken.
    pub fn take_inode(&mut self, is_directory: bool) -> Result<u32, Ext4Error> {
        let first = ((self.next_inode - 1) / self.inodes_per_group) as usize;
        for index in first..self.groups.len() {
            if self.groups[index].free_inodes == 0 {
                continue;
            }
            let base = index as u32 * self.inodes_per_group + 1;
            let from = self.next_inode.max(base) - base;
            let to = self.inodes_per_group as usize;
            let bitmap = self.bitmap(self.groups[index].inode_bitmap)?;
            let Some(bit) = first_clear(&bitmap.bytes, from as usize, to) else {
                continue;
            };
            bitmap.flip(bit);
            let group = &mut self.groups[index];
            group.free_inodes -= 1;
            group.directories += u32::from(is_directory);
            group.changed = true;
            let number = base + bit as u32;
            self.next_inode = number;
            return Ok(number);
        }
        let disk_mb = self.size_mb();
        Err(Ext4Error::NoInodes { disk_mb })
    }

    /// Gives an inode back, and clears it.
    pub fn free_inode(&mut self, number: u32, is_directory: bool) -> Result<(), Ext4Error> {
        self.write_inode(number, &Inode::empty())?;
        let index = ((number - 1) / self.inodes_per_group) as usize;
        let bit = ((number - 1) % self.inodes_per_group) as usize;
        let bitmap = self.bitmap(self.groups[index].inode_bitmap)?;
        if !is_set(&bitmap.bytes, bit) {
            return Err(Ext4Error::Damaged(format!("inode {number} is freed twice")));
        }
        bitmap.flip(bit);
        let group = &mut self.groups[index];
        group.free_inodes += 1;
        group.directories = group.directories.wrapping_sub(u32::from(is_directory));
        group.changed = true;
        self.next_inode = self.next_inode.min(number);
        Ok(())
    }

    /// The inode's bytes.
    pub fn inode(&self, number: u32) -> Result<Inode, Ext4Error> {
        let (block, at) = self.inode_place(number)?;
        let bytes = self.disk.read(block)?;
        Ok(Inode::from_bytes(&bytes[at..at + INODE_BYTES]))
    }

    /// Replaces an inode.
    pub fn write_inode(&mut self, number: u32, inode: &Inode) -> Result<(), Ext4Error> {
        let (block, at) = self.inode_place(number)?;
        self.disk.change(block)?[at..at + INODE_BYTES].copy_from_slice(inode.bytes());
        Ok(())
    }

    fn inode_place(&self, number: u32) -> Result<(u64, usize), Ext4Error> {
        let index = number
            .checked_sub(1)
            .map(|n| (n / self.inodes_per_group) as usize);
        let group = index.and_then(|index| self.groups.get(index));
        let Some(group) = group else {
            return Err(Ext4Error::Damaged(format!("there is no inode {number}")));
        };
        let at = u64::from((number - 1) % self.inodes_per_group) * INODE_BYTES as u64;
        let block = BLOCK_BYTES as u64;
        Ok((group.inode_table + at / block, (at % block) as usize))
    }

    fn bitmap(&mut self, block: u64) -> Result<&mut Bitmap, Ext4Error> {
        use std::collections::btree_map::Entry;
        match self.bitmaps.entry(block) {
            Entry::Occupied(found) => Ok(found.into_mut()),
            Entry::Vacant(place) => {
                let bytes = self.disk.read(block)?;
                let changed = false;
                Ok(place.insert(Bitmap { bytes, changed }))
            }
        }
    }

    /// Writes bitmaps, descriptors and superblock. Call it last.
    pub fn into_disk(mut self) -> Result<Disk, Ext4Error> {
        for (block, bitmap) in std::mem::take(&mut self.bitmaps) {
            if bitmap.changed {
                self.disk.put(block, bitmap.bytes)?;
            }
        }
        let per_block = BLOCK_BYTES / DESCRIPTOR_BYTES;
        for (index, group) in self.groups.iter().enumerate() {
            if group.changed {
                let block = self.disk.change(1 + (index / per_block) as u64)?;
                let at = index % per_block * DESCRIPTOR_BYTES;
                let d = &mut block[at..at + DESCRIPTOR_BYTES];
                for (lo, hi, value) in [
                    (0xc, 0x2c, group.free_blocks),
                    (0xe, 0x2e, group.free_inodes),
                    (0x10, 0x30, group.directories),
                ] {
                    put16(d, lo, (value & 0xffff) as u16);
                    put16(d, hi, (value >> 16) as u16);
                }
            }
        }
        let free_blocks = self.groups.iter().map(|g| u64::from(g.free_blocks)).sum();
        let free_inodes = self.groups.iter().map(|g| g.free_inodes).sum();
        let sb = &mut self.disk.change(0)?[SUPERBLOCK_AT..];
        put32(sb, 0xc, low(free_blocks));
        put32(sb, 0x158, high(free_blocks));
        put32(sb, 0x10, free_inodes);
        Ok(self.disk)
    }
}

fn check_features(sb: &[u8]) -> Result<(), Ext4Error> {
    if le16(sb, 0x38) != MAGIC {
        return Err(Ext4Error::Damaged("there is no ext4 file system".into()));
    }
    let (compat, incompat, ro_compat) = (le32(sb, 0x5c), le32(sb, 0x60), le32(sb, 0x64));
    if incompat & INCOMPAT_RECOVER != 0 || le16(sb, 0x3a) & STATE_CLEAN == 0 {
        let what = "it was not unmounted cleanly";
        return Err(Ext4Error::Foreign(what.into()));
    }
    let is_known = le32(sb, 0x18) == 2
        && le32(sb, 0x14) == 0
        && le16(sb, 0x58) as usize == INODE_BYTES
        && le16(sb, 0xfe) as usize == DESCRIPTOR_BYTES
        && incompat == INCOMPAT
        && ro_compat & !RO_COMPAT == 0
        && compat & !COMPAT == 0
        && le32(sb, 0x160) & 3 == SIGNED_HASH;
    if !is_known {
        let what = format!("its features are {compat:#x}, {incompat:#x}, {ro_compat:#x}");
        return Err(Ext4Error::Foreign(what));
    }
    Ok(())
}

impl Bitmap {
    fn flip(&mut self, bit: usize) {
        self.bytes[bit / 8] ^= 1 << (bit % 8);
        self.changed = true;
    }
}

fn is_set(bytes: &[u8], bit: usize) -> bool {
    bytes[bit / 8] >> (bit % 8) & 1 == 1
}

fn first_clear(bytes: &[u8], from: usize, to: usize) -> Option<usize> {
    let mut bit = from;
    while bit < to {
        if bit % 8 == 0 && bytes[bit / 8] == 0xff {
            bit += 8;
        } else if is_set(bytes, bit) {
            bit += 1;
        } else {
            return Some(bit);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_clear_bit_is_found_inside_the_range_only() {
        let bytes = [0xff, 0b0000_0111, 0xff];
        assert_eq!(first_clear(&bytes, 0, 24), Some(11));
        assert_eq!(first_clear(&bytes, 12, 24), Some(12));
        assert_eq!(first_clear(&bytes, 16, 24), None);
        assert_eq!(first_clear(&bytes, 0, 11), None);
    }
}
