//! Output files being written now: one writer each.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::error::{ApiError, Code};

/// The set of claimed outputs.
#[derive(Default)]
pub struct Outputs {
    claimed: Arc<Mutex<HashSet<PathBuf>>>,
}

/// One claimed output; dropped, it is free again.
pub struct Claim {
    path: PathBuf,
    claimed: Arc<Mutex<HashSet<PathBuf>>>,
}

impl Outputs {
    /// Claims an output, or says that another call is writing it.
    pub fn claim(&self, path: &Path) -> Result<Claim, ApiError> {
        if !self.claimed.lock().insert(path.to_owned()) {
            let message = format!("another call is writing {}", path.display());
            let hint = "wait for it, or choose another output";
            return Err(ApiError::new(Code::Busy, message, hint));
        }
        Ok(Claim {
            path: path.to_owned(),
            claimed: self.claimed.clone(),
        })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.claimed.lock().remove(&self.path);
    }
}
