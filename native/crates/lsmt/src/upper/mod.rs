//! The writable top of a stack.
//!
//! Three layouts, all of the format ([`UpperLayout`]): an append log of data plus a
//! log of records, which is the default; the same with overwrites in place; and a
//! sparse file without a log ([`sparse`]).
//!
//! Invariants (overlaybd spec 1.6 to 1.8):
//! - places of data are never used for anything else, so an extent once looked up
//!   stays readable, until [`Upper::free`] ends the place of superseded data: not
//!   before a flush has made durable what supersedes it, and not while anybody who
//!   may have looked it up still reads;
//! - a record enters the index file only after the data it names has been
//!   through `fdatasync`; until then it lives in memory;
//! - after a crash an append log opens to the state of the last completed flush,
//!   or to a later moment, never to a mix; what the other two were overwriting since
//!   then may read old, new or torn, as on any disk;
//! - one process holds the upper: its data file carries an exclusive lock.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use nix::fcntl::Flock;
use parking_lot::{Mutex, RwLock};

use crate::blob::FileBlob;
use crate::extents::ExtentMap;
use crate::format::{
    encode_entries, flags, new_uuid, Block, Segment, BLOCK_BYTES, ENTRY_BYTES, FIRST_DATA_SECTOR,
    MAX_ENTRY_SECTORS, MAX_LAYER_ENTRIES, SECTOR_BYTES,
};
use crate::layer::RoLayer;
use crate::sys;

mod error;
mod garbage;
mod journal;
mod log;
mod sparse;
mod write;

pub use error::UpperError;
use garbage::Garbage;
use journal::Journal;
use log::Replay;

/// Longest piece of one write: the entry limit rounded to whole 4 KiB pages, so
/// that pieces of an aligned write stay aligned.
pub(crate) const MAX_PIECE_SECTORS: u64 = MAX_ENTRY_SECTORS / 8 * 8;

/// How an upper is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UpperLayout {
    /// Every write is appended. Nothing is ever torn; overwrites leave garbage.
    #[default]
    Append,
    /// Overwrites go where the upper has the data already, all else is appended.
    Hybrid,
    /// Sector n at a fixed place of a sparse file.
    Sparse,
}

impl UpperLayout {
    fn flag(self) -> u32 {
        match self {
            UpperLayout::Append => 0,
            UpperLayout::Hybrid => flags::HYBRID,
            UpperLayout::Sparse => flags::SPARSE,
        }
    }

    fn of(header: &Block) -> UpperLayout {
        match header.flags & (flags::HYBRID | flags::SPARSE) {
            flags::SPARSE => UpperLayout::Sparse,
            flags::HYBRID => UpperLayout::Hybrid,
            _ => UpperLayout::Append,
        }
    }
}

/// Figures of an upper, all cheap to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpperStats {
    /// Bytes of the data file, header included.
    pub data_bytes: u64,
    /// Bytes of live data in it; the rest is overwritten garbage.
    pub mapped_bytes: u64,
    /// Records written or waiting to be written.
    pub records: u64,
}

struct LogState {
    map: ExtentMap,
    /// Sector at which the next data goes.
    data_end: u64,
    /// Records whose data may not be durable yet, oldest first.
    pending: Vec<Segment>,
    /// Records in the index file.
    written_records: u64,
    /// Records made since it was opened, and the ones it held then.
    made_records: u64,
    /// Data that `pending` supersedes.
    superseded: Garbage,
    /// Superseded for good, and not freed yet.
    garbage: Garbage,
    /// Where `pending` outlives the process, if it does.
    journal: Option<Journal>,
}

/// An open upper. All methods may be called from several threads.
pub struct Upper {
    data_path: PathBuf,
    index_path: PathBuf,
    data: Flock<File>,
    index: File,
    header: Block,
    layout: UpperLayout,
    dropped_bytes: u64,
    state: RwLock<LogState>,
    /// Good bytes of the index file; the lock also makes flushes one at a time.
    index_bytes: Mutex<u64>,
    /// Records that the index file has room for on its file system.
    index_room: AtomicU64,
    /// Data was overwritten in place since the last flush.
    is_dirty: AtomicBool,
    needs_directory_sync: AtomicBool,
    poisoned: AtomicBool,
}

