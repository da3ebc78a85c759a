//! The few operating system calls that `std` lacks, by safe wrappers.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::{lseek, Whence};

/// Takes the exclusive advisory lock of a file without waiting. `Ok(None)`
/// means another open file holds it. The lock lives as long as the result.
pub fn lock_exclusive(file: File) -> io::Result<Option<Flock<File>>> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno.into()),
    }
}

/// First data byte at or after `offset`, `None` when only a hole follows.
/// Moves the file position. A file system without holes reports `offset`.
pub fn seek_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    let start = i64::try_from(offset).map_err(|_| io::Error::from(Errno::EOVERFLOW))?;
    match lseek(file, start, Whence::SeekData) {
        Ok(found) => Ok(Some(found.unsigned_abs())),
        Err(Errno::ENXIO) => Ok(None),
        Err(Errno::EINVAL) => Ok(Some(offset)),
        Err(errno) => Err(errno.into()),
    }
}

/// Makes a directory's new or removed names durable.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(parent)?.sync_all()
}
