//! Places where the user's own rights do not reach.
//!
//! Clients may make, change, move and remove anything by its path, whoever the user is: a file `/srv/a` is
//! made with its folder although `/` belongs to root. So what a user may not do is done again as root, and
//! what is new belongs to the user. The one thing root must not do is to follow a link that a program in the
//! guest has planted: a place is reached folder by folder, each held by descriptor, none through a link, and
//! the last name is never followed either. A path with a link in it keeps to the user's rights.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{chownat, mkdirat, open, openat, AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::users::User;

const FOLDER: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// A name in a folder that stays the same one whatever happens to the paths that lead to it.
pub struct Pinned {
    folder: OwnedFd,
    name: OsString,
}

impl Pinned {
    /// Reaches `path`, which is absolute, with the identity of the thread. Folders that are missing above it
    /// are made for `owner` (0755), or are an error without one. A link on the way is EACCES.
    pub fn reach(path: &Path, owner: Option<&User>) -> io::Result<Self> {
        let denied = || io::Error::from_raw_os_error(libc::EACCES);
        let name = path.file_name().ok_or_else(denied)?.to_owned();
        let mut folder = open("/", FOLDER, Mode::empty())?;
        for component in path.parent().into_iter().flat_map(Path::components) {
            let part = match component {
                Component::RootDir => continue,
                Component::Normal(part) => part,
                _ => return Err(denied()),
            };
            folder = match (openat(&folder, part, FOLDER, Mode::empty()), owner) {
                (Err(Errno::NOENT), Some(owner)) => make_folder(&folder, Path::new(part), owner)?,
                (Err(Errno::NOTDIR | Errno::LOOP), _) => return Err(denied()),
                (other, _) => other?,
            };
        }
        Ok(Self { folder, name })
    }

    /// A path of the same place, good while this value lives.
    pub fn path(&self) -> PathBuf {
        Path::new("/proc/self/fd")
            .join(self.folder.as_raw_fd().to_string())
            .join(&self.name)
    }

    /// An error if something is there that is no regular file: opening a device as root can have effects.
    pub fn refuse_special(&self) -> io::Result<()> {
        match fs::symlink_metadata(self.path()) {
            Ok(info) if info.is_symlink() => Err(io::Error::from_raw_os_error(libc::EACCES)),
            Ok(info) if info.is_dir() => Err(io::Error::from_raw_os_error(libc::EISDIR)),
            Ok(info) if !info.is_file() => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            _ => Ok(()),
        }
    }

    /// Makes the place itself a folder of `owner`, 0755. AlreadyExists whatever it is that exists.
    pub fn make_dir(&self, owner: &User) -> io::Result<()> {
        let name = Path::new(&self.name);
        mkdirat(&self.folder, name, Mode::from_raw_mode(0o755))?;
        Ok(give(&self.folder, name, owner)?)
    }
}

fn make_folder(above: &OwnedFd, name: &Path, owner: &User) -> Result<OwnedFd, Errno> {
    match mkdirat(above, name, Mode::from_raw_mode(0o755)) {
        Ok(()) => give(above, name, owner)?,
        // Somebody else made it meanwhile, and it is theirs.
        Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    openat(above, name, FOLDER, Mode::empty())
}

fn give(above: &OwnedFd, name: &Path, owner: &User) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    chownat(above, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
}

/// Whether an error says that the user's rights do not suffice.
pub fn is_denied(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM))
}
