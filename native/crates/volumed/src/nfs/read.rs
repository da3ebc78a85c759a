//! Procedures that change nothing.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Access, AtFlags, FileType, OFlags, CWD};
use rustix::io::Errno;

use super::attributes;
use super::status::Status;
use super::{name, Context, Outcome, TRANSFER_MAX_BYTES};
use crate::export::{Node, NAME_MAX_BYTES};
use crate::sys::ActingAs;
use crate::xdr::{Reader, Writer};

const ACCESS_READ: u32 = 0x01;
const ACCESS_LOOKUP: u32 = 0x02;
const ACCESS_MODIFY: u32 = 0x04;
const ACCESS_EXTEND: u32 = 0x08;
const ACCESS_DELETE: u32 = 0x10;
const ACCESS_EXECUTE: u32 = 0x20;
const FOLDER_PREFERRED_BYTES: u32 = 64 << 10;
/// Hard links, symbolic links, the same limits everywhere, times can be set.
const PROPERTIES: u32 = 0x01 | 0x02 | 0x08 | 0x10;
/// Of ext4, the smallest of the usual file systems.
const LINKS_MAX: u32 = 65_000;

/// GETATTR.
pub fn get_attributes(
    context: &Context<'_>,
    reader: &mut Reader<'_>,
    writer: &mut Writer,
) -> Outcome {
    match context.open(Context::handle(reader)?) {
        Ok((_, node)) => {
            writer.u32(0);
            attributes::write(writer, &node.stat);
        }
        Err(status) => writer.u32(status as u32),
    }
    Ok(())
}

/// LOOKUP.
pub fn lookup(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let sealed = Context::handle(reader)?;
    let name = name(reader)?;
    let folder = context.open(sealed);
    let found = folder
        .as_ref()
        .map_err(|status| *status)
        .and_then(|(export, folder)| {
            let name = name?;
            {
                let _acting = context.act()?;
                searchable(folder)?;
            }
            let node = export.lookup(folder, &name)?;
            Ok((export.seal(node.fd.as_fd())?, node))
        });
    match &found {
        Ok((handle, node)) => {
            writer.u32(0);
            writer.opaque(handle);
            attributes::write_after(writer, Some(&node.stat));
        }
        Err(status) => writer.u32(*status as u32),
    }
    attributes::write_after(writer, folder.as_ref().ok().map(|(_, node)| &node.stat));
    Ok(())
}

/// ACCESS.
pub fn access(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let sealed = Context::handle(reader)?;
    let asked = reader.u32()?;
    let granted = context.open(sealed).and_then(|(_, node)| {
        let acting = context.act()?;
        let granted = granted(&node);
        drop(acting);
        Ok((node, granted))
    });
    match granted {
        Ok((node, granted)) => {
            writer.u32(0);
            attributes::write_after(writer, Some(&node.stat));
            writer.u32(asked & granted);
        }
        Err(status) => failed(writer, status),
    }
    Ok(())
}

fn granted(node: &Node) -> u32 {
    let folder = match node.kind() {
        FileType::Symlink => return u32::MAX,
        kind => kind == FileType::Directory,
    };
    let path = node.proc_path();
    let may = |what| rustix::fs::accessat(CWD, &path, what, AtFlags::EACCESS).is_ok();
    let mut bits = 0;
    if may(Access::READ_OK) {
        bits |= ACCESS_READ;
    }
    if may(Access::WRITE_OK) {
        bits |= ACCESS_MODIFY | ACCESS_EXTEND;
        if folder {
            bits |= ACCESS_DELETE;
        }
    }
    if may(Access::EXEC_OK) {
        bits |= if folder {
            ACCESS_LOOKUP
        } else {
            ACCESS_EXECUTE
        };
    }
    bits
}

/// READLINK.
pub fn read_link(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let target = context
        .open(Context::handle(reader)?)
        .and_then(|(_, node)| {
            if node.kind() != FileType::Symlink {
                return Err(Status::Invalid);
            }
            let target = rustix::fs::readlinkat(&node.fd, c"", Vec::new())?;
            Ok((node, target))
        });
    match target {
        Ok((node, target)) => {
            writer.u32(0);
            attributes::write_after(writer, Some(&node.stat));
            writer.opaque(target.to_bytes());
        }
        Err(status) => failed(writer, status),
    }
    Ok(())
}

