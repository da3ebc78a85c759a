//! Volumes of the node, mounted by NFS version 3 (`volumeMounts` of `POST /init`, contract section 3.2).
//!
//! The server is at the gateway, inside the sandbox's own network. A guest that was restored has its mounts
//! already: they are left alone, and the kernel connects anew by itself. Mounts are hard: while the server is
//! away programs wait, and nothing fails. Mounts that the restored memory has and the sandbox has not, because
//! its template was captured with them or a volume was deleted, are taken away: nobody would ever answer them.

use std::ffi::CString;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Component, Path};
use std::time::Duration;

use hyper::StatusCode;
use rustix::mount::{MountFlags, UnmountFlags};
use serde::Deserialize;

use crate::connect::error::cause;
use crate::http::RestError;

/// Longest wait for all mounts of a call.
const MOUNT_DEADLINE: Duration = Duration::from_secs(20);
const PORT: u16 = 2049;
/// Other sandboxes write too, so attributes are trusted for a second only, and absent names not at all.
/// Locks are the guest's own (`nolock`); reads and writes are as large as the server takes.
const OPTIONS: &str =
    "vers=3,proto=tcp,mountproto=tcp,mountvers=3,nolock,noacl,hard,noresvport,timeo=50,actimeo=1,\
                       lookupcache=positive,rsize=1048576,wsize=1048576";

/// One volume to mount.
#[derive(Debug, Deserialize)]
pub struct VolumeMount {
    /// `<address>:/<name>`.
    nfs_target: String,
    /// Where in the guest; made with its parents.
    path: String,
}

/// Makes the mounts be these and no others, in the order given. BAD_REQUEST for a path that cannot be mounted on.
pub async fn set(mounts: Vec<VolumeMount>) -> Result<(), RestError> {
    let table = fs::read_to_string("/proc/self/mountinfo")
        .map_err(|error| failed(format!("cannot read the mount table: {error}")))?;
    for (place, _) in mounted(&table) {
        let wanted = |mount: &VolumeMount| {
            is_mounted(&table, &mount.nfs_target, &place) && mount.path == place
        };
        if !mounts.iter().any(wanted) {
            // Forced, so that no call to a server that is not there holds it up; detached, so that no user does.
            let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
            if let Err(error) = rustix::mount::unmount(place.as_str(), flags) {
                crate::boot::say(&format!("unmount {place}: {error}"));
            }
        }
    }
    if mounts.is_empty() {
        return Ok(());
    }
    let work = tokio::task::spawn_blocking(move || mounts.iter().try_for_each(mount));
    match tokio::time::timeout(MOUNT_DEADLINE, work).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(error)) => Err(failed(format!("cannot mount volumes: {error}"))),
        Err(_) => Err(failed(format!(
            "the volumes could not be mounted within {} s",
            MOUNT_DEADLINE.as_secs()
        ))),
    }
}

fn failed(message: String) -> RestError {
    RestError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
}

fn mount(wanted: &VolumeMount) -> Result<(), RestError> {
    let path = Path::new(&wanted.path);
    let refused = |why: &str| {
        RestError::new(
            StatusCode::BAD_REQUEST,
            format!("cannot mount a volume on '{}': {why}", wanted.path),
        )
    };
    if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
        return Err(refused("the path is not absolute"));
    }
    let about = |error: &io::Error| {
        format!(
            "cannot mount a volume on '{}': {}",
            wanted.path,
            cause(error)
        )
    };
    let table =
        fs::read_to_string("/proc/self/mountinfo").map_err(|error| failed(about(&error)))?;
    if is_mounted(&table, &wanted.nfs_target, &wanted.path) {
        return Ok(());
    }
    let address: IpAddr = wanted
        .nfs_target
        .split_once(":/")
        .and_then(|(address, _)| address.parse().ok())
        .ok_or_else(|| refused("its target is malformed"))?;
    fs::create_dir_all(path).map_err(|error| refused(&cause(&error)))?;
    let options =
        format!("{OPTIONS},addr={address},mountaddr={address},port={PORT},mountport={PORT}");
    let options = CString::new(options).map_err(|_| refused("its target is malformed"))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID;
    match rustix::mount::mount(
        wanted.nfs_target.as_str(),
        path,
        "nfs",
        flags,
        options.as_c_str(),
    ) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::NODEV) => Err(failed(format!(
            "cannot mount a volume on '{}': the guest's kernel has no NFS client",
            wanted.path
        ))),
        Err(error) => Err(failed(about(&error.into()))),
    }
}

/// What the mount table (proc_pid_mountinfo(5)) has of volumes: places and targets, in the order they were mounted.
fn mounted(table: &str) -> Vec<(String, String)> {
    let lines = table.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let (kind, source) = (right.next()?, right.next()?);
        let at_gateway = source.split_once(":/")?.0.parse::<IpAddr>().is_ok();
        (kind == "nfs" && at_gateway)
            .then(|| (left.split(' ').nth(4).map(unescape), unescape(source)))
    });
    lines
        .filter_map(|(place, source)| Some((place?, source)))
        .collect()
}

/// Whether `target` is mounted on `path`.
fn is_mounted(table: &str, target: &str, path: &str) -> bool {
    mounted(table)
        .iter()
        .any(|(place, source)| place == path && source == target)
}

/// Blanks and the like stand as three octal digits.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|_| first == b'\\');
        let code = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
                         30 22 0:30 / /mnt/a\\040b rw,nosuid - nfs 169.254.0.22:/v1 rw,vers=3\n\
                         31 22 0:31 / /mnt/c rw - nfs 169.254.0.22:/v1 rw\n\
                         32 22 0:32 / /mnt/d rw - tmpfs tmpfs rw\n\
                         33 22 0:33 / /mnt/e rw - nfs server.example:/export rw\n";

    #[test]
    fn mounts_are_found_by_target_and_place() {
        assert!(is_mounted(TABLE, "169.254.0.22:/v1", "/mnt/a b"));
        assert!(!is_mounted(TABLE, "169.254.0.22:/v2", "/mnt/a b"));
        assert!(!is_mounted(TABLE, "169.254.0.22:/v1", "/mnt/a"));
        let places: Vec<String> = mounted(TABLE).into_iter().map(|(place, _)| place).collect();
        assert_eq!(places, ["/mnt/a b", "/mnt/c"], "of volumes only");
    }

    #[test]
    fn escapes_are_undone() {
        assert_eq!(unescape("a\\040b\\134"), "a b\\");
        assert_eq!(unescape("\\04"), "\\04");
        assert_eq!(unescape("\\999x"), "\\999x");
    }

    #[test]
    fn paths_that_leave_are_refused() {
        for path in ["relative", "/a/../b", ""] {
            let wanted = VolumeMount {
                nfs_target: "169.254.0.22:/v".to_owned(),
                path: path.to_owned(),
            };
            assert_eq!(mount(&wanted).unwrap_err().status, StatusCode::BAD_REQUEST);
        }
    }
}
