//! Changes to the tree of files, as unpacking one layer of an image makes them.
//!
//! Paths are resolved as in a root of their own: links on the way are followed inside, `..` never leaves the root, the
//! last name is never followed. What a layer has made or changed is remembered, for its own whiteouts spare it.

use std::collections::BTreeMap;
use std::path::Path;

use lsmt::LayerInfo;

use super::content::Content;
use super::directory::{Directory, Entry, NAME_MAX};
use super::extents::{self, Extent};
use super::inode::{Inode, Kind, Meta};
use super::volume::Volume;
use super::{entry_error, xattrs, Ext4Error, BLOCK_BYTES};

const ROOT: u32 = 2;
/// Links followed on the way to one name, as in Linux.
const LINKS_MAX: usize = 40;
/// Longest target of a symbolic link: one block and an end mark.
const TARGET_MAX: usize = BLOCK_BYTES - 1;
/// A target this short is in the inode itself.
const SHORT_TARGET_MAX: usize = 59;
const FILE_BYTES_MAX: u64 = (u32::MAX as u64) * BLOCK_BYTES as u64;
/// Made with every file system, and wanted by its checker.
const LOST_AND_FOUND: &[u8] = b"lost+found";

/// The tree of files.
pub struct Tree {
    volume: Volume,
    directories: BTreeMap<u32, Directory>,
}

/// A name in a directory.
struct Place {
    directory: u32,
    name: Vec<u8>,
}

impl Tree {
    /// The tree of a file system.
    pub fn new(volume: Volume) -> Tree {
        let directories = BTreeMap::new();
        Tree {
            volume,
            directories,
        }
    }

    /// The file system, to write content to.
    pub fn volume(&mut self) -> &mut Volume {
        &mut self.volume
    }

    /// Puts a directory at `path`, or gives the one there other metadata.
    pub fn put_directory(&mut self, path: &[u8], meta: &Meta) -> Result<(), Ext4Error> {
        let Some(place) = self.place(path)? else {
            return self.change_meta(ROOT, meta, path);
        };
        match self.entry(&place)? {
            Some(found) if found.is_directory() => {
                self.touch(&place)?;
                self.change_meta(found.inode, meta, path)
            }
            _ => {
                self.clear(&place, path)?;
                let inode = self.new_directory(place.directory, meta, path)?;
                self.insert(&place, inode)
            }
        }
    }

    /// Puts a file of `size_bytes` at `path` whose content was written already.
    pub fn put_file(
        &mut self,
        path: &[u8],
        meta: &Meta,
        size_bytes: u64,
        content: Content,
    ) -> Result<(), Ext4Error> {
        if size_bytes > FILE_BYTES_MAX {
            return Err(entry_error(
                path,
                format!("{size_bytes} bytes are more than a file can have"),
            ));
        }
        let extents = content.finish(&mut self.volume)?;
        let place = self.new_place(path)?;
        let number = self.volume.take_inode(false)?;
        let mut inode = Inode::new(&Kind::File, meta);
        xattrs::set(&mut self.volume, &mut inode, &meta.xattrs, path)?;
        self.set_content(&mut inode, &extents, size_bytes, false)?;
        self.volume.write_inode(number, &inode)?;
        self.insert(&place, number)
    }

    /// Puts a link, device or pipe at `path`.
    pub fn put_special(&mut self, path: &[u8], kind: &Kind, meta: &Meta) -> Result<(), Ext4Error> {
        let place = self.new_place(path)?;
        let number = self.volume.take_inode(false)?;
        let mut inode = Inode::new(kind, meta);
        xattrs::set(&mut self.volume, &mut inode, &meta.xattrs, path)?;
        if let Kind::Symlink(target) = kind {
            self.set_target(&mut inode, target, path)?;
        }
        self.volume.write_inode(number, &inode)?;
        self.insert(&place, number)
    }

    /// Makes `path` another name of what is at `target`.
    pub fn put_hard_link(&mut self, path: &[u8], target: &[u8]) -> Result<(), Ext4Error> {
        let problem = |what: &str| {
            entry_error(
                path,
                format!("hard link to {}: {what}", String::from_utf8_lossy(target)),
            )
        };
        let found = match self.find(target)? {
            Some(place) => self.entry(&place)?,
            None => None,
        };
        let found = found.ok_or_else(|| problem("there is no such file"))?;
        if found.is_directory() {
            return Err(problem("it is a directory"));
        }
        let place = self
            .place(path)?
            .ok_or_else(|| problem("not at the root"))?;
        if self
            .entry(&place)?
            .is_some_and(|there| there.inode == found.inode)
        {
            return self.touch(&place);
        }
        let mut inode = self.volume.inode(found.inode)?;
        if !inode.can_be_linked() {
            return Err(problem("it has as many names as a file can have"));
        }
        inode.set_links(usize::from(inode.links()) + 1);
        self.volume.write_inode(found.inode, &inode)?;
        self.clear(&place, path)?;
        self.insert(&place, found.inode)
    }

