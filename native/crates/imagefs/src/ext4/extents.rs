//! Extent trees: which blocks hold a file's content.

use super::bytes::{high, le16, le32, low, put16, put32};
use super::inode::Inode;
use super::volume::Volume;
use super::{Ext4Error, BLOCK_BYTES};

const MAGIC: u16 = 0xf30a;
const RECORD_BYTES: usize = 12;
const ROOT_RECORDS: usize = 4;
const BLOCK_RECORDS: usize = (BLOCK_BYTES - RECORD_BYTES) / RECORD_BYTES;
/// Longer lengths mark extents that are allocated but not written.
const LENGTH_MAX: u64 = 32768;
/// 340 records a block: five levels hold any file.
const DEPTH_MAX: u16 = 5;

/// A run of content blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First block of the file.
    pub logical: u32,
    /// Where it is on the disk.
    pub physical: u64,
    /// How many blocks.
    pub length: u64,
    /// Whether it reads as zeros, whatever is there.
    pub is_unwritten: bool,
}

/// Adds a run, joined to the one before where they touch.
pub fn push(extents: &mut Vec<Extent>, logical: u64, physical: u64, length: u64) {
    let (mut logical, mut physical, mut length) = (logical, physical, length);
    if let Some(last) = extents.last_mut() {
        let touches = u64::from(last.logical) + last.length == logical
            && last.physical + last.length == physical;
        if touches {
            let more = length.min(LENGTH_MAX - last.length);
            last.length += more;
            logical += more;
            physical += more;
            length -= more;
        }
    }
    while length > 0 {
        let piece = length.min(LENGTH_MAX);
        extents.push(Extent {
            logical: low(logical),
            physical,
            length: piece,
            is_unwritten: false,
        });
        logical += piece;
        physical += piece;
        length -= piece;
    }
}

/// Writes the tree of these extents; returns its root and how many blocks it took.
pub fn write(volume: &mut Volume, extents: &[Extent]) -> Result<([u8; 60], u64), Ext4Error> {
    let mut records: Vec<[u8; RECORD_BYTES]> = extents.iter().map(leaf_record).collect();
    let mut depth = 0;
    let mut blocks = 0;
    while records.len() > ROOT_RECORDS {
        let mut above = Vec::new();
        for chunk in records.chunks(BLOCK_RECORDS) {
            let (block, _) = volume.take_blocks(1)?;
            let mut bytes = vec![0; BLOCK_BYTES];
            fill(&mut bytes, chunk, BLOCK_RECORDS, depth);
            volume.disk.put(block, bytes)?;
            above.push(index_record(le32(&chunk[0], 0), block));
            blocks += 1;
        }
        records = above;
        depth += 1;
    }
    let mut root = [0; 60];
    fill(&mut root, &records, ROOT_RECORDS, depth);
    Ok((root, blocks))
}

fn leaf_record(extent: &Extent) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    put32(&mut record, 0, extent.logical);
    put16(&mut record, 4, (extent.length & 0xffff) as u16);
    put16(&mut record, 6, (high(extent.physical) & 0xffff) as u16);
    put32(&mut record, 8, low(extent.physical));
    record
}

fn index_record(logical: u32, block: u64) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    put32(&mut record, 0, logical);
    put32(&mut record, 4, low(block));
    put16(&mut record, 8, (high(block) & 0xffff) as u16);
    record
}

fn fill(bytes: &mut [u8], records: &[[u8; RECORD_BYTES]], most: usize, depth: u16) {
    put16(bytes, 0, MAGIC);
    put16(bytes, 2, records.len() as u16);
    put16(bytes, 4, most as u16);
    put16(bytes, 6, depth);
    for (index, record) in records.iter().enumerate() {
        let at = (index + 1) * RECORD_BYTES;
        bytes[at..at + RECORD_BYTES].copy_from_slice(record);
    }
}

/// The extents of an inode in order, and the blocks of the tree itself.
pub fn read(volume: &Volume, inode: &Inode) -> Result<(Vec<Extent>, Vec<u64>), Ext4Error> {
    let (mut extents, mut tree) = (Vec::new(), Vec::new());
    if inode.has_extents() {
        let root = inode.block_area().to_vec();
        let depth = le16(&root, 6);
        if depth > DEPTH_MAX {
            return Err(Ext4Error::Damaged(format!(
                "an extent tree is {depth} levels deep"
            )));
        }
        read_node(volume, &root, depth, &mut extents, &mut tree)?;
    }
    Ok((extents, tree))
}

fn read_node(
    volume: &Volume,
    node: &[u8],
    depth: u16,
    extents: &mut Vec<Extent>,
    tree: &mut Vec<u64>,
) -> Result<(), Ext4Error> {
    let count = usize::from(le16(node, 2));
    if le16(node, 0) != MAGIC || le16(node, 6) != depth || (count + 1) * RECORD_BYTES > node.len() {
        return Err(Ext4Error::Damaged("an extent tree is malformed".into()));
    }
    for record in node.chunks_exact(RECORD_BYTES).skip(1).take(count) {
        if depth > 0 {
            let block = u64::from(le32(record, 4)) | u64::from(le16(record, 8)) << 32;
            tree.push(block);
            let below = volume.disk.read(block)?;
            read_node(volume, &below, depth - 1, extents, tree)?;
        } else {
            let length = u64::from(le16(record, 4));
            let is_unwritten = length > LENGTH_MAX;
            extents.push(Extent {
                logical: le32(record, 0),
                physical: u64::from(le32(record, 8)) | u64::from(le16(record, 6)) << 32,
                length: if is_unwritten {
                    length - LENGTH_MAX
                } else {
                    length
                },
                is_unwritten,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_touch_are_one_extent_up_to_the_limit() {
        let mut extents = Vec::new();
        push(&mut extents, 0, 100, 10);
        push(&mut extents, 10, 110, LENGTH_MAX);
        push(&mut extents, 50_000, 5, 1);
        let facts: Vec<_> = extents
            .iter()
            .map(|e| (e.logical, e.physical, e.length))
            .collect();
        assert_eq!(
            facts,
            [(0, 100, LENGTH_MAX), (32768, 32868, 10), (50_000, 5, 1)]
        );
    }
}