impl Upper {
    /// Opens the upper, or creates it when neither file holds anything yet.
    ///
    /// All but the paths is used for a new upper only.
    pub fn open_or_create(
        data_path: &Path,
        index_path: &Path,
        layout: UpperLayout,
        virtual_size_bytes: u64,
        parent_uuid: &str,
    ) -> Result<Upper, UpperError> {
        if holds_nothing(data_path, index_path)? {
            Upper::create(
                data_path,
                index_path,
                layout,
                virtual_size_bytes,
                parent_uuid,
            )
        } else {
            Upper::open(data_path, index_path)
        }
    }

    /// Creates an empty upper. A failure removes both files again.
    fn create(
        data_path: &Path,
        index_path: &Path,
        layout: UpperLayout,
        virtual_size_bytes: u64,
        parent_uuid: &str,
    ) -> Result<Upper, UpperError> {
        let header = Block {
            flags: flags::HEADER | flags::DATA | layout.flag(),
            index_offset: 0,
            index_size: 0,
            virtual_size_bytes,
            uuid: new_uuid(),
            parent_uuid: parent_uuid.to_owned(),
            user_tag: String::new(),
        };
        let is_sparse = layout == UpperLayout::Sparse;
        if is_sparse && virtual_size_bytes == 0 {
            return Err(UpperError::NoSize {
                path: data_path.to_owned(),
            });
        }
        let data = lock(data_path, open_file(data_path, true)?)?;
        let index = open_file(index_path, true)?;
        let data_end = if is_sparse {
            sparse::data_end(virtual_size_bytes)
        } else {
            FIRST_DATA_SECTOR
        };
        let index_header = Block {
            flags: flags::HEADER | layout.flag(),
            index_offset: BLOCK_BYTES as u64,
            ..header.clone()
        };
        let write = |path, file: &File, block: &Block, size_bytes| {
            let result = file
                .set_len(0)
                .and_then(|()| file.write_all_at(&block.encode(), 0))
                .and_then(|()| file.set_len(size_bytes));
            result.map_err(|source| UpperError::io("create", path, source))
        };
        let written = write(data_path, &data, &header, data_end * SECTOR_BYTES)
            .and_then(|()| write(index_path, &index, &index_header, BLOCK_BYTES as u64));
        if let Err(error) = written {
            // Best effort: an empty pair left behind is created anew next time.
            let _ = std::fs::remove_file(data_path);
            let _ = std::fs::remove_file(index_path);
            return Err(error);
        }
        let replay = Replay {
            header,
            map: ExtentMap::default(),
            data_end,
            index_bytes: BLOCK_BYTES as u64,
            records: 0,
            dropped_bytes: 0,
        };
        Ok(Upper::assemble(
            data_path, index_path, data, index, replay, true,
        ))
    }

    /// Opens an upper for writing and repairs what a crash left (see
    /// [`Upper::dropped_bytes`]).
    pub fn open(data_path: &Path, index_path: &Path) -> Result<Upper, UpperError> {
        let data = lock(data_path, open_file(data_path, false)?)?;
        // A sparse upper needs no index file, so it may have none.
        let header = log::read_header(data_path, &data)?;
        let is_sparse = UpperLayout::of(&header) == UpperLayout::Sparse;
        let index = open_file(index_path, is_sparse)?;
        let replay = log::replay(data_path, &data, index_path, &index)?;
        if replay.dropped_bytes > 0 {
            // Durable before new data is appended: a record that pointed past the
            // end must not come back once the data file has grown over it.
            index
                .set_len(replay.index_bytes)
                .and_then(|()| index.sync_all())
                .map_err(|source| UpperError::io("truncate", index_path, source))?;
        }
        let upper = Upper::assemble(data_path, index_path, data, index, replay, false);
        // What the records supersede may be freed once they are durable, and after a
        // kill of the last user they may not be.
        if !is_sparse && upper.index.sync_data().is_ok() {
            let mut state = upper.state.write();
            state.garbage = Garbage::beside(&state.map, state.data_end);
        }
        Ok(upper)
    }

