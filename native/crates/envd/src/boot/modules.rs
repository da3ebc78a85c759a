//! Kernel modules of the initramfs: `/modules/load` names one file per line, in order of loading.

use std::fs::{self, File};
use std::path::Path;

use super::{BootError, Step};

/// Loads every listed module. No list means a kernel with everything built in.
pub fn load_listed(folder: &Path) -> Result<(), BootError> {
    let list = folder.join("load");
    if !list.exists() {
        return Ok(());
    }
    let text = fs::read_to_string(&list).step(format!("read {}", list.display()))?;
    for name in text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let step = || format!("load module {name}");
        let file = File::open(folder.join(name)).step(step())?;
        match rustix::system::finit_module(&file, c"", 0) {
            // Already there: built in or loaded before.
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(BootError::new(step(), error)),
        }
    }
    Ok(())
}
