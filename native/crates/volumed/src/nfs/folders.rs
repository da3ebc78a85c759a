//! Reading folders, with and without the attributes of what is in them. Cookies are the file system's own
//! positions, so a client may go on after any time.

use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rustix::fs::{FileType, OFlags, RawDir, SeekFrom};

use super::attributes;
use super::status::Status;
use super::{Context, Outcome};
use crate::export::{Export, Node};
use crate::xdr::{Reader, Writer};

/// Most bytes of one reply.
const REPLY_MAX_BYTES: usize = 64 << 10;
const BUFFER_BYTES: usize = 32 << 10;
/// The end of the list and the mark that nothing follows.
const TAIL_BYTES: usize = 8;

/// READDIR, or READDIRPLUS with `plus`.
pub fn read(
    context: &Context<'_>,
    reader: &mut Reader<'_>,
    writer: &mut Writer,
    plus: bool,
) -> Outcome {
    let sealed = Context::handle(reader)?;
    let (cookie, _verifier) = (reader.u64()?, reader.u64()?);
    if plus {
        reader.u32()?; // bytes of names alone; the other limit is enough
    }
    let limit = (reader.u32()? as usize).min(REPLY_MAX_BYTES);
    let opened = context.open(sealed).and_then(|(export, folder)| {
        if folder.kind() != FileType::Directory {
            return Err(Status::NotFolder);
        }
        let _acting = context.act()?;
        let listed = folder.reopen(OFlags::RDONLY | OFlags::DIRECTORY)?;
        Ok((export, folder, listed))
    });
    let start = writer.len();
    let outcome = opened.and_then(|(export, folder, listed)| {
        writer.u32(0);
        attributes::write_after(writer, Some(&folder.stat));
        writer.u64(0); // cookies never become invalid
        list(
            export,
            &folder,
            listed.as_fd(),
            cookie,
            start + limit,
            plus,
            writer,
        )
    });
    if let Err(status) = outcome {
        writer.truncate(start);
        writer.u32(status as u32);
        attributes::write_after(writer, None);
    }
    Ok(())
}

fn list(
    export: &Export,
    folder: &Node,
    listed: std::os::fd::BorrowedFd<'_>,
    cookie: u64,
    limit: usize,
    plus: bool,
    writer: &mut Writer,
) -> Result<(), Status> {
    rustix::fs::seek(listed, SeekFrom::Start(cookie)).map_err(|_| Status::Invalid)?;
    let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
    let mut entries = RawDir::new(listed, &mut buffer);
    let mut any = false;
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let before = writer.len();
        writer.bool(true);
        let above_root = entry.file_name() == c".." && export.is_root(&folder.stat);
        writer.u64(if above_root {
            folder.stat.st_ino
        } else {
            entry.ino()
        });
        writer.opaque(entry.file_name().to_bytes());
        writer.u64(entry.next_entry_cookie());
        if plus {
            let node = export.lookup(folder, entry.file_name()).ok();
            let handle = node
                .as_ref()
                .and_then(|node| export.seal(node.fd.as_fd()).ok());
            attributes::write_after(writer, node.as_ref().map(|node| &node.stat));
            writer.bool(handle.is_some());
            if let Some(handle) = handle {
                writer.opaque(&handle);
            }
        }
        if writer.len() + TAIL_BYTES > limit {
            writer.truncate(before);
            if !any {
                return Err(Status::TooSmall);
            }
            writer.bool(false);
            writer.bool(false);
            return Ok(());
        }
        any = true;
    }
    writer.bool(false);
    writer.bool(true);
    Ok(())
}
