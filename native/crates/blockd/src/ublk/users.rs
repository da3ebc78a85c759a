//! Who has a block device open: the kernel counts, but tells nobody.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Processes other than this one that have any of the devices open, or map it by its own
/// name. Looks at every process, so it is for rare moments.
pub fn processes(devices: &[PathBuf]) -> Vec<(PathBuf, i32)> {
    let wanted: Vec<(u64, &PathBuf)> = devices
        .iter()
        .filter_map(|path| Some((std::fs::metadata(path).ok()?.rdev(), path)))
        .collect();
    let own = std::process::id() as i32;
    let mut found = Vec::new();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.parse::<i32>().ok());
        let Some(pid) = pid.filter(|pid| *pid != own) else {
            continue;
        };
        let open = opened(&entry.path());
        let maps = std::fs::read_to_string(entry.path().join("maps")).unwrap_or_default();
        for (number, path) in &wanted {
            let name = path.to_string_lossy();
            if open.contains(number) || maps.lines().any(|line| line.ends_with(&*name)) {
                found.push(((*path).clone(), pid));
            }
        }
    }
    found
}

/// The block devices among the open files of a process.
fn opened(process: &Path) -> Vec<u64> {
    let files = std::fs::read_dir(process.join("fd")).into_iter().flatten();
    let files = files
        .flatten()
        .filter_map(|file| std::fs::metadata(file.path()).ok());
    files
        .filter(|metadata| metadata.file_type().is_block_device())
        .map(|metadata| metadata.rdev())
        .collect()
}
