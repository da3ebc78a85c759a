//! One volume as guests see it: its root, its handles, and the way from a handle to a file.
//!
//! Nothing here resolves a path. Every step is one name in one open folder, links are never followed,
//! other file systems are not entered, and above the root there is only the root.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::handle::{self, VolumeTag};
use crate::nfs::status::Status;
use crate::sys;

/// Longest name in a folder.
pub const NAME_MAX_BYTES: usize = 255;

/// A volume that is served.
pub struct Export {
    /// What the guest asks for when it mounts.
    pub name: String,
    /// Names it in handles.
    pub tag: VolumeTag,
    key: Vec<u8>,
    root: OwnedFd,
    root_stat: Stat,
    reserve_bytes: u64,
}

/// A file, folder or link of an export, opened without access to its content.
pub struct Node {
    /// The descriptor (O_PATH).
    pub fd: OwnedFd,
    /// What it was when it was opened.
    pub stat: Stat,
}

impl Node {
    /// Its type.
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// What it is now.
    pub fn fresh(&self) -> Result<Stat, Status> {
        Ok(rustix::fs::fstat(&self.fd)?)
    }

    /// A name of it for calls that take only names; it means this node even when it is a link.
    pub fn proc_path(&self) -> String {
        use std::os::fd::AsRawFd;
        format!("/proc/self/fd/{}", self.fd.as_raw_fd())
    }

    /// Opens a regular file or a folder for use. Anything else could have effects by being opened.
    pub fn reopen(&self, flags: OFlags) -> Result<OwnedFd, Status> {
        match self.kind() {
            FileType::RegularFile | FileType::Directory => {}
            FileType::Symlink => return Err(Status::Invalid),
            _ => return Err(Status::NotSupported),
        }
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        Ok(rustix::fs::open(self.proc_path(), flags, Mode::empty())?)
    }
}

impl Export {
    /// Serves the folder `root`.
    pub fn new(
        name: String,
        key: Vec<u8>,
        root: &Path,
        reserve_bytes: u64,
    ) -> rustix::io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty())?;
        let root_stat = rustix::fs::fstat(&root)?;
        Ok(Self {
            tag: handle::tag_of(&name),
            name,
            key,
            root,
            root_stat,
            reserve_bytes,
        })
    }

    /// The root, for questions about its file system.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// The root as a node.
    pub fn root_node(&self) -> Result<Node, Status> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.node(rustix::fs::openat(&self.root, c".", flags, Mode::empty())?)
    }

    /// What a handle names. Stale when it is gone, or was never given out for this volume.
    pub fn open(&self, sealed: &[u8]) -> Result<Node, Status> {
        let own = handle::unseal(&self.key, sealed).ok_or(Status::BadHandle)?;
        let fd = sys::open_handle(self.root.as_fd(), &own).map_err(|_| Status::Stale)?;
        self.node(fd)
    }

    /// What `folder` has under `name`, where `..` of the root is the root.
    pub fn lookup(&self, folder: &Node, name: &CStr) -> Result<Node, Status> {
        if name == c".." && self.is_root(&folder.stat) {
            return self.root_node();
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.node(rustix::fs::openat(&folder.fd, name, flags, Mode::empty())?)
    }

    /// The handle guests get for a node.
    pub fn seal(&self, node: BorrowedFd<'_>) -> Result<Vec<u8>, Status> {
        let own = sys::handle_of(node).map_err(|_| Status::ServerFault)?;
        handle::seal(self.tag, &self.key, &own).ok_or(Status::ServerFault)
    }

    /// Refuses to grow the volume when the node's disk is nearly full.
    pub fn require_room(&self) -> Result<(), Status> {
        let facts = rustix::fs::fstatvfs(&self.root)?;
        if facts.f_bavail.saturating_mul(facts.f_frsize) < self.reserve_bytes {
            return Err(Status::NoSpace);
        }
        Ok(())
    }

    /// Whether this is the root.
    pub fn is_root(&self, stat: &Stat) -> bool {
        (stat.st_dev, stat.st_ino) == (self.root_stat.st_dev, self.root_stat.st_ino)
    }

    fn node(&self, fd: OwnedFd) -> Result<Node, Status> {
        let stat = rustix::fs::fstat(&fd)?;
        if stat.st_dev != self.root_stat.st_dev {
            return Err(Status::Access);
        }
        Ok(Node { fd, stat })
    }
}

/// Whether `name` can be that of something new, removed or renamed.
pub fn check_name(name: &CStr) -> Result<(), Status> {
    match name.to_bytes() {
        b"" | b"." | b".." => Err(Status::Invalid),
        _ => Ok(()),
    }
}

/// What a folder has under `name`, a link being itself.
pub fn stat_in(folder: &Node, name: &CStr) -> Result<Stat, Errno> {
    rustix::fs::statat(&folder.fd, name, AtFlags::SYMLINK_NOFOLLOW)
}
