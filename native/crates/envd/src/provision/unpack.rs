//! Unpacking of a build's files: an archive that the host has made, onto whatever the image has there.
//!
//! As BuildKit does it for COPY: a folder of the archive joins the one that is there, through a link as well; anything
//! else takes the place of what is there, but never that of a folder. The destination itself keeps its owner and
//! mode if it was there.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{symlink, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use bytes::{Buf, Bytes};
use rustix::fs::{utimensat, AtFlags, Timestamps, CWD};
use rustix::time::Timespec;
use tar::{Archive, Entry, EntryType};
use tokio::sync::mpsc;

use super::{give, make_folders, Owner};

/// A failure and the place it is about.
#[derive(Debug)]
pub struct Failure {
    /// Where.
    pub path: PathBuf,
    /// What.
    pub error: io::Error,
}

/// A body that arrives in pieces, for a reader on a worker thread.
pub struct Pieces {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
}

impl Pieces {
    /// What `receiver` gives, to its end.
    pub fn new(receiver: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        Self {
            receiver,
            piece: Bytes::new(),
        }
    }
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.receiver.blocking_recv() {
                None => return Ok(0),
                Some(piece) => self.piece = piece?,
            }
        }
        let count = buffer.len().min(self.piece.len());
        self.piece
            .split_to(count)
            .copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

/// Unpacks `archive` below `folder`, which is made as `owner`'s if it is missing.
pub fn unpack(archive: impl Read, folder: &Path, owner: Owner) -> Result<(), Failure> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| Failure { path, error }
    };
    let is_new = make_folders(folder, owner).map_err(at(folder))?;
    let mut archive = Archive::new(archive);
    let mut folders: Vec<(PathBuf, u32, i64)> = Vec::new();
    for entry in archive.entries().map_err(at(folder))? {
        let mut entry = entry.map_err(at(folder))?;
        let name = below(&entry.path().map_err(at(folder))?).map_err(at(folder))?;
        let place = folder.join(&name);
        if entry.header().entry_type() != EntryType::Directory {
            put(&mut entry, folder, &place).map_err(at(&place))?;
        } else if let Some(facts) =
            join(&entry, &place, is_new || place != folder).map_err(at(&place))?
        {
            folders.push((place, facts.0, facts.1));
        }
    }
    // Last, and the deepest first: what is put into a folder changes its time, and its mode may forbid it.
    for (place, mode, time_s) in folders.into_iter().rev() {
        let set = fs::set_permissions(&place, fs::Permissions::from_mode(mode));
        set.and_then(|()| set_time(&place, time_s))
            .map_err(at(&place))?;
    }
    Ok(())
}

fn below(path: &Path) -> io::Result<PathBuf> {
    let mut name = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => name.push(part),
            Component::CurDir => {}
            _ => {
                return Err(io::Error::other(format!(
                    "the archive names '{}'",
                    path.display()
                )))
            }
        }
    }
    Ok(name)
}

/// Makes a folder or joins the one that is there. Returns mode and time to set in the end.
fn join<R: Read>(
    entry: &Entry<'_, R>,
    place: &Path,
    sets_facts: bool,
) -> io::Result<Option<(u32, i64)>> {
    if !place.is_dir() {
        remove_other(place)?;
        fs::create_dir(place)?;
    } else if !sets_facts || fs::symlink_metadata(place)?.is_symlink() {
        return Ok(None);
    }
    give(place, owner_of(entry)?)?;
    let header = entry.header();
    Ok(Some((header.mode()? & 0o7777, time_of(entry)?)))
}

fn put<R: Read>(entry: &mut Entry<'_, R>, folder: &Path, place: &Path) -> io::Result<()> {
    if let Some(above) = place.parent().filter(|above| !above.is_dir()) {
        make_folders(above, owner_of(entry)?)?;
    }
    remove_other(place)?;
    let kind = entry.header().entry_type();
    let target = entry.link_name()?.map(|name| name.into_owned());
    match (kind, target) {
        (EntryType::Regular | EntryType::Continuous, _) => {
            let mode = entry.header().mode()? & 0o7777;
            let mut file = File::options()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(place)?;
            io::copy(entry, &mut file)?;
            give(place, owner_of(entry)?)?;
            file.set_permissions(fs::Permissions::from_mode(mode))?;
            set_time(place, time_of(entry)?)
        }
        (EntryType::Symlink, Some(target)) => {
            symlink(target, place)?;
            give(place, owner_of(entry)?)
        }
        (EntryType::Link, Some(target)) => fs::hard_link(folder.join(below(&target)?), place),
        _ => Err(io::Error::other(
            "the archive has something there that is neither file, folder nor link",
        )),
    }
}

