//! A blob of a registry as something that can be read anywhere.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lsmt::{Blob, FileBlob};
use parking_lot::RwLock;

use crate::cache::{Cache, CachedBlob, BLOCK_BYTES};
use crate::error::RemoteError;
use crate::flight::{Flights, Landed, Turn};
use crate::source::{Source, MAX_RANGE_BYTES};

/// Blocks fetched together when one is missing: a neighbour is likely needed next.
const WINDOW_BLOCKS: u64 = 4;
/// Bytes of a window.
pub const WINDOW_BYTES: u64 = WINDOW_BLOCKS * BLOCK_BYTES as u64;
/// Windows fetched by one request, at most.
const MAX_RUN: u64 = MAX_RANGE_BYTES / WINDOW_BYTES;
/// How long a read tries before it fails.
const READ_PATIENCE: Duration = Duration::from_secs(60);
/// The same for a new blob: somebody waits for the layer to open.
const OPEN_PATIENCE: Duration = Duration::from_secs(20);
/// How long a blob is new.
const OPEN_TIME: Duration = Duration::from_secs(30);

/// One blob; shared by all who read it.
pub struct RemoteBlob {
    source: Source,
    cache: Arc<Cache>,
    cached: Arc<CachedBlob>,
    flights: Flights,
    local: RwLock<Option<Arc<FileBlob>>>,
    made_at: Instant,
    fetched_bytes: AtomicU64,
}

impl RemoteBlob {
    /// A blob that is read through the cache.
    pub fn new(source: Source, cache: Arc<Cache>, digest: [u8; 32]) -> io::Result<RemoteBlob> {
        let cached = cache.blob(digest, source.stub().size_bytes)?;
        Ok(RemoteBlob {
            source,
            cache,
            cached,
            flights: Flights::default(),
            local: RwLock::default(),
            made_at: Instant::now(),
            fetched_bytes: AtomicU64::new(0),
        })
    }

