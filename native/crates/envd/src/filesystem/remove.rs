//! Removal of a tree of any depth with bounded memory and descriptors.
//!
//! A user can nest folders deeper than a path can name and a thread's stack can follow; the agent is
//! PID 1 and must survive removing them. So it walks by descriptor, one folder open at a time, and
//! never through a symbolic link.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{fstat, openat, unlinkat, AtFlags, Dir, FileType, Mode, OFlags, CWD};
use rustix::io::Errno;

const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// A folder entered on the way down: its name in its parent, and which folder that parent was.
struct Level {
    name: CString,
    parent: (u64, u64),
}

/// Removes a file, link or folder with all it holds.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    match unlinkat(CWD, path, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        other => return Ok(other?),
    }
    let mut folder = match openat(CWD, path, FOLDER, Mode::empty()) {
        // It was a file all the same, one that may not be removed.
        Err(Errno::NOTDIR | Errno::LOOP) => return Err(Errno::PERM.into()),
        other => other?,
    };
    let mut levels: Vec<Level> = Vec::new();
    loop {
        match clear_files(&folder)? {
            Some(name) => {
                let parent = identity(&folder)?;
                folder = openat(&folder, &name, FOLDER, Mode::empty())?;
                levels.push(Level { name, parent });
            }
            None => {
                let Some(level) = levels.pop() else { break };
                let above = openat(&folder, "..", FOLDER, Mode::empty())?;
                if identity(&above)? != level.parent {
                    return Err(io::Error::other("the tree was moved while it was removed"));
                }
                unlinkat(&above, &level.name, AtFlags::REMOVEDIR)?;
                folder = above;
            }
        }
    }
    Ok(unlinkat(CWD, path, AtFlags::REMOVEDIR)?)
}

fn identity(folder: &OwnedFd) -> io::Result<(u64, u64)> {
    let info = fstat(folder)?;
    Ok((info.st_dev, info.st_ino))
}

/// Removes all but the folders. Returns the first folder in it that is not empty.
fn clear_files(folder: &OwnedFd) -> io::Result<Option<CString>> {
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let flags = if entry.file_type() == FileType::Directory {
            AtFlags::REMOVEDIR
        } else {
            AtFlags::empty()
        };
        match unlinkat(folder, name, flags) {
            // What somebody else removed is gone, which is what was asked for.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::ISDIR) => return Ok(Some(name.to_owned())),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_deeper_than_any_path() {
        let top = std::env::temp_dir().join(format!("envd-remove-{}", std::process::id()));
        std::fs::create_dir(&top).unwrap();
        std::fs::write(top.join("kept"), "").unwrap();
        let victim = top.join("victim");
        std::fs::create_dir(&victim).unwrap();
        std::os::unix::fs::symlink(&top, victim.join("link")).unwrap();
        let mut folder = openat(CWD, &victim, FOLDER, Mode::empty()).unwrap();
        for _ in 0..3_000 {
            rustix::fs::mkdirat(&folder, "d", Mode::RWXU).unwrap();
            folder = openat(&folder, "d", FOLDER, Mode::empty()).unwrap();
        }
        drop(folder);
        remove_tree(&victim).unwrap();
        assert!(!victim.exists() && top.join("kept").exists());
        assert_eq!(
            remove_tree(&victim).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        remove_tree(&top.join("kept")).unwrap();
        std::fs::remove_dir(&top).unwrap();
    }
}