/// Removes what is no folder; nothing being there is fine.
fn remove_other(place: &Path) -> io::Result<()> {
    match fs::symlink_metadata(place) {
        Ok(info) if info.is_dir() => Err(io::Error::from_raw_os_error(libc::EISDIR)),
        Ok(_) => fs::remove_file(place),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn owner_of<R: Read>(entry: &Entry<'_, R>) -> io::Result<Owner> {
    let id = |number: u64| u32::try_from(number).map_err(io::Error::other);
    Ok(Owner {
        uid: id(entry.header().uid()?)?,
        gid: id(entry.header().gid()?)?,
    })
}

fn time_of<R: Read>(entry: &Entry<'_, R>) -> io::Result<i64> {
    i64::try_from(entry.header().mtime()?).map_err(io::Error::other)
}

fn set_time(place: &Path, time_s: i64) -> io::Result<()> {
    let time = Timespec {
        tv_sec: time_s,
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    Ok(utimensat(CWD, place, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use tar::{Builder, Header};

    fn place(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("envd-unpack-{}-{name}", std::process::id()));
        let _absent = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn add(builder: &mut Builder<Vec<u8>>, name: &str, kind: EntryType, content: &str, mode: u32) {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(12);
        header.set_gid(34);
        header.set_mtime(1_700_000_000);
        if matches!(kind, EntryType::Symlink | EntryType::Link) {
            header.set_size(0);
            builder.append_link(&mut header, name, content).unwrap();
        } else {
            header.set_size(content.len() as u64);
            builder
                .append_data(&mut header, name, content.as_bytes())
                .unwrap();
        }
    }

    const OWNER: Owner = Owner { uid: 5, gid: 6 };

    #[test]
    fn files_folders_and_links_have_the_archives_facts() {
        let root = place("facts");
        let mut builder = Builder::new(Vec::new());
        add(&mut builder, "./", EntryType::Directory, "", 0o750);
        add(&mut builder, "sub", EntryType::Directory, "", 0o500);
        add(&mut builder, "sub/run", EntryType::Regular, "#!x", 0o4755);
        add(&mut builder, "link", EntryType::Symlink, "sub/run", 0o777);
        add(&mut builder, "same", EntryType::Link, "sub/run", 0o755);
        let long = "n".repeat(180);
        add(&mut builder, &long, EntryType::Regular, "", 0o644);
        let bytes = builder.into_inner().unwrap();
        let folder = root.join("a/b");
        unpack(bytes.as_slice(), &folder, OWNER).unwrap();
        let facts = |name: &str| {
            let info = fs::symlink_metadata(folder.join(name)).unwrap();
            (info.mode() & 0o7777, info.uid(), info.gid(), info.mtime())
        };
        assert_eq!(facts("sub/run"), (0o4755, 12, 34, 1_700_000_000));
        assert_eq!(facts("sub"), (0o500, 12, 34, 1_700_000_000));
        assert_eq!(
            facts("."),
            (0o750, 12, 34, 1_700_000_000),
            "a new destination is as the archive says"
        );
        let above = fs::metadata(root.join("a")).unwrap();
        assert_eq!(
            (above.uid(), above.gid(), above.mode() & 0o7777),
            (5, 6, 0o755)
        );
        assert_eq!(
            fs::read_link(folder.join("link")).unwrap(),
            PathBuf::from("sub/run")
        );
        let inode = |name: &str| fs::metadata(folder.join(name)).unwrap().ino();
        assert_eq!(inode("same"), inode("sub/run"));
        assert!(folder.join(long).is_file());
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_there_gives_way_but_folders() {
        let root = place("there");
        fs::create_dir_all(root.join("real/kept")).unwrap();
        symlink("real", root.join("linked")).unwrap();
        fs::write(root.join("victim"), "untouched").unwrap();
        symlink("victim", root.join("file")).unwrap();
        let before = fs::metadata(&root).unwrap();
        let mut builder = Builder::new(Vec::new());
        add(&mut builder, ".", EntryType::Directory, "", 0o700);
        add(&mut builder, "linked", EntryType::Directory, "", 0o700);
        add(&mut builder, "linked/new", EntryType::Regular, "n", 0o644);
        add(&mut builder, "file", EntryType::Regular, "mine", 0o644);
        unpack(builder.into_inner().unwrap().as_slice(), &root, OWNER).unwrap();
        assert_eq!(
            fs::read(root.join("real/new")).unwrap(),
            b"n",
            "a folder joins through a link"
        );
        assert!(root.join("real/kept").is_dir());
        assert_eq!(
            fs::read(root.join("victim")).unwrap(),
            b"untouched",
            "a link is replaced, not followed"
        );
        assert_eq!(fs::read(root.join("file")).unwrap(), b"mine");
        let after = fs::metadata(&root).unwrap();
        assert_eq!(
            (before.mode(), before.uid()),
            (after.mode(), after.uid()),
            "the destination keeps its own"
        );
        let mut builder = Builder::new(Vec::new());
        add(&mut builder, "real", EntryType::Regular, "x", 0o644);
        let failure = unpack(builder.into_inner().unwrap().as_slice(), &root, OWNER).unwrap_err();
        assert_eq!(failure.error.raw_os_error(), Some(libc::EISDIR));
        assert_eq!(failure.path, root.join("real"));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn archives_that_are_none_end_in_an_error() {
        let root = place("none");
        let mut builder = Builder::new(Vec::new());
        add(&mut builder, "fine", EntryType::Regular, "x", 0o644);
        let good = builder.into_inner().unwrap();
        let mut noise = crate::fuzz::Noise::new(9);
        for _ in 0..2_000 {
            let mut bytes = good.clone();
            for _ in 0..noise.below(6) {
                let at = noise.below(bytes.len());
                bytes[at] = noise.below(256) as u8;
            }
            let _refused = unpack(bytes.as_slice(), &root.join("x"), OWNER);
        }
        assert_eq!(
            fs::read_dir(&root).unwrap().count(),
            1,
            "nothing is outside of the folder"
        );
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.as_old_mut().name[..6].copy_from_slice(b"../out");
        header.set_size(0);
        header.set_cksum();
        let mut builder = Builder::new(Vec::new());
        builder.append(&header, io::empty()).unwrap();
        assert!(unpack(
            builder.into_inner().unwrap().as_slice(),
            &root.join("x"),
            OWNER
        )
        .is_err());
        assert!(!root.join("out").exists());
        fs::remove_dir_all(root).unwrap();
    }
}
