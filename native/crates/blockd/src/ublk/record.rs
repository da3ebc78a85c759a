//! What a killed daemon's successor must know of its devices.
//!
//! ```text
//! <state>/<boot id>/<stack id>.json     a [`Record`]
//! <state>/<boot id>/journals/           of the uppers (see lsmt)
//! ```
//!
//! Folders of other boots hold nothing that is true any more, and are removed. A record
//! is written before the kernel or the files say the same, and says what is next.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::api::models::{OpenStack, Upper};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const SUFFIX: &str = ".json";

/// One device and its stack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Number of the device.
    pub device: u32,
    /// The stack as it is now.
    pub open: OpenStack,
    /// Its next upper, while a seal is under way.
    pub next_upper: Option<Upper>,
}

/// The records of one boot.
#[derive(Debug)]
pub struct Records {
    folder: PathBuf,
}

impl Records {
    /// Makes the folder of this boot, and removes those of others.
    pub fn open(state: &Path) -> io::Result<Records> {
        let boot_id = fs::read_to_string(BOOT_ID)?;
        let folder = state.join(boot_id.trim());
        fs::create_dir_all(folder.join("journals"))?;
        for entry in fs::read_dir(state)? {
            let path = entry?.path();
            if path != folder && path.is_dir() {
                fs::remove_dir_all(path)?;
            }
        }
        Ok(Records { folder })
    }

    /// Where journals are.
    pub fn journals(&self) -> PathBuf {
        self.folder.join("journals")
    }

    /// Writes or replaces a record. A kill on the way leaves the former one.
    pub fn write(&self, id: &str, record: &Record) -> io::Result<()> {
        let path = self.path(id);
        let fresh = path.with_extension("fresh");
        fs::write(&fresh, serde_json::to_vec(record)?)?;
        fs::rename(fresh, path)
    }

    /// Changes a record.
    pub fn change(&self, id: &str, change: impl FnOnce(&mut Record)) -> io::Result<()> {
        let mut record = serde_json::from_slice(&fs::read(self.path(id))?)?;
        change(&mut record);
        self.write(id, &record)
    }

    /// Removes a record. No error when there is none.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        match fs::remove_file(self.path(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All records, by stack. One that cannot be read is left out, after a word in the log.
    pub fn all(&self) -> io::Result<Vec<(String, Record)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let Some(id) = name.and_then(|name| name.strip_suffix(SUFFIX)) else {
                continue;
            };
            let read = fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?));
            match read {
                Ok(record) => found.push((id.to_owned(), record)),
                Err(error) => tracing::error!(id, %error, "the record of a device is unreadable"),
            }
        }
        Ok(found)
    }

    fn path(&self, id: &str) -> PathBuf {
        // Not by an extension: ids have dots.
        self.folder.join(format!("{id}{SUFFIX}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_other_boots_are_gone() {
        let state = tempfile::tempdir().unwrap();
        let old = state.path().join("another-boot");
        fs::create_dir_all(old.join("journals")).unwrap();
        fs::write(old.join("disk.json"), "{}").unwrap();
        let records = Records::open(state.path()).unwrap();
        assert!(!old.exists());
        let record = Record {
            device: 3,
            open: serde_json::from_str(r#"{"lowers": ["/a"]}"#).unwrap(),
            next_upper: None,
        };
        for id in ["disk", "disk.2"] {
            records.write(id, &record).unwrap();
        }
        fs::write(records.path("torn"), "{").unwrap();
        let again = Records::open(state.path()).unwrap();
        let mut ids: Vec<_> = again.all().unwrap().into_iter().map(|(id, _)| id).collect();
        ids.sort();
        assert_eq!(ids, ["disk", "disk.2"]);
        again.remove("disk").unwrap();
        again.remove("disk").unwrap();
        assert_eq!(again.all().unwrap(), [("disk.2".to_owned(), record)]);
    }
}