    /// Where it comes from.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Bytes that came from the registry so far.
    pub fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::Relaxed)
    }

    /// Whether all of it is on this machine.
    pub fn is_local(&self) -> bool {
        self.local.read().is_some()
    }

    /// Reads from a complete and checked file from now on.
    pub fn set_local(&self, file: File) -> io::Result<()> {
        let blob = FileBlob::new(file)?;
        if blob.size_bytes() != self.size_bytes() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        *self.local.write() = Some(Arc::new(blob));
        self.cache.forget(&self.cached);
        Ok(())
    }

    /// Reads what the cache has of a range without keeping more of it: for a reader
    /// that passes through once.
    pub fn read_once(&self, range: Range<u64>) -> Result<Vec<u8>, RemoteError> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let blocks =
            range.start / u64::from(BLOCK_BYTES)..range.end.div_ceil(u64::from(BLOCK_BYTES));
        if blocks
            .clone()
            .all(|block| self.copy_block(block, &range, &mut bytes))
        {
            return Ok(bytes);
        }
        self.fetched_bytes
            .fetch_add(range.end - range.start, Ordering::Relaxed);
        self.source.read(range, READ_PATIENCE)
    }

    /// Copies the part of a cached block that lies in the range.
    fn copy_block(&self, block: u64, range: &Range<u64>, buffer: &mut [u8]) -> bool {
        let start = block * u64::from(BLOCK_BYTES);
        let length = self.cached.length_of(block);
        let end = start + length as u64;
        if range.start <= start && end <= range.end {
            let from = (start - range.start) as usize;
            return self.cached.get(block, &mut buffer[from..from + length]);
        }
        let mut content = vec![0; length];
        if !self.cached.get(block, &mut content) {
            return false;
        }
        copy_part(start, &content, range, buffer);
        true
    }

    fn window_range(&self, windows: Range<u64>) -> Range<u64> {
        windows.start * WINDOW_BYTES..self.size_bytes().min(windows.end * WINDOW_BYTES)
    }

    fn blocks_in(&self, window: u64, range: &Range<u64>) -> Range<u64> {
        let bounds = self.window_range(window..window + 1);
        let start = bounds.start.max(range.start) / u64::from(BLOCK_BYTES);
        start..bounds.end.min(range.end).div_ceil(u64::from(BLOCK_BYTES))
    }

    /// Fills the part of `buffer` that lies in a window.
    fn read_window(
        &self,
        window: u64,
        range: &Range<u64>,
        buffer: &mut [u8],
    ) -> Result<(), RemoteError> {
        let from_cache = |buffer: &mut [u8]| {
            self.blocks_in(window, range)
                .all(|block| self.copy_block(block, range, buffer))
        };
        if from_cache(buffer) {
            return Ok(());
        }
        let last = (range.end - 1) / WINDOW_BYTES;
        let wanted =
            |next: u64| next <= last && next < window + MAX_RUN && !self.has_all(next, range);
        let windows = match self.flights.take(window, wanted) {
            Turn::Wait(flight) => {
                let content = flight.wait()?;
                copy_part(window * WINDOW_BYTES, &content, range, buffer);
                return Ok(());
            }
            Turn::Ask(windows) => windows,
        };
        let first = self.fetch(windows)?;
        copy_part(window * WINDOW_BYTES, &first, range, buffer);
        Ok(())
    }

    fn has_all(&self, window: u64, range: &Range<u64>) -> bool {
        self.blocks_in(window, range)
            .all(|block| self.cached.contains(block))
    }

    /// Fetches windows that this caller has taken, keeps and hands them on; returns
    /// the first.
    fn fetch(&self, windows: Range<u64>) -> Landed {
        let is_new = self.made_at.elapsed() < OPEN_TIME;
        let patience = if is_new { OPEN_PATIENCE } else { READ_PATIENCE };
        let range = self.window_range(windows.clone());
        // Somebody may have brought the first one between the look and the turn.
        let fetched = match self.cached_window(windows.start) {
            Some(content) if windows.end == windows.start + 1 => Ok(content),
            _ => {
                self.fetched_bytes
                    .fetch_add(range.end - range.start, Ordering::Relaxed);
                self.source.read(range, patience)
            }
        };
        let bytes = match fetched {
            Ok(bytes) => bytes,
            Err(error) => {
                windows.for_each(|window| self.flights.land(window, Err(error.clone())));
                return Err(error);
            }
        };
        let mut first = None;
        for (window, content) in windows.zip(bytes.chunks(WINDOW_BYTES as usize)) {
            for (number, block) in content.chunks(BLOCK_BYTES as usize).enumerate() {
                self.cache
                    .put(&self.cached, window * WINDOW_BLOCKS + number as u64, block);
            }
            let content = Arc::new(content.to_vec());
            first.get_or_insert_with(|| content.clone());
            self.flights.land(window, Ok(content));
        }
        Ok(first.unwrap_or_default())
    }

    fn cached_window(&self, window: u64) -> Option<Vec<u8>> {
        let range = self.window_range(window..window + 1);
        let mut content = vec![0; (range.end - range.start) as usize];
        let mut blocks = self.blocks_in(window, &range);
        blocks
            .all(|block| self.copy_block(block, &range, &mut content))
            .then_some(content)
    }
}

/// Copies what of `content`, which starts at `start`, lies in the range.
fn copy_part(start: u64, content: &[u8], range: &Range<u64>, buffer: &mut [u8]) {
    let from = start.max(range.start);
    let to = range.end.min(start + content.len() as u64);
    if from < to {
        let part = &content[(from - start) as usize..(to - start) as usize];
        buffer[(from - range.start) as usize..(to - range.start) as usize].copy_from_slice(part);
    }
}

impl Blob for RemoteBlob {
    fn size_bytes(&self) -> u64 {
        self.source.stub().size_bytes
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        let Some(end) = end.filter(|end| *end <= self.size_bytes()) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        if buffer.is_empty() {
            return Ok(());
        }
        let local = self.local.read().clone();
        if let Some(file) = local {
            return file.read_exact_at(buffer, offset);
        }
        let range = offset..end;
        for window in offset / WINDOW_BYTES..=(end - 1) / WINDOW_BYTES {
            self.read_window(window, &range, buffer)?;
        }
        Ok(())
    }

    fn distrust(&self, offset: u64, length_bytes: u64) -> bool {
        if self.is_local() {
            return false;
        }
        let end = offset.saturating_add(length_bytes).min(self.size_bytes());
        let blocks = offset / u64::from(BLOCK_BYTES)..end.div_ceil(u64::from(BLOCK_BYTES));
        blocks.for_each(|block| {
            self.cached.distrust(block);
        });
        true
    }

    fn may_wait(&self) -> bool {
        !self.is_local()
    }
}
