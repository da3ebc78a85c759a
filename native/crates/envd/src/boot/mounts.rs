//! Mounts: those of the initramfs, those of the real root, and the move from one to the other.

use std::ffi::CStr;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Instant;

use rustix::mount::{mount, mount_move, MountFlags};

use super::settings::BootSettings;
use super::{say, BootError, Step};
use crate::limits::{ROOT_DEVICE_POLL, ROOT_DEVICE_WAIT};

const NEW_ROOT: &str = "/sysroot";
/// Of an ext4 root: what nothing has written reads as zeros, so the kernel need not write inode tables in the background.
pub const ROOT_OPTIONS: &CStr = c"noinit_itable";
const SAFE: MountFlags = MountFlags::NOSUID
    .union(MountFlags::NODEV)
    .union(MountFlags::NOEXEC);
const DEVICES: MountFlags = MountFlags::NOSUID.union(MountFlags::NOEXEC);

/// One mount: source and type, folder below the root, flags, options.
struct Mount {
    kind: &'static str,
    folder: &'static str,
    flags: MountFlags,
    options: &'static str,
    required: bool,
}

const MOUNTS: [Mount; 7] = [
    Mount {
        kind: "proc",
        folder: "proc",
        flags: SAFE,
        options: "",
        required: true,
    },
    Mount {
        kind: "sysfs",
        folder: "sys",
        flags: SAFE,
        options: "",
        required: true,
    },
    Mount {
        kind: "devtmpfs",
        folder: "dev",
        flags: DEVICES,
        options: "mode=0755",
        required: true,
    },
    Mount {
        kind: "devpts",
        folder: "dev/pts",
        flags: DEVICES,
        options: "newinstance,ptmxmode=0666,mode=0620,gid=5",
        required: true,
    },
    Mount {
        kind: "tmpfs",
        folder: "dev/shm",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        options: "mode=1777",
        required: true,
    },
    Mount {
        kind: "tmpfs",
        folder: "run",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        options: "mode=0755",
        required: true,
    },
    // A kernel without cgroup2 still runs commands; trees are then killed by walking /proc.
    Mount {
        kind: "cgroup2",
        folder: "sys/fs/cgroup",
        flags: SAFE,
        options: "",
        required: false,
    },
];

fn make_folder(path: &Path, mode: u32) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(mode).create(path)
}

/// What the initramfs itself needs: /proc, /sys, /dev.
pub fn mount_early() -> Result<(), BootError> {
    for entry in &MOUNTS[..3] {
        let target = Path::new("/").join(entry.folder);
        let step = || format!("mount {} on {}", entry.kind, target.display());
        make_folder(&target, 0o755).step(step())?;
        match mount(entry.kind, &target, entry.kind, entry.flags, None) {
            // The kernel may have mounted it by itself.
            Ok(()) | Err(rustix::io::Errno::BUSY) => {}
            Err(error) => return Err(BootError::new(step(), error)),
        }
    }
    Ok(())
}

/// Mounts the root device, fills in the system's own mounts and makes it the root of everything.
pub fn enter_root(settings: &BootSettings) -> Result<(), BootError> {
    wait_for(Path::new(&settings.root))?;
    make_folder(Path::new(NEW_ROOT), 0o755).step("make the mount point of the root")?;
    mount(
        settings.root.as_str(),
        NEW_ROOT,
        settings.rootfs.as_str(),
        MountFlags::NOATIME,
        (settings.rootfs == "ext4").then_some(ROOT_OPTIONS),
    )
    .step(format!("mount {} as {}", settings.root, settings.rootfs))?;
    for entry in &MOUNTS {
        mount_in_root(entry)?;
    }
    link_devices(Path::new(NEW_ROOT));
    free_initramfs();
    rustix::process::chdir(NEW_ROOT).step("enter the root")?;
    mount_move(".", "/").step("move the root")?;
    rustix::process::chroot(".").step("change the root")?;
    rustix::process::chdir("/").step("enter the root")?;
    make_temporary(Path::new("/tmp")).step("make /tmp")
}

/// Images may lack it, or have a link there that leads nowhere.
fn make_temporary(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if fs::symlink_metadata(path).is_ok_and(|info| !info.is_dir()) {
        fs::remove_file(path)?;
    }
    fs::create_dir(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o1777))
}

fn mount_in_root(entry: &Mount) -> Result<(), BootError> {
    let target = Path::new(NEW_ROOT).join(entry.folder);
    let name = format!("mount {} on /{}", entry.kind, entry.folder);
    // A link of the image (such as /run -> /var/run) must not lead the mount elsewhere.
    if fs::symlink_metadata(&target).is_ok_and(|info| info.is_symlink()) {
        fs::remove_file(&target).step(name.clone())?;
    }
    let options = std::ffi::CString::new(entry.options).step(name.clone())?;
    let mounted = make_folder(&target, 0o755).and_then(|()| {
        Ok(mount(
            entry.kind,
            &target,
            entry.kind,
            entry.flags,
            Some(options.as_c_str()),
        )?)
    });
    match mounted {
        Err(error) if entry.required => Err(BootError::new(name, error)),
        Err(error) => {
            say(&format!("{name}: {error} (going on without)"));
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

fn wait_for(device: &Path) -> Result<(), BootError> {
    let deadline = Instant::now() + ROOT_DEVICE_WAIT;
    while !device.exists() {
        if Instant::now() >= deadline {
            let hint = "is its driver in /modules/load, and does aenv.root name the right device?";
            return Err(BootError::new(
                format!("wait for {}", device.display()),
                format!("not there after {} s; {hint}", ROOT_DEVICE_WAIT.as_secs()),
            ));
        }
        std::thread::sleep(ROOT_DEVICE_POLL);
    }
    Ok(())
}

/// Names that programs expect in /dev and udev would make.
fn link_devices(root: &Path) {
    let links = [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ];
    for (name, target) in links {
        // The device file system outlives a failed boot step, so a link may be there already.
        let _exists = std::os::unix::fs::symlink(target, root.join("dev").join(name));
    }
}

/// Deletes the files of the initramfs: they are memory, and memory is part of every snapshot.
fn free_initramfs() {
    let Ok(device) = fs::metadata("/").map(|info| info.dev()) else {
        return;
    };
    for entry in fs::read_dir("/").into_iter().flatten().flatten() {
        let path = entry.path();
        // Only what lies on the initramfs itself; mounts are other devices.
        let Ok(info) = fs::symlink_metadata(&path) else {
            continue;
        };
        if info.dev() != device {
            continue;
        }
        let removed = if info.is_dir() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        if let Err(error) = removed {
            say(&format!("free {}: {error}", path.display()));
        }
    }
}
