//! Directories: read whole, changed in memory, written whole.
//!
//! One block is a plain list; more are hashed as the kernel does it, so that names are found at once in a large one.

use std::collections::BTreeMap;

use super::bytes::{le16, le32, put16, put32};
use super::extents;
use super::hash::half_md4;
use super::inode::Inode;
use super::volume::Volume;
use super::{Ext4Error, BLOCK_BYTES};

/// Longest name.
pub const NAME_MAX: usize = 255;
const HEAD_BYTES: usize = 8;
const TYPE_DIRECTORY: u8 = 2;
/// Leaves are filled to three quarters, which leaves a guest room to add names without a split.
const LEAF_FILL_BYTES: usize = BLOCK_BYTES * 3 / 4;
const HALF_MD4: u8 = 1;
const ROOT_RECORDS_AT: usize = 32;
const NODE_RECORDS_AT: usize = 8;
const ROOT_RECORDS: usize = (BLOCK_BYTES - ROOT_RECORDS_AT) / 8;
const NODE_RECORDS: usize = (BLOCK_BYTES - NODE_RECORDS_AT) / 8;

/// What a name stands for.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Its inode.
    pub inode: u32,
    /// The inode's type as directory entries state it.
    pub entry_type: u8,
    /// Whether the layer being applied made or changed it, or anything below it.
    pub is_touched: bool,
}

impl Entry {
    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        self.entry_type == TYPE_DIRECTORY
    }
}

/// The names of one directory.
#[derive(Debug, Default)]
pub struct Directory {
    /// Its parent's inode.
    pub parent: u32,
    /// By name.
    pub entries: BTreeMap<Vec<u8>, Entry>,
    /// Whether it must be written.
    pub is_changed: bool,
}

impl Directory {
    /// Reads a directory.
    pub fn read(volume: &Volume, inode: &Inode) -> Result<Directory, Ext4Error> {
        let (runs, _) = extents::read(volume, inode)?;
        let mut directory = Directory::default();
        for run in runs {
            for block in run.physical..run.physical + run.length {
                directory.read_block(&volume.disk.read(block)?)?;
            }
        }
        Ok(directory)
    }

    fn read_block(&mut self, block: &[u8]) -> Result<(), Ext4Error> {
        let mut at = 0;
        while at < BLOCK_BYTES {
            let record = &block[at..];
            if record.len() < HEAD_BYTES {
                return Err(Ext4Error::Damaged(
                    "a directory ends in the middle of an entry".into(),
                ));
            }
            let (inode, length, name_length) = (
                le32(record, 0),
                usize::from(le16(record, 4)),
                usize::from(record[6]),
            );
            if length < HEAD_BYTES + name_length || length > record.len() {
                return Err(Ext4Error::Damaged(
                    "a directory has a malformed entry".into(),
                ));
            }
            let entry = Entry {
                inode,
                entry_type: record[7],
                is_touched: false,
            };
            match &record[HEAD_BYTES..HEAD_BYTES + name_length] {
                _ if inode == 0 => {}
                b"." => {}
                b".." => self.parent = inode,
                name => drop(self.entries.insert(name.to_vec(), entry)),
            }
            at += length;
        }
        Ok(())
    }

    /// The blocks of the directory `own`, in order, and whether they are hashed.
    pub fn to_blocks(&self, own: u32, seed: &[u32; 4]) -> Result<(Vec<Vec<u8>>, bool), Ext4Error> {
        let dot = [(b".".as_slice(), own), (b"..".as_slice(), self.parent)];
        let mut plain: Vec<Record<'_>> = dot
            .map(|(name, inode)| Record::new(name, inode, TYPE_DIRECTORY))
            .into();
        plain.extend(
            self.entries
                .iter()
                .map(|(name, e)| Record::new(name, e.inode, e.entry_type)),
        );
        if plain.iter().map(Record::length).sum::<usize>() <= BLOCK_BYTES {
            return Ok((vec![leaf_block(&plain)], false));
        }
        let mut hashed: Vec<((u32, u32), Record<'_>)> = Vec::with_capacity(self.entries.len());
        for record in plain.split_off(2) {
            hashed.push((half_md4(record.name, seed), record));
        }
        hashed.sort_by(|a, b| (a.0, a.1.name).cmp(&(b.0, b.1.name)));
        let (starts, leaves) = leaves(&hashed);
        Ok((indexed(&plain, &starts, leaves)?, true))
    }
}

struct Record<'a> {
    name: &'a [u8],
    inode: u32,
    entry_type: u8,
}

