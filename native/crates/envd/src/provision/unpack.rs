//! Unpacking of a build's files: an archive that the host has made, onto whatever the image has there.
//!
//! As BuildKit does it for COPY: a folder of the archive joins the one that is there, through a link as well; anything
//! else takes the place of what is there, but never that of a folder. The destination itself keeps its owner and
//! mode if it was there.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{symlink, FileExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use bytes::{Buf, Bytes};
use rustix::fs::{makedev, mknodat, FileType, Mode, CWD};
use tarstream::{Archive, Member, MemberKind};
use tokio::sync::mpsc;

use super::{facts, give, make_folders, Owner};

const BUFFER_BYTES: usize = 256 << 10;

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
/// `is_apart` makes it as if unpacked alone and laid over the disk: links on the way give way to folders, folders to files.
pub fn unpack(
    archive: impl Read,
    folder: &Path,
    owner: Owner,
    is_apart: bool,
) -> Result<(), Failure> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| Failure { path, error }
    };
    if is_apart {
        make_way(folder).map_err(at(folder))?;
    }
    let is_new = make_folders(folder, owner).map_err(at(folder))?;
    let mut archive = Archive::new(archive);
    let mut folders: Vec<(PathBuf, Member)> = Vec::new();
    while let Some(member) = archive
        .next_member()
        .map_err(|error| at(folder)(io::Error::other(error)))?
    {
        let name = below(&member.path).map_err(at(folder))?;
        let place = folder.join(&name);
        if is_apart {
            make_way(place.parent().unwrap_or(folder)).map_err(at(&place))?;
            clear(&place, member.kind).map_err(at(&place))?;
        }
        if member.kind != MemberKind::Directory {
            put(&mut archive, &member, folder, &place).map_err(at(&place))?;
        } else if join(&member, &place, is_new || place != folder).map_err(at(&place))? {
            folders.push((place, member));
        }
    }
    // Last, and the deepest first: what is put into a folder changes its time, and its mode may forbid it.
    for (place, member) in folders.into_iter().rev() {
        facts::set(&place, &member).map_err(at(&place))?;
    }
    Ok(())
}