    /// Removes what the layers below have at `path`; what this layer has made there stays.
    pub fn hide(&mut self, path: &[u8]) -> Result<(), Ext4Error> {
        match self.find(path)? {
            Some(place) => self.hide_place(&place),
            None => Ok(()),
        }
    }

    /// Removes what the layers below have in the directory `path`.
    pub fn hide_children(&mut self, path: &[u8]) -> Result<(), Ext4Error> {
        let directory = match self.find(path)? {
            None if components(path).next().is_none() => ROOT,
            None => return Ok(()),
            Some(place) => match self.entry(&place)? {
                Some(found) if found.is_directory() => found.inode,
                _ => return Ok(()),
            },
        };
        self.hide_below(directory)
    }

    fn hide_place(&mut self, place: &Place) -> Result<(), Ext4Error> {
        match self.entry(place)? {
            None => Ok(()),
            Some(_) if place.directory == ROOT && place.name == LOST_AND_FOUND => Ok(()),
            Some(found) if !found.is_touched => self.remove(place),
            Some(found) if found.is_directory() => self.hide_below(found.inode),
            Some(_) => Ok(()),
        }
    }

    fn hide_below(&mut self, top: u32) -> Result<(), Ext4Error> {
        let mut left = vec![top];
        while let Some(directory) = left.pop() {
            let entries = &self.directory(directory)?.entries;
            let found: Vec<(Vec<u8>, Entry)> =
                entries.iter().map(|(n, e)| (n.clone(), *e)).collect();
            for (name, entry) in found {
                let place = Place { directory, name };
                if entry.is_touched && entry.is_directory() {
                    left.push(entry.inode);
                } else {
                    self.hide_place(&place)?;
                }
            }
        }
        Ok(())
    }

    /// Writes everything into one sealed layer.
    pub fn into_layer(mut self, output: &Path, uuid: &str) -> Result<LayerInfo, Ext4Error> {
        for (number, directory) in std::mem::take(&mut self.directories) {
            if directory.is_changed {
                self.write_directory(number, &directory)?;
            }
        }
        self.volume.into_disk()?.into_layer(output, uuid)
    }

    // --- names -----------------------------------------------------------------------------------------------------

    /// Where `path` is or would be, with the directories on the way made if they are missing. None: the root itself.
    fn place(&mut self, path: &[u8]) -> Result<Option<Place>, Ext4Error> {
        self.walk(path, true)
    }

    /// As `place`, but makes nothing; None also when a directory on the way is missing.
    fn find(&mut self, path: &[u8]) -> Result<Option<Place>, Ext4Error> {
        self.walk(path, false)
    }

    /// The place of something new, with what was there removed.
    fn new_place(&mut self, path: &[u8]) -> Result<Place, Ext4Error> {
        let place = self.place(path)?;
        let place = place.ok_or_else(|| entry_error(path, "the root can only be a directory"))?;
        self.clear(&place, path)?;
        Ok(place)
    }

