//! The system calls that have no safe wrapper in the libraries used.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Most bytes of a file handle (`MAX_HANDLE_SZ` of the kernel).
const HANDLE_MAX_BYTES: usize = 128;

#[repr(C)]
struct RawHandle {
    bytes: libc::c_uint,
    kind: libc::c_int,
    data: [u8; HANDLE_MAX_BYTES],
}

/// What the kernel calls a file for good, on its own file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileHandle {
    /// How the file system reads `data`.
    pub kind: i32,
    /// The name.
    pub data: Vec<u8>,
}

/// The handle of an open file.
pub fn handle_of(file: BorrowedFd<'_>) -> io::Result<FileHandle> {
    let mut raw = RawHandle {
        bytes: HANDLE_MAX_BYTES as libc::c_uint,
        kind: 0,
        data: [0; HANDLE_MAX_BYTES],
    };
    let mut mount: libc::c_int = 0;
    // SAFETY: `raw` has the layout of `struct file_handle` with room for `raw.bytes` bytes, and both
    // pointers are valid for the call.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            &raw mut raw,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    let length = (raw.bytes as usize).min(HANDLE_MAX_BYTES);
    Ok(FileHandle {
        kind: raw.kind,
        data: raw.data[..length].to_vec(),
    })
}

/// Opens what a handle names, on the file system of `root`, without access to its content (O_PATH).
pub fn open_handle(root: BorrowedFd<'_>, handle: &FileHandle) -> io::Result<OwnedFd> {
    let mut raw = RawHandle {
        bytes: handle.data.len() as libc::c_uint,
        kind: handle.kind,
        data: [0; HANDLE_MAX_BYTES],
    };
    raw.data
        .get_mut(..handle.data.len())
        .ok_or(io::ErrorKind::InvalidInput)?
        .copy_from_slice(&handle.data);
    // SAFETY: `raw` has the layout of `struct file_handle` and holds `raw.bytes` bytes.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            root.as_raw_fd(),
            &raw const raw,
            libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC,
        )
    };
    let fd = libc::c_int::try_from(outcome).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The calling thread acts on files as this user and groups until the value is dropped.
///
/// The kernel then judges every access as the user's own; capabilities over files come and go with it
/// (capabilities(7), "Effect of user ID changes on capabilities").
pub struct ActingAs(());

impl ActingAs {
    /// Begins.
    pub fn new(uid: u32, gid: u32, groups: &[u32]) -> io::Result<Self> {
        set_groups(groups)?;
        let acting = Self(());
        set_file_ids(uid, gid);
        Ok(acting)
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        set_file_ids(0, 0);
        // Root's own groups do not matter for what root may do.
        let _unchanged = set_groups(&[]);
    }
}

fn set_file_ids(uid: u32, gid: u32) {
    // SAFETY: both calls take plain numbers and concern the calling thread alone. They report no
    // errors; a thread with CAP_SETUID and CAP_SETGID always succeeds.
    unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
    }
}

fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: the pointer is valid for `groups.len()` numbers of the kernel's type; made directly, the
    // call concerns the calling thread alone.
    let outcome = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