    /// Reads an upper without a lock and without repairing it: the map, and the
    /// data file to read from. A running writer may change it meanwhile.
    pub fn open_read_only(
        data_path: &Path,
        index_path: &Path,
    ) -> Result<(RoLayer, Vec<Segment>), UpperError> {
        let open = |path| File::open(path).map_err(|source| UpperError::io("open", path, source));
        let (data, index) = (open(data_path)?, open(index_path)?);
        let replay = log::replay(data_path, &data, index_path, &index)?;
        let blob =
            FileBlob::new(data).map_err(|source| UpperError::io("stat", data_path, source))?;
        let entries: Vec<Segment> = replay.map.iter().copied().collect();
        let header = Block {
            index_size: entries.len() as u64,
            ..replay.header
        };
        let layer = RoLayer::just_sealed(data_path, Arc::new(blob), header);
        Ok((layer, entries))
    }

    /// Replays the upper without changing it; returns the bytes of the index
    /// file that recovery would cut off.
    pub fn check(data_path: &Path, index_path: &Path) -> Result<u64, UpperError> {
        let open = |path| File::open(path).map_err(|source| UpperError::io("open", path, source));
        let (data, index) = (open(data_path)?, open(index_path)?);
        Ok(log::replay(data_path, &data, index_path, &index)?.dropped_bytes)
    }

    fn assemble(
        data_path: &Path,
        index_path: &Path,
        data: Flock<File>,
        index: File,
        replay: Replay,
        is_new: bool,
    ) -> Upper {
        Upper {
            data_path: data_path.to_owned(),
            index_path: index_path.to_owned(),
            data,
            index,
            layout: UpperLayout::of(&replay.header),
            header: replay.header,
            dropped_bytes: replay.dropped_bytes,
            state: RwLock::new(LogState {
                map: replay.map,
                data_end: replay.data_end,
                pending: Vec::new(),
                written_records: replay.records,
                made_records: replay.records,
                superseded: Garbage::default(),
                garbage: Garbage::default(),
                journal: None,
            }),
            index_bytes: Mutex::new(replay.index_bytes),
            index_room: AtomicU64::new(replay.records),
            is_dirty: AtomicBool::new(false),
            needs_directory_sync: AtomicBool::new(is_new),
            poisoned: AtomicBool::new(false),
        }
    }

    /// Keeps records that are not flushed yet in a journal in `folder`, and takes over what
    /// a process that was killed left there. `folder` must not outlive the kernel's memory
    /// of the data file. Before any other use of the upper.
    pub(crate) fn keep_journal(&self, folder: &Path) -> Result<(), UpperError> {
        if self.layout == UpperLayout::Sparse {
            return Ok(()); // every write is where it stays
        }
        let failed = |source| UpperError::io("use the journal of", &self.data_path, source);
        let (journal, records) = Journal::open(folder, &self.header.uuid).map_err(failed)?;
        let has_records = !records.is_empty();
        for record in records {
            if !record.is_zeroed() && record.mend() > self.state.read().data_end {
                let message = "the journal names data past the end of the file";
                return Err(failed(io::Error::new(io::ErrorKind::InvalidData, message)));
            }
            self.record(record)?;
        }
        self.state.write().journal = Some(journal);
        if has_records {
            self.flush()?;
            let mut state = self.state.write();
            state.garbage = Garbage::beside(&state.map, state.data_end);
        }
        Ok(())
    }

    /// Ends the journal: all is flushed, or sealed.
    pub(crate) fn end_journal(&self) {
        if let Some(journal) = self.state.write().journal.take() {
            journal.remove();
        }
    }

    /// The data file.
    pub fn data_path(&self) -> &Path {
        &self.data_path
    }

    /// The index file.
    pub fn index_path(&self) -> &Path {
        &self.index_path
    }

    /// Identity and size, as in the data file's header.
    pub fn header(&self) -> &Block {
        &self.header
    }

    /// How it is written.
    pub fn layout(&self) -> UpperLayout {
        self.layout
    }

    /// Writes must start and end at multiples of this, or at the disk's end.
    pub(crate) fn grain_bytes(&self) -> u64 {
        match self.layout {
            UpperLayout::Append | UpperLayout::Hybrid => SECTOR_BYTES,
            UpperLayout::Sparse => sparse::GRAIN_BYTES,
        }
    }

    /// States the size in both headers, for an upper that was made to inherit it.
    pub(crate) fn adopt_size(&mut self, virtual_size_bytes: u64) -> Result<u64, UpperError> {
        self.header.virtual_size_bytes = virtual_size_bytes;
        let index_header = Block {
            flags: self.header.flags & !flags::DATA,
            index_offset: BLOCK_BYTES as u64,
            ..self.header.clone()
        };
        let written = self.data.write_all_at(&self.header.encode(), 0);
        written.map_err(|source| UpperError::io("write", &self.data_path, source))?;
        let written = self.index.write_all_at(&index_header.encode(), 0);
        written.map_err(|source| UpperError::io("write", &self.index_path, source))?;
        Ok(virtual_size_bytes)
    }