/// READ.
pub fn read(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let sealed = Context::handle(reader)?;
    let (offset, count) = (reader.u64()?, reader.u32()? as usize);
    let data = context.open(sealed).and_then(|(_, node)| {
        if node.kind() == FileType::Directory {
            return Err(Status::IsFolder);
        }
        let acting = context.act()?;
        let file = open_to_read(&node, context.caller.uid)?;
        drop(acting);
        let mut data = vec![0; count.min(TRANSFER_MAX_BYTES)];
        let mut filled = 0;
        while filled < data.len() {
            match rustix::io::pread(
                &file,
                &mut data[filled..],
                offset.saturating_add(filled as u64),
            ) {
                Ok(0) => break,
                Ok(got) => filled += got,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        data.truncate(filled);
        let stat = node.fresh()?;
        let at_end = offset.saturating_add(filled as u64) >= stat.st_size as u64;
        Ok((stat, data, at_end))
    });
    match data {
        Ok((stat, data, at_end)) => {
            writer.u32(0);
            attributes::write_after(writer, Some(&stat));
            writer.u32(data.len() as u32);
            writer.bool(at_end);
            writer.opaque(&data);
        }
        Err(status) => failed(writer, status),
    }
    Ok(())
}

/// Who owns a file may read what it opened before it took the right away, and who may execute a program
/// may read it: the client tells the two apart, the server cannot (RFC 1813 section 4.4).
fn open_to_read(node: &Node, uid: u32) -> Result<OwnedFd, Status> {
    match node.reopen(OFlags::RDONLY) {
        Err(Status::Access) if node.stat.st_uid == uid || granted(node) & ACCESS_EXECUTE != 0 => {
            let _as_root = ActingAs::new(0, 0, &[]).map_err(|_| Status::ServerFault)?;
            node.reopen(OFlags::RDONLY)
        }
        outcome => outcome,
    }
}

/// FSSTAT.
pub fn file_system(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    let facts = context
        .open(Context::handle(reader)?)
        .and_then(|(export, node)| Ok((node, rustix::fs::fstatvfs(export.root())?)));
    match facts {
        Ok((node, facts)) => {
            writer.u32(0);
            attributes::write_after(writer, Some(&node.stat));
            for blocks in [facts.f_blocks, facts.f_bfree, facts.f_bavail] {
                writer.u64(blocks.saturating_mul(facts.f_frsize));
            }
            for files in [facts.f_files, facts.f_ffree, facts.f_favail] {
                writer.u64(files);
            }
            writer.u32(0); // seconds for which this holds
        }
        Err(status) => failed(writer, status),
    }
    Ok(())
}

/// FSINFO.
pub fn limits(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    match context.open(Context::handle(reader)?) {
        Ok((_, node)) => {
            writer.u32(0);
            attributes::write_after(writer, Some(&node.stat));
            let transfer = TRANSFER_MAX_BYTES as u32;
            for number in [
                transfer,
                transfer,
                4096,
                transfer,
                transfer,
                4096,
                FOLDER_PREFERRED_BYTES,
            ] {
                writer.u32(number);
            }
            writer.u64(i64::MAX as u64);
            writer.u32(0);
            writer.u32(1); // times are kept to the nanosecond
            writer.u32(PROPERTIES);
        }
        Err(status) => failed(writer, status),
    }
    Ok(())
}

/// PATHCONF.
pub fn path_limits(context: &Context<'_>, reader: &mut Reader<'_>, writer: &mut Writer) -> Outcome {
    match context.open(Context::handle(reader)?) {
        Ok((_, node)) => {
            writer.u32(0);
            attributes::write_after(writer, Some(&node.stat));
            writer.u32(LINKS_MAX);
            writer.u32(NAME_MAX_BYTES as u32);
            // Long names are refused, only root gives files away, case matters and is kept.
            for fact in [true, true, false, true] {
                writer.bool(fact);
            }
        }
        Err(status) => failed(writer, status),
    }
    Ok(())
}

/// Whether the acting user may look into a folder.
pub fn searchable(folder: &Node) -> Result<(), Status> {
    if folder.kind() != FileType::Directory {
        return Err(Status::NotFolder);
    }
    Ok(rustix::fs::accessat(
        CWD,
        folder.proc_path(),
        Access::EXEC_OK,
        AtFlags::EACCESS,
    )?)
}

/// A failure whose result ends with the attributes of what failed, which are left out.
fn failed(writer: &mut Writer, status: Status) {
    writer.u32(status as u32);
    attributes::write_after(writer, None);
}