impl<'a> Record<'a> {
    fn new(name: &'a [u8], inode: u32, entry_type: u8) -> Record<'a> {
        Record {
            name,
            inode,
            entry_type,
        }
    }

    fn length(&self) -> usize {
        (HEAD_BYTES + self.name.len()).next_multiple_of(4)
    }

    fn put(&self, block: &mut [u8], at: usize, length: usize) {
        let record = &mut block[at..];
        put32(record, 0, self.inode);
        put16(record, 4, length as u16);
        record[6] = self.name.len() as u8;
        record[7] = self.entry_type;
        record[HEAD_BYTES..HEAD_BYTES + self.name.len()].copy_from_slice(self.name);
    }
}

/// One block with these records; the last one reaches to its end.
fn leaf_block(records: &[Record<'_>]) -> Vec<u8> {
    let mut block = vec![0; BLOCK_BYTES];
    let mut at = 0;
    for (index, record) in records.iter().enumerate() {
        let is_last = index + 1 == records.len();
        let length = if is_last {
            BLOCK_BYTES - at
        } else {
            record.length()
        };
        record.put(&mut block, at, length);
        at += length;
    }
    block
}

/// Leaves of records in the order of their hash, and the hash each begins with; its lowest bit says that it goes on with
/// the hash the leaf before ended with.
fn leaves(hashed: &[((u32, u32), Record<'_>)]) -> (Vec<u32>, Vec<Vec<u8>>) {
    let (mut starts, mut blocks) = (Vec::new(), Vec::new());
    let mut first = 0;
    while first < hashed.len() {
        let mut bytes = 0;
        let count = hashed[first..]
            .iter()
            .take_while(|(_, record)| {
                bytes += record.length();
                bytes <= LEAF_FILL_BYTES
            })
            .count();
        let hash = hashed[first].0 .0;
        let goes_on = first > 0 && hashed[first - 1].0 .0 == hash;
        starts.push(hash | u32::from(goes_on));
        let records: Vec<_> = hashed[first..first + count]
            .iter()
            .map(|(_, r)| Record::new(r.name, r.inode, r.entry_type))
            .collect();
        blocks.push(leaf_block(&records));
        first += count;
    }
    (starts, blocks)
}

/// Root, inner nodes if the root cannot name all leaves, leaves: in this order in the file.
fn indexed(
    dots: &[Record<'_>],
    starts: &[u32],
    leaves: Vec<Vec<u8>>,
) -> Result<Vec<Vec<u8>>, Ext4Error> {
    let node_count = if starts.len() <= ROOT_RECORDS {
        0
    } else {
        starts.len().div_ceil(NODE_RECORDS)
    };
    if node_count > ROOT_RECORDS {
        return Err(Ext4Error::Entry {
            path: "a directory".into(),
            problem: format!("it needs {} blocks, more than an index names", leaves.len()),
        });
    }
    let leaf_at = |index: usize| (1 + node_count + index) as u32;
    let records: Vec<(u32, u32)> = starts
        .iter()
        .enumerate()
        .map(|(i, hash)| (*hash, leaf_at(i)))
        .collect();
    let mut root = vec![0; BLOCK_BYTES];
    dots[0].put(&mut root, 0, dots[0].length());
    dots[1].put(&mut root, dots[0].length(), BLOCK_BYTES - dots[0].length());
    root[28] = HALF_MD4;
    root[29] = 8; // bytes of this header
    root[30] = u8::from(node_count > 0); // levels below the root
    let mut blocks = vec![root];
    if node_count == 0 {
        put_records(&mut blocks[0], ROOT_RECORDS_AT, ROOT_RECORDS, &records);
    } else {
        let mut nodes = Vec::new();
        for (index, chunk) in records.chunks(NODE_RECORDS).enumerate() {
            nodes.push((chunk[0].0, (1 + index) as u32));
            let mut node = vec![0; BLOCK_BYTES];
            put16(&mut node, 4, BLOCK_BYTES as u16); // an unused entry over the whole block
            put_records(&mut node, NODE_RECORDS_AT, NODE_RECORDS, chunk);
            blocks.push(node);
        }
        put_records(&mut blocks[0], ROOT_RECORDS_AT, ROOT_RECORDS, &nodes);
    }
    blocks.extend(leaves);
    Ok(blocks)
}

/// Records of hash and block; the hash of the first is understood, its place tells limit and count.
fn put_records(block: &mut [u8], at: usize, limit: usize, records: &[(u32, u32)]) {
    for (index, (hash, child)) in records.iter().enumerate() {
        put32(block, at + index * 8, *hash);
        put32(block, at + index * 8 + 4, *child);
    }
    put16(block, at, limit as u16);
    put16(block, at + 2, records.len() as u16);
}
