//! Procedures that change something. Each acts as the caller: what it may not do, the kernel refuses.

use std::ffi::{CStr, CString};
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps, CWD};
use rustix::io::Errno;

use super::attributes::{self, Wanted};
use super::read::searchable;
use super::status::Status;
use super::{name, Context, Outcome, TRANSFER_MAX_BYTES};
use crate::export::{check_name, stat_in, Export, Node};
use crate::xdr::{Malformed, Reader, Writer};

const LINK_TARGET_MAX_BYTES: usize = 4095;
const VERIFIER_BYTES: usize = 8;
const UNSTABLE: u32 = 0;
const FILE_SYNC: u32 = 2;

/// SETATTR.
pub fn set_attributes(
    context: &Context<'_>,
    reader: &mut Reader<'_>,
    writer: &mut Writer,
) -> Outcome {
    let sealed = Context::handle(reader)?;
    let wanted = Wanted::read(reader)?;
    let guard = if reader.bool()? {
        Some((reader.u32()?, reader.u32()?))
    } else {
        None
    };
    let opened = context.open(sealed);
    let outcome = opened
        .as_ref()
        .map_err(|status| *status)
        .and_then(|(export, node)| {
            let changed = (node.stat.st_ctime as u32, node.stat.st_ctime_nsec as u32);
            if guard.is_some_and(|guard| guard != changed) {
                return Err(Status::NotSynchronised);
            }
            if wanted
                .size
                .is_some_and(|size| size > node.stat.st_size as u64)
            {
                export.require_room()?;
            }
            let _acting = context.act()?;
            wanted.apply(node, context.caller.uid)
        });
    finish(writer, outcome, opened.as_ref().ok().map(|(_, node)| node));
    Ok(())
}

