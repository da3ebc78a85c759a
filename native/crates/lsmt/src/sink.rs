//! Where the bytes of a layer being written go: plain, compressed, or wrapped in
//! a tar archive, by one appending interface.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::tar_wrapper;
use crate::zfile::writer::{Compression, Encoder};

/// What to wrap around a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Encoding {
    /// Compress it; plain otherwise.
    pub compression: Option<Compression>,
    /// Make it the content of a tar archive, as layers of OCI images are.
    pub tar: bool,
}

/// A file that a layer is appended to.
pub(crate) struct Sink {
    file: File,
    /// First byte after the tar headers.
    start: u64,
    /// Where plain bytes go next.
    position: u64,
    encoder: Option<Encoder>,
}

impl Sink {
    /// Writes to an empty file.
    pub(crate) fn new(file: File, encoding: &Encoding) -> Sink {
        let start = if encoding.tar {
            tar_wrapper::HEADERS_BYTES as u64
        } else {
            0
        };
        let compression = encoding.compression;
        Sink {
            file,
            start,
            position: start,
            encoder: compression.map(|compression| Encoder::new(compression, start)),
        }
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(encoder) = &mut self.encoder {
            return encoder.append(&self.file, bytes);
        }
        self.file.write_all_at(bytes, self.position)?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    /// Completes the wrappers; returns the size of the file.
    pub(crate) fn finish(&mut self, sync: bool) -> io::Result<u64> {
        if let Some(encoder) = self.encoder.take() {
            self.position = encoder.finish(&self.file)?;
        }
        if self.start > 0 {
            let headers = tar_wrapper::headers(self.position - self.start)?;
            let end = tar_wrapper::end(self.position - self.start);
            self.file.write_all_at(&end, self.position)?;
            self.position += end.len() as u64;
            self.file.write_all_at(&headers, 0)?;
        }
        if sync {
            self.file.sync_all()?;
        }
        Ok(self.position)
    }
}
