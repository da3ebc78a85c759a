//! The layer as it comes in: decompressed by what its first bytes say, counted and checksummed on the way.

use std::cell::RefCell;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use sha2::{Digest, Sha256};

const BUFFER_BYTES: usize = 1 << 20;
/// Largest window a frame may ask for: 128 MiB, as zstd's own tools have it.
const WINDOW_LOG_MAX: u32 = 27;
/// Below this much output the ratio says nothing.
const RATIO_FROM_BYTES: u64 = 64 << 20;

/// What a layer may unpack to.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of the archive, decompressed.
    pub bytes: u64,
    /// Decompressed bytes for each compressed one.
    pub ratio: u64,
}

/// Bytes and checksum of a stream so far. Of a plain archive only the inner one is taken: both are the same.
pub struct Tally {
    /// Bytes read.
    pub bytes: u64,
    digest: Option<Sha256>,
}

impl Tally {
    fn shared(hashes: bool) -> SharedTally {
        Rc::new(RefCell::new(Tally {
            bytes: 0,
            digest: hashes.then(Sha256::new),
        }))
    }

    fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        if let Some(digest) = &mut self.digest {
            digest.update(bytes);
        }
    }

    /// The checksum as OCI writes it; empty when none is taken.
    pub fn digest(&self) -> String {
        let Some(digest) = &self.digest else {
            return String::new();
        };
        let digest = digest.clone().finalize();
        let hex: Vec<String> = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("sha256:{}", hex.concat())
    }
}

/// A shared tally.
pub type SharedTally = Rc<RefCell<Tally>>;

struct Counted<R> {
    stream: R,
    tally: SharedTally,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(buffer)?;
        self.tally.borrow_mut().add(&buffer[..count]);
        Ok(count)
    }
}

/// The decompressed layer.
pub struct Source {
    stream: Box<dyn Read>,
    /// Of the compressed bytes.
    pub outer: SharedTally,
    /// Of the decompressed bytes.
    pub inner: SharedTally,
    limits: Limits,
}

impl Source {
    /// Looks at the first bytes of `input` to tell gzip, zstd and plain archives apart.
    pub fn open(input: impl Read + 'static, limits: Limits) -> io::Result<Source> {
        let mut input = BufReader::with_capacity(BUFFER_BYTES, input);
        let is_gzip = input.fill_buf()?.starts_with(&[0x1f, 0x8b]);
        let is_zstd = input.buffer().starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
        let (outer, inner) = (Tally::shared(is_gzip || is_zstd), Tally::shared(true));
        let tally = Rc::clone(&outer);
        let stream = input;
        let counted = BufReader::with_capacity(BUFFER_BYTES, Counted { stream, tally });
        let stream: Box<dyn Read> = if is_gzip {
            Box::new(MultiGzDecoder::new(counted))
        } else if is_zstd {
            let mut decoder = zstd::Decoder::with_buffer(counted)?;
            decoder.window_log_max(WINDOW_LOG_MAX)?;
            Box::new(decoder)
        } else {
            Box::new(counted)
        };
        Ok(Source {
            stream,
            outer,
            inner,
            limits,
        })
    }

    /// The checksum of what came in.
    pub fn digest_of_input(outer: &SharedTally, inner: &SharedTally) -> String {
        let own = outer.borrow().digest();
        if own.is_empty() {
            return inner.borrow().digest();
        }
        own
    }

    fn check(&self, bytes: u64) -> io::Result<()> {
        let compressed = self.outer.borrow().bytes.max(1);
        if bytes > self.limits.bytes {
            return Err(Excess::Bytes(self.limits.bytes).into());
        }
        if bytes > RATIO_FROM_BYTES && bytes / compressed > self.limits.ratio {
            return Err(Excess::Ratio(self.limits.ratio).into());
        }
        Ok(())
    }
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(buffer)?;
        self.inner.borrow_mut().add(&buffer[..count]);
        let bytes = self.inner.borrow().bytes;
        self.check(bytes)?;
        Ok(count)
    }
}

/// A limit that the layer passes.
#[derive(Debug, Clone, Copy, thiserror::Error)]
pub enum Excess {
    /// Too large.
    #[error("it unpacks to more than {0} bytes")]
    Bytes(u64),
    /// Suspiciously well compressed.
    #[error("it unpacks to more than {0} times its size")]
    Ratio(u64),
    /// Too many members.
    #[error("it has more than {0} entries")]
    Entries(u64),
}

impl From<Excess> for io::Error {
    fn from(excess: Excess) -> io::Error {
        io::Error::other(excess)
    }
}
