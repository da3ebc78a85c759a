//! Extended attributes: inside the inode when they fit, else in one block.

use super::bytes::{le16, le32, put16, put32};
use super::inode::{Inode, ATTRIBUTES_AT, INODE_BYTES};
use super::volume::Volume;
use super::{entry_error, Ext4Error, BLOCK_BYTES};

const MAGIC: u32 = 0xea02_0000;
const HEAD_BYTES: usize = 16;
const BLOCK_HEAD_BYTES: usize = 32;
const AREA_BYTES: usize = INODE_BYTES - ATTRIBUTES_AT;
const NAME_MAX: usize = 255;
/// Prefixes that are stored as a number; the ones that are whole names come first.
const PREFIXES: [(&[u8], u8); 6] = [
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"user.", 1),
    (b"trusted.", 4),
    (b"security.", 6),
    (b"system.", 7),
];

struct Attribute {
    index: u8,
    name: Vec<u8>,
    value: Vec<u8>,
}

impl Attribute {
    fn head_bytes(&self) -> usize {
        (HEAD_BYTES + self.name.len()).next_multiple_of(4)
    }

    fn bytes(&self) -> usize {
        self.head_bytes() + self.value.len().next_multiple_of(4)
    }

    fn hash(&self) -> u32 {
        let of_name = self
            .name
            .iter()
            .fold(0u32, |hash, byte| hash.rotate_left(5) ^ u32::from(*byte));
        self.value.chunks(4).fold(of_name, |hash, chunk| {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            hash.rotate_left(16) ^ u32::from_le_bytes(word)
        })
    }
}

/// Gives a new inode, or one whose attributes were dropped, these attributes.
pub fn set(
    volume: &mut Volume,
    inode: &mut Inode,
    xattrs: &[(Vec<u8>, Vec<u8>)],
    path: &[u8],
) -> Result<(), Ext4Error> {
    let mut attributes = Vec::new();
    for (full_name, value) in xattrs {
        attributes.push(attribute(full_name, value).map_err(|problem| entry_error(path, problem))?);
    }
    attributes
        .sort_by(|a, b| (a.index, a.name.len(), &a.name).cmp(&(b.index, b.name.len(), &b.name)));
    attributes.dedup_by(|a, b| a.index == b.index && a.name == b.name);
    if attributes.is_empty() {
        return Ok(());
    }
    let end_mark = 4;
    let total: usize = attributes.iter().map(Attribute::bytes).sum();
    if inode.has_usual_extra() && 4 + total + end_mark <= AREA_BYTES {
        let area = inode.attribute_area();
        put32(area, 0, MAGIC);
        put(&mut area[4..], 0, &attributes, false);
        return Ok(());
    }
    if BLOCK_HEAD_BYTES + total + end_mark > BLOCK_BYTES {
        let problem = format!("its extended attributes take {total} bytes, more than a block");
        return Err(entry_error(path, problem));
    }
    let mut block = vec![0; BLOCK_BYTES];
    put32(&mut block, 0, MAGIC);
    put32(&mut block, 4, 1); // how many inodes share it
    put32(&mut block, 8, 1); // blocks
    put(&mut block, BLOCK_HEAD_BYTES, &attributes, true);
    let hash = attributes
        .iter()
        .fold(0u32, |hash, a| hash.rotate_left(16) ^ a.hash());
    put32(&mut block, 12, hash);
    let (place, _) = volume.take_blocks(1)?;
    volume.disk.put(place, block)?;
    inode.set_attribute_block(place);
    Ok(())
}

