//! Operating system calls of the daemon. The only module with `unsafe`.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{mount, umount2, MntFlags, MsFlags};
use nix::sys::resource::{getrlimit, setrlimit, Resource};
use nix::sys::statfs::{statfs, FUSE_SUPER_MAGIC};
use nix::sys::uio::{process_vm_readv, process_vm_writev, RemoteIoVec};
use nix::unistd::Pid;

/// Most memory ranges one `process_vm_readv` or `process_vm_writev` call takes (UIO_MAXIOV).
pub const MAX_REMOTE_RANGES: usize = 1024;
/// Open files asked for; a stack of 255 layers uses that many.
const WANTED_OPEN_FILES: u64 = 1_048_576;

/// Mounts a FUSE file system at `directory` and returns its device.
///
/// Every user may reach it, and the kernel checks the mode of each file.
pub fn mount_fuse(directory: &Path) -> io::Result<OwnedFd> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(nix::libc::O_CLOEXEC)
        .open("/dev/fuse")?;
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
        device.as_raw_fd()
    );
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
    mount(
        Some("blockd"),
        directory,
        Some("fuse.blockd"),
        flags,
        Some(options.as_str()),
    )?;
    Ok(device.into())
}

/// What is mounted at a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountState {
    /// No FUSE mount; the folder may be absent.
    Free,
    /// A FUSE mount whose daemon answers.
    Alive,
    /// A FUSE mount whose daemon is gone.
    Dead,
}

/// Looks at a folder. Asks for figures of the file system, since the kernel may
/// answer anything else for a dead mount from its cache.
pub fn mount_state(directory: &Path) -> io::Result<MountState> {
    match statfs(directory) {
        Ok(found) if found.filesystem_type() == FUSE_SUPER_MAGIC => Ok(MountState::Alive),
        Ok(_) | Err(Errno::ENOENT) => Ok(MountState::Free),
        Err(Errno::ENOTCONN | Errno::ECONNABORTED) => Ok(MountState::Dead),
        Err(errno) => Err(errno.into()),
    }
}

/// Unmounts. `lazily` also when files are open: they stay usable until closed.
pub fn unmount(directory: &Path, lazily: bool) -> io::Result<()> {
    let flags = if lazily {
        MntFlags::MNT_DETACH
    } else {
        MntFlags::empty()
    };
    Ok(umount2(directory, flags)?)
}

/// Copies `ranges` (address, length) of another process one after the other
/// into `buffer`. Returns the bytes copied: fewer when a range is not mapped.
pub fn read_process_memory(
    pid: i32,
    ranges: &[(u64, usize)],
    buffer: &mut [u8],
) -> io::Result<usize> {
    let mut local = [IoSliceMut::new(buffer)];
    let pid = Pid::from_raw(pid);
    Ok(process_vm_readv(pid, &mut local, &remote(ranges))?)
}

/// Copies `bytes` into `ranges` (address, length) of another process, one after the other.
/// Returns the bytes copied: fewer when a range is not mapped, or may not be written.
pub fn write_process_memory(pid: i32, ranges: &[(u64, usize)], bytes: &[u8]) -> io::Result<usize> {
    let local = [IoSlice::new(bytes)];
    let pid = Pid::from_raw(pid);
    Ok(process_vm_writev(pid, &local, &remote(ranges))?)
}

fn remote(ranges: &[(u64, usize)]) -> Vec<RemoteIoVec> {
    let ranges = ranges.iter();
    ranges
        .map(|(address, length)| RemoteIoVec {
            base: *address as usize,
            len: *length,
        })
        .collect()
}

/// Argument of the PAGEMAP_SCAN ioctl (include/uapi/linux/fs.h, Linux 6.7).
#[repr(C)]
#[derive(Debug)]
pub struct PagemapScan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// One result of the PAGEMAP_SCAN ioctl: a run of pages.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PageRegion {
    /// First address.
    pub start: u64,
    /// First address after the run.
    pub end: u64,
    categories: u64,
}

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;

mod ioctls {
    nix::ioctl_readwrite!(pagemap_scan, b'f', 16, super::PagemapScan);
}

/// Finds runs of anonymous pages (present or swapped out) in `[start, end)`.
/// Returns the number of regions filled, from the lowest address up.
/// `ENOTTY` means the kernel lacks the call.
pub fn scan_anonymous(
    pagemap: &File,
    start: u64,
    end: u64,
    regions: &mut [PageRegion],
) -> io::Result<usize> {
    let mut argument = PagemapScan {
        size: std::mem::size_of::<PagemapScan>() as u64,
        flags: 0,
        start,
        end,
        walk_end: 0,
        vec: regions.as_mut_ptr() as u64,
        vec_len: regions.len() as u64,
        max_pages: 0,
        category_inverted: PAGE_IS_FILE,
        category_mask: PAGE_IS_FILE,
        category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
    };
    // SAFETY: `argument` has the kernel's layout and its stated size; `vec` and
    // `vec_len` describe `regions`, which is borrowed mutably for the call and
    // whose element type has the kernel's layout.
    let count = unsafe { ioctls::pagemap_scan(pagemap.as_raw_fd(), &mut argument) }?;
    Ok(count.unsigned_abs() as usize)
}

/// Keeps the out-of-memory killer away: every guest depends on this process.
pub fn protect_from_oom() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "-900")
}

/// Raises the limit of open files as far as permitted; returns the new limit.
pub fn raise_open_files() -> io::Result<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let wanted = WANTED_OPEN_FILES.max(hard);
    if setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).is_ok() {
        return Ok(wanted);
    }
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard)
}
