//! Where a layer's bytes come from.
//!
//! [`Blob`] is the seam between the LSMT reader and its storage: a plain file
//! today, a decompressing or remote reader tomorrow. A blob is immutable while
//! it is open. [`open`] picks the reader by the first bytes of the file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

/// Why a file could not be used as a blob.
#[derive(Debug, Error)]
pub enum BlobError {
    /// The operating system refused.
    #[error("cannot open: {0}")]
    Io(#[from] io::Error),
    /// A wrapper this crate does not read.
    #[error("{kind} layers cannot be read directly; convert the layer to raw LSMT first")]
    Unsupported {
        /// Name of the wrapper format.
        kind: &'static str,
    },
}

/// Random access to immutable bytes; reads may run at the same time.
pub trait Blob: Send + Sync {
    /// Size of the blob.
    fn size_bytes(&self) -> u64;

    /// Fills `buffer` from byte `offset`. A short blob is an `UnexpectedEof`
    /// error, never a silently short read.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

/// A blob that is a plain file.
#[derive(Debug)]
pub struct FileBlob {
    file: File,
    size_bytes: u64,
}

impl FileBlob {
    /// Wraps an open file, whose present size is the blob's size.
    pub fn new(file: File) -> io::Result<FileBlob> {
        let size_bytes = file.metadata()?.len();
        Ok(FileBlob { file, size_bytes })
    }

    /// Makes the bytes durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

impl Blob for FileBlob {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}

/// Opens `path` as the blob of a layer.
pub fn open(path: &Path) -> Result<Arc<dyn Blob>, BlobError> {
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(BlobError::Io(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        )));
    }
    let blob = FileBlob::new(file)?;
    let mut start = [0; 512];
    let length = blob.size_bytes().min(512) as usize;
    blob.read_exact_at(&mut start[..length], 0)?;
    if start.starts_with(b"ZFile\0\x01\0") {
        return Err(BlobError::Unsupported { kind: "ZFile" });
    }
    if &start[257..262] == b"ustar" {
        return Err(BlobError::Unsupported {
            kind: "tar-wrapped",
        });
    }
    Ok(Arc::new(blob))
}
