//! What a file is beside its content, on the disk and in an archive: kind, owner, mode, times, attributes, device numbers, holes.
//!
//! Access control lists and file capabilities are extended attributes.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{major, minor, seek, utimensat, AtFlags, SeekFrom, Timestamps, XattrFlags, CWD};
use rustix::io::Errno;
use rustix::time::Timespec;
use tarstream::{Member, MemberKind, Part};

use super::{give, Owner};

/// Most bytes of the names of a file's attributes, and of one value: the kernel's own bounds.
const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;
const BLOCK_BYTES: u64 = 512;

/// What an archive calls it; None for sockets, which belong to a running program.
pub fn kind_of(facts: &Metadata) -> Option<MemberKind> {
    let kind = facts.file_type();
    let kinds = [
        (kind.is_file(), MemberKind::File),
        (kind.is_dir(), MemberKind::Directory),
        (kind.is_symlink(), MemberKind::Symlink),
        (kind.is_fifo(), MemberKind::Fifo),
        (kind.is_char_device(), MemberKind::Character),
        (kind.is_block_device(), MemberKind::Block),
    ];
    kinds.iter().find(|(is_it, _)| *is_it).map(|found| found.1)
}

/// The member of an archive that stands for what is at `place`.
pub fn member(kind: MemberKind, name: &Path, place: &Path, facts: &Metadata) -> io::Result<Member> {
    let is_device = matches!(kind, MemberKind::Character | MemberKind::Block);
    Ok(Member {
        path: name.as_os_str().as_bytes().to_vec(),
        kind,
        link: match kind {
            MemberKind::Symlink => fs::read_link(place)?.into_os_string().as_bytes().to_vec(),
            _ => Vec::new(),
        },
        mode: facts.mode() & 0o7777,
        uid: facts.uid().into(),
        gid: facts.gid().into(),
        mtime_s: facts.mtime(),
        mtime_ns: u32::try_from(facts.mtime_nsec()).unwrap_or(0),
        device: match is_device {
            true => (major(facts.rdev()), minor(facts.rdev())),
            false => (0, 0),
        },
        xattrs: attributes(place)?,
        size_bytes: match kind {
            MemberKind::File => facts.size(),
            _ => 0,
        },
    })
}

/// The parts of a file that have data.
pub fn parts(file: &File, facts: &Metadata) -> io::Result<Vec<Part>> {
    let size = facts.size();
    if facts.blocks() * BLOCK_BYTES >= size {
        let whole = Part {
            offset: 0,
            length: size,
        };
        return Ok(if size == 0 { Vec::new() } else { vec![whole] });
    }
    let (mut parts, mut at) = (Vec::new(), 0);
    while at < size {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) if start < size => start,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = seek(file, SeekFrom::Hole(start))?.min(size);
        parts.push(Part {
            offset: start,
            length: end - start,
        });
        at = end;
    }
    Ok(parts)
}

fn attributes(place: &Path) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut names = vec![0; ATTRIBUTE_BYTES_MAX];
    let length = match rustix::fs::llistxattr(place, &mut names[..]) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let (mut found, mut value) = (Vec::new(), Vec::new());
    for name in names[..length].split(|byte| *byte == 0) {
        if name.is_empty() {
            continue;
        }
        value.resize(ATTRIBUTE_BYTES_MAX, 0);
        let length = rustix::fs::lgetxattr(place, OsStr::from_bytes(name), &mut value[..])?;
        found.push((name.to_vec(), value[..length].to_vec()));
    }
    Ok(found)
}

/// Whose a member is.
pub fn owner(member: &Member) -> io::Result<Owner> {
    let id = |number: u64| u32::try_from(number).map_err(io::Error::other);
    Ok(Owner {
        uid: id(member.uid)?,
        gid: id(member.gid)?,
    })
}

/// Gives what is at `place` the facts of its member. In this order: a new owner takes capabilities and setuid away, a list changes the mode.
pub fn set(place: &Path, member: &Member) -> io::Result<()> {
    give(place, owner(member)?)?;
    for (name, value) in &member.xattrs {
        let name = OsStr::from_bytes(name);
        match rustix::fs::lsetxattr(place, name, value, XattrFlags::empty()) {
            Ok(()) | Err(Errno::OPNOTSUPP) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if member.kind != MemberKind::Symlink {
        fs::set_permissions(place, fs::Permissions::from_mode(member.mode & 0o7777))?;
    }
    let time = Timespec {
        tv_sec: member.mtime_s,
        tv_nsec: member.mtime_ns.into(),
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    Ok(utimensat(CWD, place, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}