    /// Bytes of the index file that recovery cut off at open; 0 after a clean stop.
    pub fn dropped_bytes(&self) -> u64 {
        self.dropped_bytes
    }

    /// Present figures.
    pub fn stats(&self) -> UpperStats {
        let state = self.state.read();
        UpperStats {
            data_bytes: state.data_end * SECTOR_BYTES,
            mapped_bytes: state.map.mapped_sectors() * SECTOR_BYTES,
            records: state.written_records + state.pending.len() as u64,
        }
    }

    /// Whether nothing was ever written.
    pub fn is_empty(&self) -> bool {
        self.state.read().map.is_empty()
    }

    /// Appends the segments that overlap `[start, end)` to `found`, clipped.
    pub(crate) fn lookup(&self, start: u64, end: u64, found: &mut Vec<Segment>) {
        let state = self.state.read();
        let overlapping = state.map.range(start, end);
        found.extend(overlapping.map(|segment| segment.clip(start, end)));
    }

    /// Whether it says anything about the sectors `[start, end)`.
    pub(crate) fn maps_any(&self, start: u64, end: u64) -> bool {
        self.state.read().map.range(start, end).next().is_some()
    }

    /// Reads data at a byte position of the data file.
    pub(crate) fn read_data(&self, buffer: &mut [u8], file_offset: u64) -> Result<(), UpperError> {
        self.data
            .read_exact_at(buffer, file_offset)
            .map_err(|source| UpperError::io("read", &self.data_path, source))
    }

    /// Makes everything written before the call durable: `fdatasync` of the
    /// data, then the records, then `fdatasync` of those. A failed flush may be
    /// tried again, unless the data's `fdatasync` itself failed.
    pub fn flush(&self) -> Result<(), UpperError> {
        let mut index_bytes = self.index_bytes.lock();
        let (records, superseded) = {
            let mut state = self.state.write();
            let records = std::mem::take(&mut state.pending);
            (records, std::mem::take(&mut state.superseded))
        };
        let was_dirty = self.is_dirty.swap(false, Ordering::AcqRel);
        if records.is_empty() && !was_dirty {
            return Ok(());
        }
        match self.flush_records(&mut index_bytes, &records) {
            Ok(()) => {
                let mut state = self.state.write();
                state.written_records += records.len() as u64;
                state.garbage.append(superseded);
                let LogState {
                    journal, pending, ..
                } = &mut *state;
                if let Some(Err(error)) = journal.as_mut().map(|j| j.restart(pending)) {
                    // It holds more than it need, which does no harm but for its size.
                    return Err(UpperError::io(
                        "restart the journal of",
                        &self.data_path,
                        error,
                    ));
                }
                Ok(())
            }
            Err(error) => {
                self.is_dirty.fetch_or(was_dirty, Ordering::AcqRel);
                let mut state = self.state.write();
                let newer = std::mem::replace(&mut state.pending, records);
                state.pending.extend(newer);
                state.superseded.append(superseded);
                Err(error)
            }
        }
    }

    fn check_not_poisoned(&self) -> Result<(), UpperError> {
        if self.poisoned.load(Ordering::Acquire) {
            let path = self.data_path.clone();
            return Err(UpperError::Poisoned { path });
        }
        Ok(())
    }

    fn flush_records(&self, index_bytes: &mut u64, records: &[Segment]) -> Result<(), UpperError> {
        self.check_not_poisoned()?;
        if let Err(source) = self.data.sync_data() {
            // The kernel drops its dirty pages on such an error, so a second
            // fdatasync would report a success that is not one.
            self.poisoned.store(true, Ordering::Release);
            return Err(UpperError::io("flush", &self.data_path, source));
        }
        let failed = |source| UpperError::io("flush", &self.index_path, source);
        if let Err(source) = self
            .index
            .write_all_at(&encode_entries(records), *index_bytes)
        {
            // Best effort: replay cuts a torn tail off by itself.
            let _ = self.index.set_len(*index_bytes);
            self.index_room.store(0, Ordering::Release); // it went with the tail
            return Err(failed(source));
        }
        self.index.sync_data().map_err(failed)?;
        if self.needs_directory_sync.load(Ordering::Acquire) {
            sys::sync_parent(&self.data_path)
                .and_then(|()| sys::sync_parent(&self.index_path))
                .map_err(failed)?;
            self.needs_directory_sync.store(false, Ordering::Release);
        }
        *index_bytes += (records.len() * ENTRY_BYTES) as u64;
        Ok(())
    }