/// WRITE.
pub fn write(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let sealed = Context::handle(reader)?;
    let (offset, _count, stable) = (reader.u64()?, reader.u32()?, reader.u32()?);
    let data = reader.opaque(TRANSFER_MAX_BYTES)?;
    let opened = context.open(sealed);
    let outcome = opened
        .as_ref()
        .map_err(|status| *status)
        .and_then(|(export, node)| {
            if node.kind() == FileType::Directory {
                return Err(Status::IsFolder);
            }
            export.require_room()?;
            let acting = context.act()?;
            let file = attributes::open_to_write(node, context.caller.uid)?;
            drop(acting);
            let mut written = 0;
            while written < data.len() {
                let at = offset.checked_add(written as u64).ok_or(Status::TooLarge)?;
                match rustix::io::pwrite(&file, &data[written..], at) {
                    Ok(count) => written += count,
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if stable != UNSTABLE {
                rustix::fs::fsync(&file)?;
            }
            Ok(())
        });
    finish(writer, outcome, opened.as_ref().ok().map(|(_, node)| node));
    if outcome.is_ok() {
        writer.u32(data.len() as u32);
        writer.u32(if stable == UNSTABLE {
            UNSTABLE
        } else {
            FILE_SYNC
        });
        writer.u64(context.server.boot);
    }
    Ok(())
}

/// CREATE.
pub fn create(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let (sealed, name) = (Context::handle(reader)?, name(reader)?);
    let how = match reader.u32()? {
        0 => How::Unchecked(Wanted::read(reader)?),
        1 => How::Guarded(Wanted::read(reader)?),
        2 => How::Exclusive(
            reader
                .fixed(VERIFIER_BYTES)?
                .try_into()
                .map_err(|_| Malformed)?,
        ),
        _ => return Err(Malformed),
    };
    make(context, sealed, name, writer, |folder, name| {
        create_in(folder, name, &how)
    });
    Ok(())
}

enum How {
    Unchecked(Wanted),
    Guarded(Wanted),
    /// Made by this very call, even if it is repeated, when the mark is in the file's times.
    Exclusive([u8; VERIFIER_BYTES]),
}

fn create_in(folder: &Node, name: &CStr, how: &How) -> Result<Option<Wanted>, Status> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = match how {
        How::Unchecked(wanted) | How::Guarded(wanted) => wanted.mode_or(0o644),
        How::Exclusive(_) => Mode::from_raw_mode(0o600),
    };
    match (rustix::fs::openat(&folder.fd, name, flags, mode), how) {
        (Ok(_), How::Unchecked(wanted) | How::Guarded(wanted)) => Ok(Some(wanted.for_new())),
        (Ok(file), How::Exclusive(mark)) => {
            rustix::fs::futimens(&file, &mark_times(mark))?;
            Ok(None)
        }
        (Err(Errno::EXIST), How::Unchecked(wanted)) => {
            // The client opens what is there; only the length it asks for is its to set.
            let size_only = Wanted::only_size(wanted.size);
            Ok(Some(size_only))
        }
        (Err(Errno::EXIST), How::Exclusive(mark)) => {
            let stat = stat_in(folder, name)?;
            let times = mark_times(mark);
            let ours = stat.st_atime == times.last_access.tv_sec
                && stat.st_mtime == times.last_modification.tv_sec;
            if ours {
                Ok(None)
            } else {
                Err(Status::Exists)
            }
        }
        (Err(error), _) => Err(error.into()),
    }
}

/// The mark as two times, each within what every file system can keep.
fn mark_times(mark: &[u8; VERIFIER_BYTES]) -> Timestamps {
    let (left, right) = mark.split_at(4);
    let time = |bytes: &[u8]| {
        let seconds = bytes
            .iter()
            .fold(0_i64, |sum, byte| (sum << 8) | i64::from(*byte));
        Timespec {
            tv_sec: seconds & 0x7fff_ffff,
            tv_nsec: 0,
        }
    };
    Timestamps {
        last_access: time(left),
        last_modification: time(right),
    }
}

/// MKDIR.
pub fn make_folder(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let (sealed, name) = (Context::handle(reader)?, name(reader)?);
    let wanted = Wanted::read(reader)?;
    make(context, sealed, name, writer, |folder, name| {
        rustix::fs::mkdirat(&folder.fd, name, wanted.mode_or(0o755))?;
        Ok(Some(wanted))
    });
    Ok(())
}

/// SYMLINK. The target is a text to this server: whoever follows it does so on its own side.
pub fn make_link(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let (sealed, name) = (Context::handle(reader)?, name(reader)?);
    let wanted = Wanted::read(reader)?;
    let target = reader.opaque(LINK_TARGET_MAX_BYTES + 1)?;
    make(context, sealed, name, writer, |folder, name| {
        if target.len() > LINK_TARGET_MAX_BYTES {
            return Err(Status::NameTooLong);
        }
        let target = CString::new(target).map_err(|_| Status::Invalid)?;
        rustix::fs::symlinkat(&target, &folder.fd, name)?;
        Ok(Some(wanted))
    });
    Ok(())
}

/// MKNOD: pipes and sockets. Device nodes would be the host's devices and are not made.
pub fn make_special(
    context: &Context<'_>,
    reader: &mut Reader<'_>,
    writer: &mut Writer,
) -> Outcome {
    let (sealed, name) = (Context::handle(reader)?, name(reader)?);
    let kind = match reader.u32()? {
        6 => FileType::Socket,
        7 => FileType::Fifo,
        3 | 4 => {
            let _wanted = Wanted::read(reader)?;
            FileType::CharacterDevice
        }
        _ => FileType::Unknown,
    };
    let wanted = match kind {
        FileType::Socket | FileType::Fifo => Some(Wanted::read(reader)?),
        _ => None,
    };
    make(context, sealed, name, writer, |folder, name| match wanted {
        Some(wanted) => {
            rustix::fs::mknodat(&folder.fd, name, kind, wanted.mode_or(0o644), 0)?;
            Ok(Some(wanted))
        }
        None if kind == FileType::CharacterDevice => Err(Status::Permission),
        None => Err(Status::BadType),
    });
    Ok(())
}

/// The common course of all that makes something: `work` makes it and says what it should have besides.
fn make(
    context: &Context<'_>,
    sealed: &[u8],
    name: Result<CString, Status>,
    writer: &mut Writer,
    work: impl FnOnce(&Node, &CStr) -> Result<Option<Wanted>, Status>,
) {
    let opened = context.open(sealed);
    let made = opened
        .as_ref()
        .map_err(|status| *status)
        .and_then(|(export, folder)| {
            let name = name?;
            check_name(&name)?;
            export.require_room()?;
            let acting = context.act()?;
            searchable(folder)?;
            let wanted = work(folder, &name)?;
            drop(acting);
            let mut node = export.lookup(folder, &name)?;
            if let Some(wanted) = wanted {
                let _acting = context.act()?;
                wanted.apply(&node, context.caller.uid)?;
            }
            node.stat = node.fresh()?;
            Ok((export.seal(node.fd.as_fd())?, node))
        });
    let folder = opened.as_ref().ok().map(|(_, folder)| folder);
    match made {
        Ok((handle, node)) => {
            writer.u32(0);
            writer.bool(true);
            writer.opaque(&handle);
            attributes::write_after(writer, Some(&node.stat));
            change_of(writer, folder);
        }
        Err(status) => finish(writer, Err(status), folder),
    }
}

/// REMOVE, or RMDIR with `folder`.
pub fn remove(
    context: &Context<'_>,
    reader: &mut Reader<'_>,
    writer: &mut Writer,
    folder: bool,
) -> Outcome {
    let (sealed, name) = (Context::handle(reader)?, name(reader)?);
    let opened = context.open(sealed);
    let outcome = opened
        .as_ref()
        .map_err(|status| *status)
        .and_then(|(_, parent)| {
            let name = name?;
            check_name(&name)?;
            let flags = if folder {
                AtFlags::REMOVEDIR
            } else {
                AtFlags::empty()
            };
            let _acting = context.act()?;
            Ok(rustix::fs::unlinkat(&parent.fd, &name, flags)?)
        });
    finish(writer, outcome, opened.as_ref().ok().map(|(_, node)| node));
    Ok(())
}

/// RENAME.
pub fn rename(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let (from, old) = (Context::handle(reader)?, name(reader)?);
    let (to, new) = (Context::handle(reader)?, name(reader)?);
    let (from, to) = (context.open(from), context.open(to));
    let outcome = both(&from, &to).and_then(|(from, to)| {
        let (old, new) = (old?, new?);
        check_name(&old)?;
        check_name(&new)?;
        let _acting = context.act()?;
        Ok(rustix::fs::renameat(&from.fd, &old, &to.fd, &new)?)
    });
    finish(writer, outcome, from.as_ref().ok().map(|(_, node)| node));
    change_of(writer, to.as_ref().ok().map(|(_, node)| node));
    Ok(())
}

/// LINK.
pub fn link(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let file = Context::handle(reader)?;
    let (to, new) = (Context::handle(reader)?, name(reader)?);
    let (file, to) = (context.open(file), context.open(to));
    let outcome = both(&file, &to).and_then(|(file, to)| {
        let new = new?;
        check_name(&new)?;
        let _acting = context.act()?;
        Ok(rustix::fs::linkat(
            CWD,
            file.proc_path(),
            &to.fd,
            &new,
            AtFlags::SYMLINK_FOLLOW,
        )?)
    });
    writer.u32(outcome.map_or_else(|status| status as u32, |()| 0));
    let after = file.as_ref().ok().and_then(|(_, node)| node.fresh().ok());
    attributes::write_after(writer, after.as_ref());
    change_of(writer, to.as_ref().ok().map(|(_, node)| node));
    Ok(())
}

/// COMMIT. The whole file is put on disk, whatever part was asked for.
pub fn commit(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let sealed = Context::handle(reader)?;
    let (_offset, _count) = (reader.u64()?, reader.u32()?);
    let opened = context.open(sealed);
    let outcome = opened
        .as_ref()
        .map_err(|status| *status)
        .and_then(|(_, node)| Ok(rustix::fs::fsync(node.reopen(OFlags::RDONLY)?)?));
    finish(writer, outcome, opened.as_ref().ok().map(|(_, node)| node));
    if outcome.is_ok() {
        writer.u64(context.server.boot);
    }
    Ok(())
}

type Opened<'a> = Result<(&'a Export, Node), Status>;

/// Both nodes, when they are of one volume.
fn both<'b>(left: &'b Opened<'_>, right: &'b Opened<'_>) -> Result<(&'b Node, &'b Node), Status> {
    let (left_export, left) = left.as_ref().map_err(|status| *status)?;
    let (right_export, right) = right.as_ref().map_err(|status| *status)?;
    if left_export.tag != right_export.tag {
        return Err(Status::CrossDevice);
    }
    Ok((left, right))
}

/// Status, and the change of `node`, which every result here ends with or goes on after.
fn finish(writer: &mut Writer, outcome: Result<(), Status>, node: Option<&Node>) {
    writer.u32(outcome.map_or_else(|status| status as u32, |()| 0));
    change_of(writer, node);
}

fn change_of(writer: &mut Writer, node: Option<&Node>) {
    let after: Option<Stat> = node.and_then(|node| node.fresh().ok());
    attributes::write_change(writer, node.map(|node| &node.stat), after.as_ref());
}
