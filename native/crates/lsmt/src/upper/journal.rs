//! Records that no flush has made durable yet, kept where they outlive the process.
//!
//! A guest whose disk goes on after its server was killed (ublk) never learns that there
//! was a kill, so every write it was told of must be there, flushed or not. The data is:
//! it went to the kernel. Its record is in this file, in a folder that lasts as long as
//! the kernel's memory does and no longer: after a crash of the machine data may be
//! missing that a journal names.
//!
//! The file is the records of [`Segment`], 16 bytes each, in the order of the writes. It
//! may name some that a flush has written, too: played over the log from any such place
//! on to the end, they lead to the same map. A torn last record was never confirmed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::format::{encode_entries, Segment, ENTRY_BYTES, FIRST_DATA_SECTOR, INVALID_SECTOR};

/// The journal of one upper.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Journal {
    /// Opens, or begins, the journal of the upper with that identity; what it holds is in
    /// the order of the writes.
    pub fn open(folder: &Path, uuid: &str) -> io::Result<(Journal, Vec<Segment>)> {
        let path = folder.join(format!("{}.journal", uuid.to_lowercase()));
        let file = create(&path, false)?;
        let size_bytes = file.metadata()?.len();
        let whole_bytes = size_bytes / ENTRY_BYTES as u64 * ENTRY_BYTES as u64;
        let mut bytes = vec![0; whole_bytes as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let records = bytes.chunks_exact(ENTRY_BYTES).map(|raw| {
            let mut word = [0; ENTRY_BYTES];
            word.copy_from_slice(raw);
            check(Segment::decode(&word))
        });
        let records = records.collect::<io::Result<_>>()?;
        let journal = Journal {
            path,
            file,
            bytes: whole_bytes,
        };
        Ok((journal, records))
    }

    /// Adds a record. On failure the journal is as before.
    pub fn append(&mut self, record: &Segment) -> io::Result<()> {
        self.file.write_all_at(&record.encode(), self.bytes)?;
        self.bytes += ENTRY_BYTES as u64;
        Ok(())
    }

    /// Keeps these records only. A kill on the way leaves the former ones.
    pub fn restart(&mut self, records: &[Segment]) -> io::Result<()> {
        if records.is_empty() {
            self.file.set_len(0)?;
            self.bytes = 0;
            return Ok(());
        }
        let fresh_path = self.path.with_extension("fresh");
        let fresh = create(&fresh_path, true)?;
        fresh.write_all_at(&encode_entries(records), 0)?;
        std::fs::rename(&fresh_path, &self.path)?;
        self.file = fresh;
        self.bytes = (records.len() * ENTRY_BYTES) as u64;
        Ok(())
    }

    /// Removes the file: nothing is in it that would be missed.
    pub fn remove(self) {
        // Best effort: it is named after an upper that is not opened for writing again, or
        // that has every record of it.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn create(path: &Path, truncate: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true);
    options.truncate(truncate).open(path)
}

fn check(record: Segment) -> io::Result<Segment> {
    let is_good = record.length() > 0
        && record.end() <= INVALID_SECTOR
        && record.moffset() >= FIRST_DATA_SECTOR;
    if is_good {
        return Ok(record);
    }
    let message = "the journal holds a record that was never written";
    Err(io::Error::new(io::ErrorKind::InvalidData, message))
}
