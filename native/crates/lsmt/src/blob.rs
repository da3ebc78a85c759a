//! Where a layer's bytes come from.
//!
//! [`Blob`] is the seam between the LSMT reader and its storage: a plain file, a
//! part of one, the content of a compressed one, or a remote reader. A blob is
//! immutable while it is open. [`Opener`] picks the readers by the first bytes of
//! the file: tar around ZFile around LSMT, the outer two as they are there.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use thiserror::Error;

use crate::block_cache::{BlockCache, FileKey};
use crate::mapping::Mapping;
use crate::tar_wrapper::{self, TarError};
use crate::zfile::codec::Decoders;
use crate::zfile::{self, ZFileBlob, ZFileError};

/// Bytes that tell the kind of a file.
const START_BYTES: u64 = 512;

/// Why a file could not be used as a blob.
#[derive(Debug, Error)]
pub enum BlobError {
    /// The operating system refused.
    #[error("cannot open: {0}")]
    Io(#[from] io::Error),
    /// The compressed wrapper is damaged or of an unknown kind.
    #[error("ZFile: {0}")]
    ZFile(#[from] ZFileError),
    /// The tar wrapper is damaged.
    #[error("{0}")]
    Tar(#[from] TarError),
}

impl BlobError {
    /// Whether wrong bytes are the cause, and not a failed read.
    fn is_damage(&self) -> bool {
        let io_error = match self {
            BlobError::Io(error)
            | BlobError::Tar(TarError::Headers(error))
            | BlobError::ZFile(ZFileError::Io(error)) => error,
            _ => return true,
        };
        !matches!(
            io_error.kind(),
            io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound | io::ErrorKind::TimedOut
        )
    }
}

/// Random access to immutable bytes; reads may run at the same time.
pub trait Blob: Send + Sync {
    /// Size of the blob.
    fn size_bytes(&self) -> u64;

    /// Fills `buffer` from byte `offset`. A short blob is an `UnexpectedEof`
    /// error, never a silently short read.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// The bytes where the page cache has them, if the blob can show them: to name to
    /// a system call, which fails with `EFAULT` should the file have been cut short.
    /// Touching them here would then end the process.
    fn in_place(&self, _offset: u64, _length_bytes: u64) -> Option<&[u8]> {
        None
    }

    /// The file that has these bytes, and from which of its bytes on, if one has them as
    /// they are.
    fn in_file(&self, _offset: u64, _length_bytes: u64) -> Option<(BorrowedFd<'_>, u64)> {
        None
    }

    /// What was just read there proved wrong. A blob that reads from copies drops
    /// them and returns true: reading again may give other bytes.
    fn distrust(&self, _offset: u64, _length_bytes: u64) -> bool {
        false
    }

    /// Whether a read may have to wait for another machine.
    fn may_wait(&self) -> bool {
        false
    }
}

/// Where the content of files is that only say where it is.
pub trait Elsewhere: Send + Sync {
    /// The content, and the key for it in the cache, if the file at `path` is of that
    /// kind by its first bytes.
    fn open(&self, path: &Path, start: &[u8]) -> io::Result<Option<(Arc<dyn Blob>, FileKey)>>;
}

/// A blob that is a plain file.
pub struct FileBlob {
    file: File,
    size_bytes: u64,
    /// Made when first asked for; `None` when the system refuses.
    mapping: OnceLock<Option<Mapping>>,
}

impl FileBlob {
    /// Wraps an open file, whose present size is the blob's size.
    pub fn new(file: File) -> io::Result<FileBlob> {
        let size_bytes = file.metadata()?.len();
        Ok(FileBlob {
            file,
            size_bytes,
            mapping: OnceLock::new(),
        })
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

    fn in_place(&self, offset: u64, length_bytes: u64) -> Option<&[u8]> {
        let mapping = self.mapping.get_or_init(|| Mapping::of(&self.file).ok());
        mapping.as_ref()?.part(offset, length_bytes)
    }

    fn in_file(&self, offset: u64, length_bytes: u64) -> Option<(BorrowedFd<'_>, u64)> {
        let end = offset.checked_add(length_bytes)?;
        (end <= self.size_bytes).then(|| (self.file.as_fd(), offset))
    }
}

/// A part of another blob. Nothing outside of it can be read.
pub struct Window {
    inner: Arc<dyn Blob>,
    offset: u64,
    size_bytes: u64,
}

impl Blob for Window {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.size_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.inner.read_exact_at(buffer, self.offset + offset)
    }

    fn in_place(&self, offset: u64, length_bytes: u64) -> Option<&[u8]> {
        let end = offset.checked_add(length_bytes)?;
        let start = self.offset.checked_add(offset)?;
        (end <= self.size_bytes).then(|| self.inner.in_place(start, length_bytes))?
    }

    fn in_file(&self, offset: u64, length_bytes: u64) -> Option<(BorrowedFd<'_>, u64)> {
        let end = offset.checked_add(length_bytes)?;
        let start = self.offset.checked_add(offset)?;
        (end <= self.size_bytes).then(|| self.inner.in_file(start, length_bytes))?
    }

    fn distrust(&self, offset: u64, length_bytes: u64) -> bool {
        self.inner.distrust(self.offset + offset, length_bytes)
    }

    fn may_wait(&self) -> bool {
        self.inner.may_wait()
    }
}

/// What lies around the bytes of a layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wrapping {
    /// The layer is the content of a tar archive's file, which starts here.
    pub tar_offset: Option<u64>,
    /// The layer is compressed.
    pub zfile: Option<zfile::format::Head>,
}

/// Opens the files of layers. Clones share one cache of decompressed blocks.
#[derive(Clone, Default)]
pub struct Opener {
    cache: Arc<BlockCache>,
    decoders: Arc<Decoders>,
    elsewhere: Option<Arc<dyn Elsewhere>>,
}

impl Opener {
    /// An opener whose files share a cache of `cache_bytes`.
    pub fn new(cache_bytes: u64) -> Opener {
        Opener {
            cache: Arc::new(BlockCache::new(cache_bytes)),
            ..Opener::default()
        }
    }

    /// The same opener, which also opens files whose content is elsewhere.
    pub fn with_elsewhere(self, elsewhere: Arc<dyn Elsewhere>) -> Opener {
        Opener {
            elsewhere: Some(elsewhere),
            ..self
        }
    }

    /// The shared cache.
    pub fn cache(&self) -> &BlockCache {
        &self.cache
    }

    /// Opens a local file.
    pub fn open(&self, path: &Path) -> Result<(Arc<dyn Blob>, Wrapping), BlobError> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            let message = "not a regular file";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message).into());
        }
        let key = FileKey::of(&metadata);
        let blob = FileBlob::new(file)?;
        if let Some(elsewhere) = &self.elsewhere {
            if let Some((blob, key)) = elsewhere.open(path, &read_start(&blob)?)? {
                return self.unwrap(blob, key);
            }
        }
        self.unwrap(Arc::new(blob), key)
    }

    /// Takes the wrappers off any blob. `key` stands for its bytes in the cache
    /// (see [`BlockCache::fresh_key`]).
    pub fn unwrap(
        &self,
        blob: Arc<dyn Blob>,
        key: FileKey,
    ) -> Result<(Arc<dyn Blob>, Wrapping), BlobError> {
        match self.unwrap_once(&blob, key) {
            // A copy that went bad must not keep the layer from opening for good.
            Err(error) if error.is_damage() && blob.distrust(0, blob.size_bytes()) => {
                self.unwrap_once(&blob, key)
            }
            result => result,
        }
    }

    fn unwrap_once(
        &self,
        blob: &Arc<dyn Blob>,
        key: FileKey,
    ) -> Result<(Arc<dyn Blob>, Wrapping), BlobError> {
        let mut blob = blob.clone();
        let mut wrapping = Wrapping::default();
        let start = read_start(blob.as_ref())?;
        if let Some((offset, size_bytes)) = tar_wrapper::payload(blob.as_ref(), &start)? {
            wrapping.tar_offset = Some(offset);
            blob = Arc::new(Window {
                inner: blob,
                offset,
                size_bytes,
            });
        }
        if zfile::is_zfile(&read_start(blob.as_ref())?) {
            let (decoders, cache) = (self.decoders.clone(), self.cache.clone());
            let zfile = ZFileBlob::open(blob, decoders, cache, key)?;
            wrapping.zfile = Some(zfile.head().clone());
            blob = Arc::new(zfile);
        }
        Ok((blob, wrapping))
    }
}

fn read_start(blob: &dyn Blob) -> io::Result<Vec<u8>> {
    let mut start = vec![0; blob.size_bytes().min(START_BYTES) as usize];
    blob.read_exact_at(&mut start, 0)?;
    Ok(start)
}
