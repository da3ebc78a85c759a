//! The file system: one flat directory, one regular file for each open stack.
//!
//! Requests are served by several threads; each runs its I/O to the end, so a
//! slow read holds up only its own thread. What may have to wait for a registry goes to
//! a thread that is for such requests. Attributes and names are cached by
//! the kernel for long: they change only when a stack is closed, which
//! invalidates its name. Invariant: nothing here changes the set of stacks.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::time::{Duration, SystemTime};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};
use lsmt::{InPlace, StackError};
use nix::libc;
use std::sync::Arc;

use crate::api::error::{io_cause, is_storage_full};
use crate::api::models::CacheMode;
use crate::crew::Crew;
use crate::stacks::{Entry, Registry};

/// How long the kernel may keep names and attributes (one year): changes are
/// pushed by invalidation.
const CACHE_TTL: Duration = Duration::from_secs(365 * 24 * 3600);
/// Largest write request.
const MAX_WRITE_BYTES: u32 = 1 << 20;
/// Read-ahead requests the kernel may have outstanding.
const MAX_BACKGROUND_REQUESTS: u16 = 64;
/// Requests that may wait for a registry at the same time.
const MAX_WAITING: usize = 64;
/// Reads from this size on are answered from where the bytes are, if they can be: below
/// it a copy costs less than the page faults.
const IN_PLACE_BYTES: u32 = 64 << 10;
/// Block size told to `stat`.
const BLOCK_BYTES: u32 = 4096;

thread_local! {
    /// Reply buffer of a worker thread, as large as its largest read so far
    /// (the kernel bounds reads by the pages of one request, 1 MiB).
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The file system served at the mount point.
pub struct StackFs {
    registry: Arc<Registry>,
    started: SystemTime,
    waiting: Crew,
}

impl StackFs {
    /// A file system that shows the stacks of `registry`.
    pub fn new(registry: Arc<Registry>) -> StackFs {
        StackFs {
            registry,
            started: SystemTime::now(),
            waiting: Crew::new("remote-stack", MAX_WAITING),
        }
    }

    fn directory(&self) -> FileAttr {
        FileAttr {
            kind: FileType::Directory,
            perm: 0o755,
            nlink: 2,
            ..self.attributes(INodeNo::ROOT.0, 0)
        }
    }

    fn file(&self, entry: &Entry) -> FileAttr {
        FileAttr {
            // Without write permission an unprivileged VMM cannot dirty pages
            // that others map; those it shares them with are of its group.
            perm: if entry.is_writable() { 0o600 } else { 0o440 },
            uid: entry.owner.uid,
            gid: entry.owner.gid,
            ..self.attributes(entry.inode, entry.stack.virtual_size_bytes())
        }
    }

    fn attributes(&self, inode: u64, size: u64) -> FileAttr {
        FileAttr {
            ino: INodeNo(inode),
            size,
            blocks: size.div_ceil(512),
            atime: self.started,
            mtime: self.started,
            ctime: self.started,
            crtime: self.started,
            kind: FileType::RegularFile,
            perm: 0,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: BLOCK_BYTES,
            flags: 0,
        }
    }

    fn attributes_of(&self, inode: INodeNo) -> Option<FileAttr> {
        if inode == INodeNo::ROOT {
            return Some(self.directory());
        }
        let entry = self.registry.by_inode(inode.0)?;
        Some(self.file(&entry))
    }

    /// Runs `action` on a stack; a closed one is a stale handle.
    fn with<R>(
        &self,
        inode: INodeNo,
        what: &'static str,
        action: impl FnOnce(&Entry) -> Result<R, StackError>,
    ) -> Result<R, Errno> {
        let entry = self.registry.by_inode(inode.0).ok_or(Errno::ESTALE)?;
        on_stack(&entry, what, action)
    }
}

impl StackFs {
    /// Answers a request that may take long. On a stack whose reads may wait for a
    /// registry it does so on another thread, since also a write can have to wait for
    /// such a read: that must not hold up the stacks whose layers are all here.
    fn serve<R: Send + 'static>(
        &self,
        inode: INodeNo,
        reply: R,
        refuse: fn(R, Errno),
        work: impl FnOnce(&Entry, R) + Send + 'static,
    ) {
        let Some(entry) = self.registry.by_inode(inode.0) else {
            return refuse(reply, Errno::ESTALE);
        };
        if !entry.stack.may_wait() {
            return work(&entry, reply);
        }
        self.waiting.run(move || {
            work(&entry, reply);
            entry.stack.settle();
        });
    }
}

fn on_stack<R>(
    entry: &Entry,
    what: &'static str,
    action: impl FnOnce(&Entry) -> Result<R, StackError>,
) -> Result<R, Errno> {
    action(entry).map_err(|error| {
        let errno = errno_of(&error);
        if errno.code() != libc::EROFS {
            tracing::error!(id = entry.id, what, %error, "request failed");
        }
        errno
    })
}

fn answer_write(entry: &Entry, data: &[u8], offset: u64, reply: ReplyWrite) {
    let written = on_stack(entry, "write", |entry| match entry.records_zeros {
        true => entry.stack.write_recording_zeros(data, offset),
        false => entry.stack.write_at(data, offset),
    });
    match written {
        Ok(()) => reply.written(data.len() as u32),
        Err(errno) => reply.error(errno),
    }
}

/// A large read of what lies in one piece in a layer's file costs the kernel one copy,
/// out of its page cache, and this process none.
fn answer_read(entry: &Entry, offset: u64, size: u32, reply: ReplyData) {
    if size >= IN_PLACE_BYTES {
        let found = entry.stack.in_place(size.into(), offset);
        if let Some(bytes) = found.as_ref().and_then(InPlace::bytes) {
            return reply.data(bytes);
        }
    }
    answer_copied(entry, offset, size, reply);
}