/// Heads from `at` on, values from the end backwards.
fn put(area: &mut [u8], at: usize, attributes: &[Attribute], is_hashed: bool) {
    let (mut head, mut value_at) = (at, area.len());
    for attribute in attributes {
        value_at -= attribute.value.len().next_multiple_of(4);
        area[head] = attribute.name.len() as u8;
        area[head + 1] = attribute.index;
        put16(
            area,
            head + 2,
            if attribute.value.is_empty() {
                0
            } else {
                value_at as u16
            },
        );
        put32(area, head + 8, attribute.value.len() as u32);
        put32(
            area,
            head + 12,
            if is_hashed { attribute.hash() } else { 0 },
        );
        area[head + HEAD_BYTES..head + HEAD_BYTES + attribute.name.len()]
            .copy_from_slice(&attribute.name);
        area[value_at..value_at + attribute.value.len()].copy_from_slice(&attribute.value);
        head += attribute.head_bytes();
    }
}

/// Takes an inode's attributes away.
pub fn drop_all(volume: &mut Volume, inode: &mut Inode) -> Result<(), Ext4Error> {
    if inode.has_usual_extra() {
        inode.attribute_area().fill(0);
    }
    let place = inode.attribute_block();
    if place == 0 {
        return Ok(());
    }
    inode.set_attribute_block(0);
    let shared_by = le32(&volume.disk.read(place)?, 4);
    if shared_by > 1 {
        put32(volume.disk.change(place)?, 4, shared_by - 1);
        return Ok(());
    }
    volume.free_blocks(place, 1)
}

fn attribute(full_name: &[u8], value: &[u8]) -> Result<Attribute, String> {
    let shown = String::from_utf8_lossy(full_name);
    let known = PREFIXES
        .iter()
        .find(|(prefix, _)| full_name.starts_with(prefix));
    let Some((prefix, index)) = known else {
        return Err(format!(
            "the extended attribute {shown} is of no known kind"
        ));
    };
    let name = full_name[prefix.len()..].to_vec();
    if name.len() > NAME_MAX
        || full_name.contains(&0)
        || (name.is_empty() && !(2..=3).contains(index))
    {
        return Err(format!(
            "the extended attribute {shown} has an impossible name"
        ));
    }
    let value = match index {
        2 | 3 if name.is_empty() => {
            stored_acl(value).ok_or_else(|| format!("{shown} is no access control list"))?
        }
        _ => value.to_vec(),
    };
    let index = *index;
    Ok(Attribute { index, name, value })
}

/// Programs see access control lists in one form (version 2, every entry with an id), the disk has another (version 1).
fn stored_acl(value: &[u8]) -> Option<Vec<u8>> {
    if value.len() < 4 || le32(value, 0) != 2 || value.len() % 8 != 4 {
        return None;
    }
    let mut stored = 1u32.to_le_bytes().to_vec();
    for entry in value[4..].chunks(8) {
        let has_id = match le16(entry, 0) {
            0x02 | 0x08 => true,
            0x01 | 0x04 | 0x10 | 0x20 => false,
            _ => return None,
        };
        stored.extend_from_slice(&entry[..if has_id { 8 } else { 4 }]);
    }
    Some(stored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acl_is_stored_without_the_ids_that_mean_nothing() {
        let mut seen = 2u32.to_le_bytes().to_vec();
        for (tag, id) in [
            (1u16, u32::MAX),
            (2, 1000),
            (4, u32::MAX),
            (0x10, u32::MAX),
            (0x20, u32::MAX),
        ] {
            seen.extend(tag.to_le_bytes());
            seen.extend(6u16.to_le_bytes());
            seen.extend(id.to_le_bytes());
        }
        let stored = stored_acl(&seen).unwrap();
        assert_eq!(stored.len(), 4 + 4 * 4 + 8);
        assert_eq!(stored[8..16], [2, 0, 6, 0, 0xe8, 3, 0, 0]);
        assert_eq!(stored_acl(&seen[..9]), None);
        assert_eq!(stored_acl(b""), None);
    }

    #[test]
    fn names_are_split_at_the_prefix() {
        let found = attribute(b"security.capability", b"x").unwrap();
        assert_eq!(
            (found.index, found.name.as_slice()),
            (6, b"capability".as_slice())
        );
        assert!(attribute(b"weird.name", b"x").is_err());
        assert!(attribute(b"user.", b"x").is_err());
    }
}
