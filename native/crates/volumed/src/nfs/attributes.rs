//! Attributes of files on the wire (RFC 1813 section 2.5): what there is, and what a client wants changed.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, CWD};

use super::status::Status;
use crate::export::Node;
use crate::sys::ActingAs;
use crate::xdr::{Malformed, Reader, Writer};

/// `fattr3`.
pub fn write(writer: &mut Writer, stat: &Stat) {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => 1,
        FileType::Directory => 2,
        FileType::BlockDevice => 3,
        FileType::CharacterDevice => 4,
        FileType::Symlink => 5,
        FileType::Socket => 6,
        _ => 7,
    };
    writer.u32(kind);
    writer.u32(stat.st_mode & 0o7777);
    writer.u32(u32::try_from(stat.st_nlink).unwrap_or(u32::MAX));
    writer.u32(stat.st_uid);
    writer.u32(stat.st_gid);
    writer.u64(stat.st_size as u64);
    writer.u64((stat.st_blocks as u64).saturating_mul(512));
    writer.u64(0); // of a device: none is ever made
    writer.u64(stat.st_dev);
    writer.u64(stat.st_ino);
    write_time(writer, stat.st_atime, stat.st_atime_nsec);
    write_time(writer, stat.st_mtime, stat.st_mtime_nsec);
    write_time(writer, stat.st_ctime, stat.st_ctime_nsec);
}

/// `post_op_attr`.
pub fn write_after(writer: &mut Writer, stat: Option<&Stat>) {
    writer.bool(stat.is_some());
    if let Some(stat) = stat {
        write(writer, stat);
    }
}

/// `wcc_data`: before and after a change.
pub fn write_change(writer: &mut Writer, before: Option<&Stat>, after: Option<&Stat>) {
    writer.bool(before.is_some());
    if let Some(stat) = before {
        writer.u64(stat.st_size as u64);
        write_time(writer, stat.st_mtime, stat.st_mtime_nsec);
        write_time(writer, stat.st_ctime, stat.st_ctime_nsec);
    }
    write_after(writer, after);
}

/// The wire has 32 unsigned bits for seconds.
fn write_time(writer: &mut Writer, seconds: i64, nanos: u64) {
    writer.u32(seconds.clamp(0, i64::from(u32::MAX)) as u32);
    writer.u32(nanos as u32);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NewTime {
    Leave,
    Now,
    At(Timespec),
}

/// `sattr3`: what a client wants a file to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Permission bits.
    pub mode: Option<u32>,
    uid: Option<u32>,
    gid: Option<u32>,
    /// Length in bytes.
    pub size: Option<u64>,
    accessed: NewTime,
    modified: NewTime,
}

impl Wanted {
    /// Reads it from a call.
    pub fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            mode: optional(reader, |reader| reader.u32())?,
            uid: optional(reader, |reader| reader.u32())?,
            gid: optional(reader, |reader| reader.u32())?,
            size: optional(reader, |reader| reader.u64())?,
            accessed: read_time(reader)?,
            modified: read_time(reader)?,
        })
    }

    /// Without a length that a new file has anyway: setting it would need a right that its mode may not give.
    pub fn for_new(self) -> Self {
        Self {
            size: self.size.filter(|size| *size > 0),
            ..self
        }
    }

    /// Nothing but a length, for a file that was there before.
    pub fn only_size(size: Option<u64>) -> Self {
        Self {
            mode: None,
            uid: None,
            gid: None,
            size,
            accessed: NewTime::Leave,
            modified: NewTime::Leave,
        }
    }

    /// What a new file is made with; `standard` when the client does not say.
    pub fn mode_or(&self, standard: u32) -> Mode {
        Mode::from_raw_mode(self.mode.unwrap_or(standard) & 0o7777)
    }

    /// Applies it as the acting user. The order matters: a change of owner drops setuid bits, and the
    /// times come last because everything else sets them.
    pub fn apply(&self, node: &Node, uid: u32) -> Result<(), Status> {
        let path = node.proc_path();
        if let Some(size) = self.size {
            rustix::fs::ftruncate(open_to_write(node, uid)?, size)?;
        }
        if self.uid.is_some() || self.gid.is_some() {
            let (uid, gid) = (self.uid.map(Uid::from_raw), self.gid.map(Gid::from_raw));
            rustix::fs::chownat(CWD, &path, uid, gid, AtFlags::empty())?;
        }
        if let Some(mode) = self.mode.filter(|_| node.kind() != FileType::Symlink) {
            let mode = Mode::from_raw_mode(mode & 0o7777);
            rustix::fs::chmodat(CWD, &path, mode, AtFlags::empty())?;
        }
        if (self.accessed, self.modified) != (NewTime::Leave, NewTime::Leave) {
            let times = Timestamps {
                last_access: self.accessed.raw(),
                last_modification: self.modified.raw(),
            };
            rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty())?;
        }
        Ok(())
    }
}

impl NewTime {
    fn raw(self) -> Timespec {
        let special = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
        match self {
            Self::Leave => special(rustix::fs::UTIME_OMIT),
            Self::Now => special(rustix::fs::UTIME_NOW),
            Self::At(time) => time,
        }
    }
}

/// Opens a file for writing as the acting user. Its owner may, whatever its mode: a program that opened it
/// and then took the right away writes on, and the server sees no opening (RFC 1813 section 4.4).
pub fn open_to_write(node: &Node, uid: u32) -> Result<OwnedFd, Status> {
    match node.reopen(OFlags::WRONLY) {
        Err(Status::Access) if node.stat.st_uid == uid => {
            let _as_root = ActingAs::new(0, 0, &[]).map_err(|_| Status::ServerFault)?;
            node.reopen(OFlags::WRONLY)
        }
        outcome => outcome,
    }
}

fn optional<T>(
    reader: &mut Reader<'_>,
    read: impl FnOnce(&mut Reader<'_>) -> Result<T, Malformed>,
) -> Result<Option<T>, Malformed> {
    reader.bool()?.then(|| read(reader)).transpose()
}

fn read_time(reader: &mut Reader<'_>) -> Result<NewTime, Malformed> {
    match reader.u32()? {
        0 => Ok(NewTime::Leave),
        1 => Ok(NewTime::Now),
        2 => {
            let (seconds, nanos) = (reader.u32()?, reader.u32()?);
            if nanos >= 1_000_000_000 {
                return Err(Malformed);
            }
            Ok(NewTime::At(Timespec {
                tv_sec: i64::from(seconds),
                tv_nsec: i64::from(nanos),
            }))
        }
        _ => Err(Malformed),
    }
}