fn answer_copied(entry: &Entry, offset: u64, size: u32, reply: ReplyData) {
    READ_BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < size as usize {
            buffer.resize(size as usize, 0);
        }
        let target = &mut buffer[..size as usize];
        match on_stack(entry, "read", |entry| entry.stack.read_at(target, offset)) {
            Ok(count) => reply.data(&buffer[..count]),
            Err(errno) => reply.error(errno),
        }
    });
}

fn errno_of(error: &StackError) -> Errno {
    match error {
        StackError::ReadOnly => Errno::EROFS,
        StackError::OutOfRange { .. } => Errno::EFBIG,
        _ if io_cause(error).is_some_and(is_storage_full) => Errno::ENOSPC,
        _ => Errno::EIO,
    }
}

fn finish(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for StackFs {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // The kernel's own limits apply where it refuses a value.
        let _ = config.set_max_write(MAX_WRITE_BYTES);
        let _ = config.set_max_background(MAX_BACKGROUND_REQUESTS);
        let _ = config.add_capabilities(InitFlags::FUSE_PARALLEL_DIROPS);
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let entry = name
            .to_str()
            .and_then(|name| self.registry.file_by_id(name));
        match entry {
            Some(entry) if parent == INodeNo::ROOT => {
                reply.entry(&CACHE_TTL, &self.file(&entry), Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match self.attributes_of(inode) {
            Some(attributes) => reply.attr(&CACHE_TTL, &attributes),
            None => reply.error(Errno::ESTALE),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // Size and owner belong to the stack. Setting the size it has is what a
        // VMM does before it fills a memory file, and is fine.
        let Some(attributes) = self.attributes_of(inode) else {
            return reply.error(Errno::ESTALE);
        };
        let keeps_size = size.is_none_or(|size| size == attributes.size);
        if mode.is_some() || uid.is_some() || gid.is_some() || !keeps_size {
            return reply.error(Errno::EPERM);
        }
        reply.attr(&CACHE_TTL, &attributes);
    }

    fn open(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let Some(entry) = self.registry.open_handle(inode.0) else {
            return reply.error(Errno::ESTALE);
        };
        let flags = match entry.cache {
            CacheMode::Page => FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH,
            CacheMode::Direct => {
                FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            }
        };
        reply.opened(FileHandle(0), flags);
    }

    fn release(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(entry) = self.registry.by_inode(inode.0) {
            entry.release();
        }
        reply.ok();
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.serve(inode, reply, ReplyData::error, move |entry, reply| {
            answer_read(entry, offset, size, reply);
        });
    }

    fn write(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let Some(entry) = self.registry.by_inode(inode.0) else {
            return reply.error(Errno::ESTALE);
        };
        if !entry.stack.may_wait() {
            return answer_write(&entry, data, offset, reply);
        }
        let data = data.to_vec();
        self.waiting
            .run(move || answer_write(&entry, &data, offset, reply));
    }

    fn flush(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.serve(inode, reply, ReplyEmpty::error, |entry, reply| {
            let result = on_stack(entry, "flush", |entry| entry.stack.flush());
            finish(reply, result);
        });
    }

    fn fsync(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.serve(inode, reply, ReplyEmpty::error, |entry, reply| {
            let result = on_stack(entry, "fsync", |entry| entry.stack.flush());
            finish(reply, result);
        });
    }

    fn fallocate(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let punches = mode == libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let zeroes = mode & !libc::FALLOC_FL_KEEP_SIZE == libc::FALLOC_FL_ZERO_RANGE;
        if !punches && !zeroes {
            // A stack has no space to reserve ahead.
            return reply.error(Errno::EOPNOTSUPP);
        }
        self.serve(inode, reply, ReplyEmpty::error, move |entry, reply| {
            let result = on_stack(entry, "discard", |entry| {
                let limit = entry.stack.virtual_size_bytes();
                let end = offset.saturating_add(length).min(limit);
                if !entry.is_writable() {
                    return Err(StackError::ReadOnly);
                }
                if offset < end {
                    entry.stack.discard(offset, end - offset)?;
                }
                Ok(())
            });
            finish(reply, result);
        });
    }

    fn lseek(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let found = self.with(inode, "lseek", |entry| {
            let size = entry.stack.virtual_size_bytes();
            let start = u64::try_from(offset).ok().filter(|start| *start < size);
            Ok(match (start, whence) {
                (Some(start), libc::SEEK_DATA) => entry.stack.next_data(start),
                (Some(start), libc::SEEK_HOLE) => Some(entry.stack.next_hole(start)),
                _ => None,
            })
        });
        match found {
            Ok(Some(position)) => reply.offset(position as i64),
            Ok(None) => reply.error(Errno::ENXIO),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if inode != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let dots = [".", ".."].map(|name| (1, FileType::Directory, name.to_owned()));
        let files = self.registry.all().into_iter();
        let files = files.filter(|entry| !entry.is_device());
        let files = files.map(|entry| (entry.inode, FileType::RegularFile, entry.id.clone()));
        let all = dots.into_iter().chain(files).enumerate();
        for (position, (inode, kind, name)) in all.skip(offset as usize) {
            if reply.add(INodeNo(inode), position as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _inode: INodeNo, reply: ReplyStatfs) {
        reply.statfs(0, 0, 0, 0, 0, BLOCK_BYTES, 255, BLOCK_BYTES);
    }

    fn getxattr(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _name: &OsStr,
        _size: u32,
        reply: ReplyXattr,
    ) {
        // The kernel remembers ENOSYS and asks no more.
        reply.error(Errno::ENOSYS);
    }
}