/// Removes the first thing on a path that is no folder itself.
fn make_way(folder: &Path) -> io::Result<()> {
    let mut places: Vec<&Path> = folder.ancestors().collect();
    places.reverse();
    for place in places {
        match fs::symlink_metadata(place) {
            Ok(info) if info.is_dir() => {}
            Ok(_) => return fs::remove_file(place),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Removes what is at `place` unless both it and what comes are folders.
fn clear(place: &Path, kind: MemberKind) -> io::Result<()> {
    match fs::symlink_metadata(place) {
        Ok(info) if info.is_dir() && kind == MemberKind::Directory => Ok(()),
        Ok(info) if info.is_dir() => fs::remove_dir_all(place),
        Ok(_) => fs::remove_file(place),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn below(path: &[u8]) -> io::Result<PathBuf> {
    let path = Path::new(OsStr::from_bytes(path));
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

/// Makes a folder or joins the one that is there. Returns whether it gets the member's facts in the end.
fn join(member: &Member, place: &Path, sets_facts: bool) -> io::Result<bool> {
    if !place.is_dir() {
        remove_other(place)?;
        fs::create_dir(place)?;
    } else if !sets_facts || fs::symlink_metadata(place)?.is_symlink() {
        return Ok(false);
    }
    give(place, facts::owner(member)?)?;
    Ok(true)
}

fn put<R: Read>(
    archive: &mut Archive<R>,
    member: &Member,
    folder: &Path,
    place: &Path,
) -> io::Result<()> {
    if let Some(above) = place.parent().filter(|above| !above.is_dir()) {
        make_folders(above, facts::owner(member)?)?;
    }
    remove_other(place)?;
    let node = |kind| {
        let (major, minor) = member.device;
        mknodat(
            CWD,
            place,
            kind,
            Mode::from_raw_mode(0o600),
            makedev(major, minor),
        )
    };
    match member.kind {
        MemberKind::File => write(archive, member, place)?,
        MemberKind::Symlink => symlink(OsStr::from_bytes(&member.link), place)?,
        MemberKind::Character => node(FileType::CharacterDevice)?,
        MemberKind::Block => node(FileType::BlockDevice)?,
        MemberKind::Fifo => node(FileType::Fifo)?,
        MemberKind::HardLink => return fs::hard_link(folder.join(below(&member.link)?), place),
        MemberKind::Directory => fs::create_dir(place)?,
    }
    facts::set(place, member)
}

/// Writes the content; what the archive does not have of it stays a hole.
fn write<R: Read>(archive: &mut Archive<R>, member: &Member, place: &Path) -> io::Result<()> {
    let mut options = File::options();
    let file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(place)?;
    file.set_len(member.size_bytes)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Some((offset, count)) = archive
        .read_content(&mut buffer)
        .map_err(io::Error::other)?
    {
        file.write_all_at(&buffer[..count], offset)?;
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::os::unix::fs::MetadataExt;
    use tarstream::{Part, Writer};

    fn place(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("envd-unpack-{}-{name}", std::process::id()));
        let _absent = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    struct Building(Vec<u8>);

    impl Building {
        fn new() -> Self {
            Self(Vec::new())
        }

        fn add(&mut self, name: &str, kind: MemberKind, content: &str, mode: u32) {
            let is_file = kind == MemberKind::File;
            let member = Member {
                path: name.as_bytes().to_vec(),
                kind,
                link: content.as_bytes().to_vec(),
                mode,
                uid: 12,
                gid: 34,
                mtime_s: 1_700_000_000,
                mtime_ns: 0,
                device: (0, 0),
                xattrs: Vec::new(),
                size_bytes: if is_file { content.len() as u64 } else { 0 },
            };
            let file = File::from(rustix::fs::memfd_create("member", MemfdFlags::empty()).unwrap());
            file.write_all_at(content.as_bytes(), 0).unwrap();
            let whole = Part {
                offset: 0,
                length: content.len() as u64,
            };
            let mut writer = Writer::new(&mut self.0);
            match is_file {
                true => writer.append_file(
                    &Member {
                        link: Vec::new(),
                        ..member
                    },
                    &[whole],
                    &file,
                ),
                false => writer.append(&member),
            }
            .unwrap();
        }

        fn finish(mut self) -> Vec<u8> {
            Writer::new(&mut self.0).finish().unwrap();
            self.0
        }
    }

    const OWNER: Owner = Owner { uid: 5, gid: 6 };

    #[test]
    fn files_folders_and_links_have_the_archives_facts() {
        let root = place("facts");
        let mut builder = Building::new();
        builder.add("./", MemberKind::Directory, "", 0o750);
        builder.add("sub", MemberKind::Directory, "", 0o500);
        builder.add("sub/run", MemberKind::File, "#!x", 0o4755);
        builder.add("link", MemberKind::Symlink, "sub/run", 0o777);
        builder.add("same", MemberKind::HardLink, "sub/run", 0o755);
        let long = "n".repeat(180);
        builder.add(&long, MemberKind::File, "", 0o644);
        let bytes = builder.finish();
        let folder = root.join("a/b");
        unpack(bytes.as_slice(), &folder, OWNER, false).unwrap();
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
        let mut builder = Building::new();
        builder.add(".", MemberKind::Directory, "", 0o700);
        builder.add("linked", MemberKind::Directory, "", 0o700);
        builder.add("linked/new", MemberKind::File, "n", 0o644);
        builder.add("file", MemberKind::File, "mine", 0o644);
        unpack(builder.finish().as_slice(), &root, OWNER, false).unwrap();
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
        let mut builder = Building::new();
        builder.add("real", MemberKind::File, "x", 0o644);
        let failure = unpack(builder.finish().as_slice(), &root, OWNER, false).unwrap_err();
        assert_eq!(failure.error.raw_os_error(), Some(libc::EISDIR));
        assert_eq!(failure.path, root.join("real"));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_laid_over_the_disk_does_not_follow_links_of_it() {
        let root = place("apart");
        fs::create_dir_all(root.join("real/folder")).unwrap();
        fs::write(root.join("real/folder/kept"), "k").unwrap();
        symlink("real", root.join("linked")).unwrap();
        let mut builder = Building::new();
        builder.add("sub", MemberKind::Directory, "", 0o700);
        builder.add("sub/new", MemberKind::File, "n", 0o644);
        unpack(
            builder.finish().as_slice(),
            &root.join("linked"),
            OWNER,
            true,
        )
        .unwrap();
        assert!(!fs::symlink_metadata(root.join("linked"))
            .unwrap()
            .is_symlink());
        assert_eq!(fs::read(root.join("linked/sub/new")).unwrap(), b"n");
        assert!(!root.join("real/sub").exists());
        let mut builder = Building::new();
        builder.add("real", MemberKind::Directory, "", 0o700);
        builder.add("real/folder", MemberKind::File, "a file", 0o644);
        unpack(builder.finish().as_slice(), &root, OWNER, true).unwrap();
        assert_eq!(fs::read(root.join("real/folder")).unwrap(), b"a file");
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn archives_that_are_none_end_in_an_error() {
        let root = place("none");
        let mut builder = Building::new();
        builder.add("fine", MemberKind::File, "x", 0o644);
        let good = builder.finish();
        let mut noise = crate::fuzz::Noise::new(9);
        for _ in 0..2_000 {
            let mut bytes = good.clone();
            for _ in 0..noise.below(6) {
                let at = noise.below(bytes.len());
                bytes[at] = noise.below(256) as u8;
            }
            let _refused = unpack(bytes.as_slice(), &root.join("x"), OWNER, false);
        }
        assert_eq!(
            fs::read_dir(&root).unwrap().count(),
            1,
            "nothing is outside of the folder"
        );
        let mut builder = Building::new();
        builder.add("../out", MemberKind::File, "", 0o644);
        assert!(unpack(builder.finish().as_slice(), &root.join("x"), OWNER, false).is_err());
        assert!(!root.join("out").exists());
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_packed_is_unpacked_as_it_was() {
        let root = place("both");
        let from = root.join("from");
        fs::create_dir_all(from.join("sub")).unwrap();
        fs::create_dir_all(from.join("d'ir")).unwrap();
        let attribute = |path: &Path, name: &str, value: &[u8]| {
            rustix::fs::lsetxattr(path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
        };
        fs::write(from.join("sub/program"), "#!x").unwrap();
        let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        give(&from.join("sub/program"), Owner { uid: 7, gid: 8 }).unwrap();
        attribute(&from.join("sub/program"), "security.capability", capability);
        attribute(&from.join("sub/program"), "user.lines", b"one\ntwo=2\0\xff");
        attribute(&from.join("sub"), "user.empty", b"");
        let list: Vec<u8> = [
            (1u16, 6u16, u32::MAX),
            (2, 4, 1234),
            (4, 4, u32::MAX),
            (16, 6, u32::MAX),
            (32, 0, u32::MAX),
        ]
        .iter()
        .flat_map(|(tag, permissions, id)| {
            let mut entry = tag.to_le_bytes().to_vec();
            entry.extend(permissions.to_le_bytes());
            entry.extend(id.to_le_bytes());
            entry
        })
        .collect();
        let list = [2u32.to_le_bytes().to_vec(), list].concat();
        fs::write(from.join("listed"), "acl").unwrap();
        attribute(&from.join("listed"), "system.posix_acl_access", &list);
        fs::hard_link(from.join("sub/program"), from.join("a-first")).unwrap();
        fs::hard_link(from.join("sub/program"), from.join("d'ir/other")).unwrap();
        symlink("nowhere", from.join("link")).unwrap();
        fs::hard_link(from.join("link"), from.join("link-too")).unwrap();
        let sparse = File::create(from.join("sparse")).unwrap();
        sparse.set_len(300 << 20).unwrap();
        sparse.write_all_at(b"in the middle", 100 << 20).unwrap();
        sparse.write_all_at(b"end", (300 << 20) - 3).unwrap();
        drop(sparse);
        fs::write(from.join("empty"), "").unwrap();
        for (name, kind, device) in [
            ("fifo", FileType::Fifo, 0),
            ("null", FileType::CharacterDevice, makedev(1, 3)),
            ("disk", FileType::BlockDevice, makedev(259, 70_000)),
        ] {
            mknodat(
                CWD,
                from.join(name),
                kind,
                Mode::from_raw_mode(0o620),
                device,
            )
            .unwrap();
        }
        for (number, name) in ["empty", "link", "fifo", "sub"].iter().enumerate() {
            let time = rustix::time::Timespec {
                tv_sec: -5 + 2 * number as i64,
                tv_nsec: 123_456_789,
            };
            let times = rustix::fs::Timestamps {
                last_access: time,
                last_modification: time,
            };
            let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
            rustix::fs::utimensat(CWD, from.join(name), &times, flags).unwrap();
        }
        let _socket = std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();

        let mut bytes = Vec::new();
        super::super::pack::pack(
            &from,
            &[".".to_owned(), "sub".to_owned()],
            false,
            &mut bytes,
        )
        .unwrap();
        assert!(
            bytes.len() < 64 << 10,
            "holes travel as holes: {}",
            bytes.len()
        );
        unpack(bytes.as_slice(), &root.join("to"), OWNER, false).unwrap();

        let told = |top: &Path| {
            let mut told = std::collections::BTreeMap::new();
            let mut inodes = std::collections::HashMap::new();
            let mut folders = vec![top.to_owned()];
            while let Some(folder) = folders.pop() {
                for entry in fs::read_dir(&folder).unwrap() {
                    let path = entry.unwrap().path();
                    let info = fs::symlink_metadata(&path).unwrap();
                    let Some(kind) = facts::kind_of(&info) else {
                        continue;
                    };
                    let name = path.strip_prefix(top).unwrap().to_owned();
                    let first = inodes.entry(info.ino()).or_insert(info.nlink());
                    let mut member = facts::member(kind, &name, &path, &info).unwrap();
                    member.xattrs.sort();
                    if info.is_dir() {
                        folders.push(path.clone());
                    }
                    let content = match info.is_file() && info.size() < 1 << 20 {
                        true => fs::read(&path).unwrap(),
                        false => Vec::new(),
                    };
                    told.insert(name, format!("{member:?} {first} {content:?}"));
                }
            }
            told
        };
        let (before, after) = (told(&from), told(&root.join("to")));
        assert_eq!(before.len(), 13);
        for (name, facts) in &before {
            assert_eq!(Some(facts), after.get(name), "{name:?}");
        }
        assert_eq!(before.len(), after.len(), "the socket stays behind");
        let copy = File::open(root.join("to/sparse")).unwrap();
        let info = copy.metadata().unwrap();
        assert!(info.blocks() * 512 < 1 << 20, "it is sparse again");
        let mut word = [0; 13];
        copy.read_exact_at(&mut word, 100 << 20).unwrap();
        assert_eq!(&word, b"in the middle");
        fs::remove_dir_all(root).unwrap();
    }
}
