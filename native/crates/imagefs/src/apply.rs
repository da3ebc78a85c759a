//! Applies one layer of an image to the tree: what a container runtime would show after it.

use std::io::{self, Read};

use thiserror::Error;

use crate::ext4::{Content, Ext4Error, Kind, Meta, Tree};
use crate::source::Excess;
use tarstream::{Archive, Member, MemberKind, TarError};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Bookkeeping of an old storage driver; runtimes leave it out.
const BOOKKEEPING: &[u8] = b".wh..wh.";
/// Attributes that mean something to the overlay file system of the machine that made the layer, to nobody else.
const OVERLAY: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];
const BUFFER_BYTES: usize = 256 << 10;

/// Why a layer cannot be applied.
#[derive(Debug, Error)]
pub enum ApplyError {
    /// The archive.
    #[error(transparent)]
    Tar(#[from] TarError),
    /// The file system.
    #[error(transparent)]
    Ext4(#[from] Ext4Error),
    /// A limit.
    #[error(transparent)]
    Excess(#[from] Excess),
    /// A value that a Linux file system cannot have.
    #[error("{path}: {problem}")]
    Entry {
        /// Where.
        path: String,
        /// What is wrong.
        problem: String,
    },
}

/// How many members the archive had.
pub fn apply<R: Read>(
    tree: &mut Tree,
    archive: &mut Archive<R>,
    entries_max: u64,
) -> Result<u64, ApplyError> {
    let mut entries = 0;
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Some(member) = archive.next_member()? {
        entries += 1;
        if entries > entries_max {
            return Err(Excess::Entries(entries_max).into());
        }
        apply_member(tree, archive, &member, &mut buffer)?;
    }
    archive.drain()?;
    Ok(entries)
}

fn apply_member<R: Read>(
    tree: &mut Tree,
    archive: &mut Archive<R>,
    member: &Member,
    buffer: &mut [u8],
) -> Result<(), ApplyError> {
    let path = member.path.as_slice();
    if path.contains(&0) {
        return Err(entry_error(member, "its name holds a zero byte"));
    }
    let (folder, name) = split(path);
    if let Some(hidden) = name.strip_prefix(WHITEOUT) {
        // By its name alone: tools have written whiteouts as links and devices, too.
        return match name {
            OPAQUE => Ok(tree.hide_children(folder)?),
            _ if name.starts_with(BOOKKEEPING) => Ok(()),
            _ if matches!(hidden, b"" | b"." | b"..") => {
                Err(entry_error(member, "a whiteout of nothing"))
            }
            _ => Ok(tree.hide(&[folder, hidden].join(&b'/'))?),
        };
    }
    let meta = meta_of(member)?;
    let (major, minor) = member.device;
    match member.kind {
        MemberKind::Directory => tree.put_directory(path, &meta)?,
        MemberKind::File => {
            let mut content = Content::new();
            while let Some((offset, count)) = archive.read_content(buffer)? {
                content.write(tree.volume(), offset, &buffer[..count])?;
            }
            tree.put_file(path, &meta, member.size_bytes, content)?;
        }
        MemberKind::HardLink => tree.put_hard_link(path, &member.link)?,
        MemberKind::Symlink => {
            tree.put_special(path, &Kind::Symlink(member.link.clone()), &meta)?
        }
        MemberKind::Character => tree.put_special(path, &Kind::Character(major, minor), &meta)?,
        MemberKind::Block => tree.put_special(path, &Kind::Block(major, minor), &meta)?,
        MemberKind::Fifo => tree.put_special(path, &Kind::Fifo, &meta)?,
    }
    Ok(())
}

/// Folder and last name. A slash at the end is no name.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let mut end = path.len();
    while end > 0 && path[end - 1] == b'/' {
        end -= 1;
    }
    let path = &path[..end];
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

fn meta_of(member: &Member) -> Result<Meta, ApplyError> {
    let id = |value: u64, what: &str| {
        // The highest number means "nobody in particular" to the kernel and belongs to no file.
        let id = u32::try_from(value).ok().filter(|id| *id != u32::MAX);
        id.ok_or_else(|| entry_error(member, &format!("{value} is no {what}")))
    };
    let is_link = member.kind == MemberKind::Symlink;
    let is_foreign = |name: &[u8]| OVERLAY.iter().any(|prefix| name.starts_with(prefix));
    Ok(Meta {
        mode: if is_link {
            0o777
        } else {
            (member.mode & 0o7777) as u16
        },
        uid: id(member.uid, "user id")?,
        gid: id(member.gid, "group id")?,
        mtime_s: member.mtime_s,
        mtime_ns: member.mtime_ns,
        xattrs: member
            .xattrs
            .iter()
            .filter(|(name, _)| !is_foreign(name))
            .cloned()
            .collect(),
    })
}

fn entry_error(member: &Member, problem: &str) -> ApplyError {
    ApplyError::Entry {
        path: String::from_utf8_lossy(&member.path).into_owned(),
        problem: problem.to_owned(),
    }
}

/// The limit behind a failed read, if that is why it failed.
pub fn excess_of(error: &io::Error) -> Option<Excess> {
    error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<Excess>())
        .copied()
}
