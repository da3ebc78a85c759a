//! Mounts of one RUN: what lies over the disk while its program runs, and is no part of it.
//!
//! `source` is a file or folder of the disk that the host has put there, below `HIDDEN`; without one it is an empty
//! folder in memory. What had to be made for the target is taken away again, unless something was put into it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{
    mount as attach, mount_bind, mount_remount, unmount as detach, MountFlags, UnmountFlags,
};
use serde::Deserialize;

use super::{make_folders, Owner};

/// Where the host puts the content of mounts.
const HIDDEN: &str = "/.aenv-mounts";

/// What to mount where.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Mount {
    source: String,
    /// Absolute.
    pub target: String,
    is_read_only: bool,
    /// Of a folder in memory; 0: half of the memory.
    size_bytes: u64,
    mode: u32,
}

/// What to take away: the mount, what was made for it, and a folder below `HIDDEN`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Unmount {
    /// Absolute.
    pub target: String,
    made: String,
    folder: String,
}

/// Mounts; returns the topmost thing that had to be made for the target, or nothing.
pub fn mount(wanted: &Mount, target: &Path) -> io::Result<String> {
    let source = Path::new(&wanted.source);
    let is_file = !wanted.source.is_empty() && !fs::metadata(source)?.is_dir();
    let made = make_target(target, is_file)?;
    let outcome = attach_over(wanted, source, target);
    if outcome.is_err() {
        remove_made(target, &made);
    }
    outcome.map(|()| made)
}

fn attach_over(wanted: &Mount, source: &Path, target: &Path) -> io::Result<()> {
    if wanted.source.is_empty() {
        let size = match wanted.size_bytes {
            0 => String::new(),
            size => format!(",size={size}"),
        };
        let options = std::ffi::CString::new(format!("mode={:o}{size}", wanted.mode & 0o7777))?;
        return Ok(attach(
            "tmpfs",
            target,
            "tmpfs",
            MountFlags::empty(),
            options.as_c_str(),
        )?);
    }
    mount_bind(source, target)?;
    if wanted.is_read_only {
        let flags = MountFlags::BIND | MountFlags::RDONLY;
        if let Err(error) = mount_remount(target, flags, "") {
            let _still = detach(target, UnmountFlags::DETACH);
            return Err(error.into());
        }
    }
    Ok(())
}

/// Makes the target if it is missing, as a folder or an empty file.
fn make_target(target: &Path, is_file: bool) -> io::Result<String> {
    let root = Owner { uid: 0, gid: 0 };
    match fs::metadata(target) {
        Ok(info) if info.is_dir() != is_file => return Ok(String::new()),
        Ok(_) if is_file => return Err(io::Error::other("a file cannot be mounted over a folder")),
        Ok(_) => return Err(io::Error::other("a folder cannot be mounted over a file")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let topmost = target
        .ancestors()
        .take_while(|place| fs::metadata(place).is_err())
        .last();
    let made = topmost.unwrap_or(target).to_string_lossy().into_owned();
    if is_file {
        let above = target.parent().unwrap_or(Path::new("/"));
        make_folders(above, root)?;
        File::create_new(target)?.set_permissions(fs::Permissions::from_mode(0o644))?;
    } else {
        make_folders(target, root)?;
    }
    Ok(made)
}

/// Takes a mount away; one that is gone already is fine.
pub fn unmount(wanted: &Unmount, target: &Path) -> io::Result<()> {
    match detach(target, UnmountFlags::DETACH) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    remove_made(target, &wanted.made);
    let folder = PathBuf::from(&wanted.folder);
    if !folder.starts_with(HIDDEN) || folder.components().any(|part| part.as_os_str() == "..") {
        return Ok(());
    }
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => {
            let _not_the_last = fs::remove_dir(HIDDEN);
            Ok(())
        }
    }
}

fn remove_made(target: &Path, made: &str) {
    if made.is_empty() {
        return;
    }
    let _kept = match fs::symlink_metadata(target) {
        Ok(info) if info.is_file() && info.len() == 0 => fs::remove_file(target),
        _ => fs::remove_dir(target),
    };
    for place in target.ancestors().skip(1) {
        if !place.starts_with(made) || fs::remove_dir(place).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_for_a_target_goes_unless_it_is_used() {
        let root = std::env::temp_dir().join(format!("envd-mounts-{}", std::process::id()));
        let _absent = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("there")).unwrap();
        for is_file in [false, true] {
            let target = root.join("there/a/b");
            let made = make_target(&target, is_file).unwrap();
            assert_eq!(Path::new(&made), root.join("there/a"));
            assert_eq!(target.is_file(), is_file);
            remove_made(&target, &made);
            assert!(root.join("there").is_dir() && !root.join("there/a").exists());
        }
        let target = root.join("there/a/b");
        let made = make_target(&target, false).unwrap();
        fs::write(root.join("there/a/other"), "kept").unwrap();
        remove_made(&target, &made);
        assert!(root.join("there/a/other").is_file() && !target.exists());
        assert_eq!(make_target(&root.join("there"), false).unwrap(), "");
        assert!(make_target(&root.join("there"), true).is_err());
        assert!(make_target(&root.join("there/a/other"), false).is_err());
        fs::remove_dir_all(root).unwrap();
    }
}