    fn walk(&mut self, path: &[u8], makes: bool) -> Result<Option<Place>, Ext4Error> {
        let mut left: Vec<Vec<u8>> = components(path).map(<[u8]>::to_vec).collect();
        let Some(name) = left.pop() else {
            return Ok(None);
        };
        if name.len() > NAME_MAX {
            return Err(entry_error(
                path,
                format!("a name is longer than {NAME_MAX} bytes"),
            ));
        }
        left.reverse();
        let (mut directory, mut links) = (ROOT, 0);
        while let Some(step) = left.pop() {
            if step == b".." {
                directory = self.directory(directory)?.parent;
                continue;
            }
            let place = Place {
                directory,
                name: step,
            };
            match self.entry(&place)? {
                Some(found) if found.is_directory() => {
                    if makes {
                        self.touch(&place)?;
                    }
                    directory = found.inode;
                }
                Some(found) => {
                    let inode = self.volume.inode(found.inode)?;
                    if !inode.is_symlink() {
                        return match makes {
                            true => Err(entry_error(
                                path,
                                "what should be a directory on its way is none",
                            )),
                            false => Ok(None),
                        };
                    }
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(entry_error(path, "too many symbolic links on its way"));
                    }
                    let target = self.target(&inode)?;
                    if target.starts_with(b"/") {
                        directory = ROOT;
                    }
                    left.extend(steps(&target).rev().map(<[u8]>::to_vec));
                }
                None if makes => {
                    if place.name.len() > NAME_MAX {
                        return Err(entry_error(
                            path,
                            format!("a name is longer than {NAME_MAX} bytes"),
                        ));
                    }
                    let mode = 0o755;
                    let plain = Meta {
                        mode,
                        ..Meta::default()
                    };
                    let made = self.new_directory(directory, &plain, path)?;
                    self.insert(&place, made)?;
                    directory = made;
                }
                None => return Ok(None),
            }
        }
        Ok(Some(Place { directory, name }))
    }

    fn directory(&mut self, number: u32) -> Result<&mut Directory, Ext4Error> {
        use std::collections::btree_map::Entry as Slot;
        match self.directories.entry(number) {
            Slot::Occupied(found) => Ok(found.into_mut()),
            Slot::Vacant(slot) => {
                let inode = self.volume.inode(number)?;
                if !inode.is_directory() {
                    return Err(Ext4Error::Damaged(format!(
                        "inode {number} should be a directory"
                    )));
                }
                Ok(slot.insert(Directory::read(&self.volume, &inode)?))
            }
        }
    }

    fn entry(&mut self, place: &Place) -> Result<Option<Entry>, Ext4Error> {
        let directory = self.directory(place.directory)?;
        Ok(directory.entries.get(&place.name).copied())
    }

    /// Remembers that this layer has it.
    fn touch(&mut self, place: &Place) -> Result<(), Ext4Error> {
        let directory = self.directory(place.directory)?;
        if let Some(entry) = directory.entries.get_mut(&place.name) {
            entry.is_touched = true;
        }
        Ok(())
    }

    fn insert(&mut self, place: &Place, inode: u32) -> Result<(), Ext4Error> {
        let entry_type = self.volume.inode(inode)?.entry_type();
        let directory = self.directory(place.directory)?;
        let entry = Entry {
            inode,
            entry_type,
            is_touched: true,
        };
        directory.entries.insert(place.name.clone(), entry);
        directory.is_changed = true;
        Ok(())
    }

    // --- inodes ----------------------------------------------------------------------------------------------------

    fn new_directory(&mut self, parent: u32, meta: &Meta, path: &[u8]) -> Result<u32, Ext4Error> {
        let number = self.volume.take_inode(true)?;
        let mut inode = Inode::new(&Kind::Directory, meta);
        xattrs::set(&mut self.volume, &mut inode, &meta.xattrs, path)?;
        self.volume.write_inode(number, &inode)?;
        let made = Directory {
            parent,
            entries: BTreeMap::new(),
            is_changed: true,
        };
        self.directories.insert(number, made);
        Ok(number)
    }

    fn change_meta(&mut self, number: u32, meta: &Meta, path: &[u8]) -> Result<(), Ext4Error> {
        let mut inode = self.volume.inode(number)?;
        xattrs::drop_all(&mut self.volume, &mut inode)?;
        xattrs::set(&mut self.volume, &mut inode, &meta.xattrs, path)?;
        inode.set_meta(&Kind::Directory, meta);
        self.volume.write_inode(number, &inode)
    }

    fn set_content(
        &mut self,
        inode: &mut Inode,
        runs: &[Extent],
        size_bytes: u64,
        is_indexed: bool,
    ) -> Result<(), Ext4Error> {
        let (root, tree_blocks) = extents::write(&mut self.volume, runs)?;
        let data_blocks: u64 = runs.iter().map(|run| run.length).sum();
        inode.set_content(&root, size_bytes, data_blocks + tree_blocks, is_indexed);
        Ok(())
    }

    fn set_target(
        &mut self,
        inode: &mut Inode,
        target: &[u8],
        path: &[u8],
    ) -> Result<(), Ext4Error> {
        if target.is_empty() || target.len() > TARGET_MAX || target.contains(&0) {
            let problem = format!(
                "a symbolic link cannot have a target of {} bytes",
                target.len()
            );
            return Err(entry_error(path, problem));
        }
        if target.len() <= SHORT_TARGET_MAX {
            inode.set_short_target(target);
            return Ok(());
        }
        let mut bytes = target.to_vec();
        bytes.resize(BLOCK_BYTES, 0);
        let (block, _) = self.volume.take_blocks(1)?;
        self.volume.disk.put(block, bytes)?;
        let mut runs = Vec::new();
        extents::push(&mut runs, 0, block, 1);
        self.set_content(inode, &runs, target.len() as u64, false)
    }

    fn target(&self, inode: &Inode) -> Result<Vec<u8>, Ext4Error> {
        let length = inode.size_bytes() as usize;
        if !inode.has_extents() && length <= SHORT_TARGET_MAX {
            return Ok(inode.block_area()[..length].to_vec());
        }
        let (runs, _) = extents::read(&self.volume, inode)?;
        match runs.first() {
            Some(run) if length <= TARGET_MAX => {
                Ok(self.volume.disk.read(run.physical)?[..length].to_vec())
            }
            _ => Err(Ext4Error::Damaged("a symbolic link has no target".into())),
        }
    }

    /// Removes whatever is at `place`, for something else comes there.
    fn clear(&mut self, place: &Place, path: &[u8]) -> Result<(), Ext4Error> {
        if place.directory == ROOT && place.name == LOST_AND_FOUND {
            return Err(entry_error(
                path,
                "the file system needs this directory itself",
            ));
        }
        self.remove(place)
    }

    fn remove(&mut self, place: &Place) -> Result<(), Ext4Error> {
        let directory = self.directory(place.directory)?;
        let Some(entry) = directory.entries.remove(&place.name) else {
            return Ok(());
        };
        directory.is_changed = true;
        let mut left = vec![entry];
        while let Some(entry) = left.pop() {
            if entry.is_directory() {
                left.extend(self.directory(entry.inode)?.entries.values().copied());
                self.directories.remove(&entry.inode);
            }
            self.unlink(entry)?;
        }
        Ok(())
    }

    fn unlink(&mut self, entry: Entry) -> Result<(), Ext4Error> {
        let mut inode = self.volume.inode(entry.inode)?;
        if !entry.is_directory() && inode.links() > 1 {
            inode.set_links(usize::from(inode.links()) - 1);
            return self.volume.write_inode(entry.inode, &inode);
        }
        xattrs::drop_all(&mut self.volume, &mut inode)?;
        self.free_content(&inode)?;
        self.volume.free_inode(entry.inode, entry.is_directory())
    }

    fn free_content(&mut self, inode: &Inode) -> Result<(), Ext4Error> {
        let (runs, tree) = extents::read(&self.volume, inode)?;
        for run in runs {
            self.volume.free_blocks(run.physical, run.length)?;
        }
        for block in tree {
            self.volume.free_blocks(block, 1)?;
        }
        Ok(())
    }

    fn write_directory(&mut self, number: u32, directory: &Directory) -> Result<(), Ext4Error> {
        let mut inode = self.volume.inode(number)?;
        let (blocks, is_indexed) = directory.to_blocks(number, &self.volume.hash_seed)?;
        self.free_content(&inode)?;
        let mut runs = Vec::new();
        let mut done = 0;
        while done < blocks.len() {
            let (first, count) = self.volume.take_blocks((blocks.len() - done) as u64)?;
            for (place, bytes) in (first..first + count).zip(&blocks[done..]) {
                self.volume.disk.put(place, bytes.clone())?;
            }
            extents::push(&mut runs, done as u64, first, count);
            done += count as usize;
        }
        self.set_content(
            &mut inode,
            &runs,
            (blocks.len() * BLOCK_BYTES) as u64,
            is_indexed,
        )?;
        let children = directory
            .entries
            .values()
            .filter(|entry| entry.is_directory())
            .count();
        inode.set_links(2 + children);
        self.volume.write_inode(number, &inode)
    }
}

fn steps(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
        .filter(|step| !step.is_empty() && *step != b".")
}

/// The names of a path with `..` taken as text: it takes back the name before, and is nothing at the root.
fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut names: Vec<&[u8]> = Vec::new();
    for step in steps(path) {
        if step == b".." {
            names.pop();
        } else {
            names.push(step);
        }
    }
    names.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_never_leads_above_the_root() {
        let names =
            |path: &[u8]| -> Vec<Vec<u8>> { components(path).map(<[u8]>::to_vec).collect() };
        assert_eq!(names(b"/a//b/./c/"), [b"a", b"b", b"c"]);
        assert_eq!(
            names(b"../../etc/passwd"),
            [b"etc".to_vec(), b"passwd".to_vec()]
        );
        assert_eq!(names(b"a/../../b"), [b"b"]);
        assert!(names(b"./").is_empty());
    }
}
