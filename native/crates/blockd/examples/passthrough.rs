//! The least a FUSE server can do: one file, each request one `pread` or `pwrite`.
//!
//! What `blockd` costs is measured beside it (`tests/bench/blocks.py`): same kernel
//! interface, same flags, same threads. Serves FILE as MOUNT/file until unmounted.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, Session, SessionACL, WriteFlags,
};

#[path = "../src/sys.rs"]
#[allow(dead_code, reason = "only the mount is needed")]
mod sys;

const TTL: Duration = Duration::from_secs(3600);
const INODE: u64 = 2;
const MAX_REQUEST_BYTES: u32 = 1 << 20;
const THREADS: usize = 8;

struct Passthrough {
    file: File,
    size_bytes: u64,
}

impl Passthrough {
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let is_root = inode == INodeNo::ROOT;
        FileAttr {
            ino: inode,
            size: if is_root { 0 } else { self.size_bytes },
            blocks: 0,
            atime: SystemTime::UNIX_EPOCH,
            mtime: SystemTime::UNIX_EPOCH,
            ctime: SystemTime::UNIX_EPOCH,
            crtime: SystemTime::UNIX_EPOCH,
            kind: if is_root {
                FileType::Directory
            } else {
                FileType::RegularFile
            },
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Passthrough {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // The kernel's own limits apply where it refuses a value.
        let _ = config.set_max_write(MAX_REQUEST_BYTES);
        let _ = config.set_max_background(64);
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == "file" {
            let attributes = self.attributes(INodeNo(INODE));
            return reply.entry(&TTL, &attributes, Generation(0));
        }
        reply.error(Errno::ENOENT);
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        reply.attr(&TTL, &self.attributes(inode));
    }

    fn open(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut buffer = vec![0; size as usize];
        match self.file.read_at(&mut buffer, offset) {
            Ok(count) => reply.data(&buffer[..count]),
            Err(_) => reply.error(Errno::EIO),
        }
    }

    fn write(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.file.write_all_at(data, offset) {
            Ok(()) => reply.written(data.len() as u32),
            Err(_) => reply.error(Errno::EIO),
        }
    }
}

fn main() -> anyhow::Result<()> {
    let mut paths = std::env::args_os().skip(1).map(PathBuf::from);
    let (path, mount) = paths
        .next()
        .zip(paths.next())
        .context("usage: passthrough FILE MOUNT")?;
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let size_bytes = file.metadata()?.len();
    let device = sys::mount_fuse(&mount).context("cannot mount")?;
    let mut config = Config::default();
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    let server = Passthrough { file, size_bytes };
    let session = Session::from_fd(server, device, SessionACL::All, config)?;
    session.spawn()?.join().context("the session failed")
}
