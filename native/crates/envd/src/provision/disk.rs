//! `POST /provision/disk`: the root file system takes all of a disk that was made larger.
//!
//! The kernel does it by itself (`EXT4_IOC_RESIZE_FS`), mounted as it is, so that no program of the image is needed.
//! Parts of a disk that nothing has written read as zeros, so new inode tables need not be written: left to itself,
//! the kernel would do that in the guest's first minutes, into the sandbox's own layer. The root is mounted without
//! that (`boot::mounts::ROOT_OPTIONS`); it is on only while the kernel decides who is to write them, or it would do so at once.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::fs::{major, minor, Mode, OFlags};
use rustix::mount::{mount_remount, MountFlags};
use serde::Deserialize;

use crate::boot::mounts::ROOT_OPTIONS;
use crate::sys;

const EXT4_MAGIC: u64 = 0xef53;
const SECTOR_BYTES: u64 = 512;
/// The VMM tells the kernel by an interrupt, and a busy host may be slow with it.
const CAPACITY_WAIT: Duration = Duration::from_secs(20);
const CAPACITY_POLL: Duration = Duration::from_millis(2);

/// The disk's size that the host speaks of.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Growth {
    size_bytes: u64,
}

/// Waits until the disk has at least that size, then lets the file system have all of it. Idempotent.
pub fn grow(growth: &Growth) -> io::Result<()> {
    let size_bytes = await_capacity(growth.size_bytes)?;
    let root = rustix::fs::open("/", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let found = rustix::fs::fstatfs(root.as_fd())?;
    let (kind, block_bytes) = (found.f_type as u64, found.f_bsize as u64);
    if kind != EXT4_MAGIC || block_bytes == 0 {
        let message = "the root file system is not ext4, and only ext4 can be made larger";
        return Err(io::Error::other(message));
    }
    mount_remount("/", MountFlags::NOATIME, c"init_itable")?;
    let resized = sys::resize_ext4(root.as_fd(), size_bytes / block_bytes);
    mount_remount("/", MountFlags::NOATIME, ROOT_OPTIONS)?;
    resized
}

fn await_capacity(wanted_bytes: u64) -> io::Result<u64> {
    let device = fs::metadata("/")?.dev();
    let place = format!("/sys/dev/block/{}:{}/size", major(device), minor(device));
    let since = Instant::now();
    loop {
        let size_bytes = parse_sectors(&fs::read_to_string(&place)?)?;
        if size_bytes >= wanted_bytes {
            return Ok(size_bytes);
        }
        if since.elapsed() > CAPACITY_WAIT {
            let message = format!("the disk has {size_bytes} bytes, not {wanted_bytes}");
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        std::thread::sleep(CAPACITY_POLL);
    }
}

fn parse_sectors(text: &str) -> io::Result<u64> {
    let sectors = text.trim().parse::<u64>().map_err(io::Error::other)?;
    sectors
        .checked_mul(SECTOR_BYTES)
        .ok_or_else(|| io::Error::other(format!("no size of a disk: {sectors} sectors")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_counted_in_sectors_of_512_bytes() {
        for (text, expected) in [
            ("0\n", Some(0)),
            ("8\n", Some(4096)),
            ("16777216", Some(8 << 30)),
        ] {
            assert_eq!(parse_sectors(text).ok(), expected, "{text:?}");
        }
        for text in ["", "-1", "x", "18446744073709551615"] {
            assert!(parse_sectors(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_disk_that_is_large_enough_is_not_waited_for() {
        if let Ok(size_bytes) = await_capacity(0) {
            assert_eq!(await_capacity(size_bytes).ok(), Some(size_bytes));
        }
    }
}
