//! Which file systems a watch is of use on, by the type `statfs` reports.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

/// File systems other machines or programs change behind the kernel's back. The last hexadecimal digits
/// of each are its magic number in the kernel's headers.
const NETWORK: [(u32, &str); 9] = [
    (0x6969, "nfs"),
    (0x517b, "smb"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "smb2"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "ceph"),
    (0x5346_414f, "afs"),
    (0x6b41_4653, "afs"),
];

/// File systems made up by the kernel, which report hardly anything and are vast: proc, sysfs, cgroup,
/// cgroup2, debugfs, tracefs, securityfs, bpf, devpts.
const KERNEL: [u32; 9] = [
    0x9fa0,
    0x6265_6572,
    0x0027_e0eb,
    0x6367_7270,
    0x6462_6720,
    0x7472_6163,
    0x7363_6673,
    0xcafe_4a11,
    0x1cd1,
];

/// Name of the network file system a path is on, or None for a local one.
pub fn network_kind(path: &Path) -> io::Result<Option<&'static str>> {
    Ok(network_name(magic(path)?))
}

/// Whether a mount found below a watched folder is watched too.
pub fn is_of_use(path: &Path, allow_network: bool) -> io::Result<bool> {
    let magic = magic(path)?;
    Ok(!KERNEL.contains(&magic) && (allow_network || network_name(magic).is_none()))
}

/// Whether an open file is made up by the kernel, so that its size means nothing.
pub fn is_made_up(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|info| KERNEL.contains(&(info.f_type as u32)))
}

fn magic(path: &Path) -> io::Result<u32> {
    // All magic numbers have 32 bits; the field is wider and signed on some architectures.
    Ok(rustix::fs::statfs(path)?.f_type as u32)
}

fn network_name(magic: u32) -> Option<&'static str> {
    NETWORK
        .iter()
        .find(|(known, _)| *known == magic)
        .map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_by_magic_number() {
        // From linux/magic.h and the file systems' own headers.
        assert_eq!(network_name(libc::NFS_SUPER_MAGIC as u32), Some("nfs"));
        assert_eq!(network_name(libc::SMB_SUPER_MAGIC as u32), Some("smb"));
        assert_eq!(network_name(libc::FUSE_SUPER_MAGIC as u32), Some("fuse"));
        assert_eq!(network_name(libc::AFS_SUPER_MAGIC as u32), Some("afs"));
        assert_eq!(network_name(libc::EXT4_SUPER_MAGIC as u32), None);
        assert_eq!(network_name(libc::TMPFS_MAGIC as u32), None);
        for magic in [
            libc::PROC_SUPER_MAGIC,
            libc::SYSFS_MAGIC,
            libc::CGROUP2_SUPER_MAGIC,
            libc::CGROUP_SUPER_MAGIC,
            libc::DEBUGFS_MAGIC,
            libc::TRACEFS_MAGIC,
            libc::SECURITYFS_MAGIC,
            libc::BPF_FS_MAGIC,
        ] {
            assert!(KERNEL.contains(&(magic as u32)), "{magic:x}");
        }
    }

    #[test]
    fn the_running_system() {
        assert!(!is_of_use(Path::new("/proc"), true).unwrap());
        assert!(network_kind(Path::new("/no/such/path")).is_err());
        assert_eq!(network_kind(Path::new("/proc")).unwrap(), None);
    }
}