    /// Turns the data file into a sealed layer by appending index and trailer
    /// (spec 1.5): O(index), no data is copied. The caller must keep writers
    /// out. On failure the upper is as before.
    ///
    /// The index file is not needed any more afterwards; the caller removes it.
    pub(crate) fn seal(
        &self,
        sync: bool,
    ) -> Result<(RoLayer, Vec<Segment>, Arc<FileBlob>), UpperError> {
        self.check_not_poisoned()?;
        let state = self.state.write();
        let entries: Vec<Segment> = state.map.iter().copied().collect();
        if entries.len() as u64 > MAX_LAYER_ENTRIES {
            return Err(UpperError::TooManyExtents {
                path: self.data_path.clone(),
                extents: entries.len(),
            });
        }
        let data_bytes = state.data_end * SECTOR_BYTES;
        let layout = self.layout.flag();
        let trailer = Block {
            flags: flags::DATA | flags::SEALED | layout,
            index_offset: data_bytes,
            index_size: entries.len() as u64,
            ..self.header.clone()
        };
        match self.append_seal(data_bytes, &entries, &trailer, sync) {
            Ok(blob) => {
                let blob = Arc::new(blob);
                let layer = RoLayer::just_sealed(&self.data_path, blob.clone(), trailer);
                Ok((layer, entries, blob))
            }
            Err(source) => {
                // Best effort: without the trailer the tail is unreferenced
                // garbage, which the upper tolerates.
                let _ = self.data.set_len(data_bytes);
                Err(UpperError::io("seal", &self.data_path, source))
            }
        }
    }

    fn append_seal(
        &self,
        data_bytes: u64,
        entries: &[Segment],
        trailer: &Block,
        sync: bool,
    ) -> io::Result<FileBlob> {
        let mut tail = encode_entries(entries);
        let unpadded = data_bytes + tail.len() as u64;
        let padded = unpadded.next_multiple_of(BLOCK_BYTES as u64);
        tail.resize(tail.len() + (padded - unpadded) as usize, 0);
        // A failed write may have left the file longer than its good data.
        self.data.set_len(data_bytes)?;
        self.data.write_all_at(&tail, data_bytes)?;
        self.data.write_all_at(&trailer.encode(), padded)?;
        if sync {
            self.data.sync_data()?;
        }
        FileBlob::new(self.data.try_clone()?)
    }
}

/// Whether the pair was never used: both absent, or creation was interrupted.
fn holds_nothing(data_path: &Path, index_path: &Path) -> Result<bool, UpperError> {
    let size = |path: &Path| match std::fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata.len())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(UpperError::io("stat", path, source)),
    };
    let (data, index) = (size(data_path)?, size(index_path)?);
    let block = BLOCK_BYTES as u64;
    let is_used = |size: Option<u64>| size.is_some_and(|size_bytes| size_bytes > block);
    let is_torn = |size: Option<u64>| size.is_none_or(|size_bytes| size_bytes < block);
    let incomplete = |missing: &Path, present: &Path| {
        Err(UpperError::Incomplete {
            missing: missing.to_owned(),
            present: present.to_owned(),
        })
    };
    match (is_used(data), is_used(index)) {
        (true, _) if index.is_none() => incomplete(index_path, data_path),
        (_, true) if data.is_none() => incomplete(data_path, index_path),
        (false, false) => Ok(is_torn(data) || is_torn(index)),
        _ => Ok(false),
    }
}

fn open_file(path: &Path, create: bool) -> Result<File, UpperError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .open(path)
        .map_err(|source| UpperError::io("open", path, source))
}

fn lock(path: &Path, file: File) -> Result<Flock<File>, UpperError> {
    sys::lock_exclusive(file)
        .map_err(|source| UpperError::io("lock", path, source))?
        .ok_or_else(|| UpperError::Busy {
            path: path.to_owned(),
        })
}
