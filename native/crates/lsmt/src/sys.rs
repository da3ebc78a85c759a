//! The few operating system calls that `std` lacks, by safe wrappers.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{fallocate, FallocateFlags, Flock, FlockArg};
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

/// First byte of a hole at or after `offset`; the end of the file is one.
/// Moves the file position.
pub fn seek_hole(file: &File, offset: u64) -> io::Result<u64> {
    let start = i64::try_from(offset).map_err(|_| io::Error::from(Errno::EOVERFLOW))?;
    Ok(lseek(file, start, Whence::SeekHole)?.unsigned_abs())
}

/// Takes room on the file system for a range of a file, whose size stays. Where the file
/// system cannot, nothing is taken.
pub fn allocate(file: &File, offset: u64, length_bytes: u64) -> io::Result<()> {
    let to_signed = |value| i64::try_from(value).map_err(|_| io::Error::from(Errno::EOVERFLOW));
    let keep_size = FallocateFlags::FALLOC_FL_KEEP_SIZE;
    match fallocate(
        file,
        keep_size,
        to_signed(offset)?,
        to_signed(length_bytes)?,
    ) {
        Ok(()) | Err(Errno::EOPNOTSUPP) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Frees a range of a file, which then reads as zero. `Ok(false)` means that the
/// file system cannot.
pub fn punch_hole(file: &File, offset: u64, length_bytes: u64) -> io::Result<bool> {
    let to_signed = |value| i64::try_from(value).map_err(|_| io::Error::from(Errno::EOVERFLOW));
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    match fallocate(file, flags, to_signed(offset)?, to_signed(length_bytes)?) {
        Ok(()) => Ok(true),
        Err(Errno::EOPNOTSUPP) => Ok(false),
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
