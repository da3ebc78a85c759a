//! A virtual disk: sealed layers with at most one writable upper on top.
//!
//! Invariants:
//! - a read sees, for every sector, the newest layer that maps it;
//! - I/O runs in parallel; only sealing excludes it, for O(index) time;
//! - writes that do not cover whole sectors (or what else the upper keeps as
//!   one piece) are made alone, so two of them in one sector both survive.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use crate::blob::{FileBlob, Opener};
use crate::format::{BLOCK_BYTES, MAX_LAYERS, SECTOR_BYTES};
use crate::lowers::{Lowers, Target};
use crate::recorder::Recorder;
use crate::stack_error::StackError;
use crate::upper::{Upper, UpperLayout, UpperStats};

/// Sectors looked at in one step of a hole search (512 MiB).
const SEEK_WINDOW_SECTORS: u64 = 1 << 20;

/// The two files of an upper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpperPaths {
    /// Data file.
    pub data: PathBuf,
    /// Index file.
    pub index: PathBuf,
}

/// What to open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StackSpec {
    /// Sealed layers, bottom first.
    pub lowers: Vec<PathBuf>,
    /// The writable upper; created when its files do not exist.
    pub upper: Option<UpperPaths>,
    /// How an upper that is created is written; an existing one says it itself.
    pub upper_layout: UpperLayout,
    /// Size of the disk; `None` takes it from the layers.
    pub virtual_size_bytes: Option<u64>,
}

/// A layer made by sealing an upper in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedUpper {
    /// The layer file (the former data file).
    pub path: PathBuf,
    /// Its size.
    pub size_bytes: u64,
    /// Bytes of live data in it.
    pub mapped_bytes: u64,
    /// Its identity.
    pub uuid: String,
}

/// A part of a disk that lies in one piece in a layer's file.
pub struct InPlace {
    lowers: Arc<Lowers>,
    layer: usize,
    file_offset: u64,
    length_bytes: u64,
}

impl InPlace {
    /// The bytes, as [`crate::Blob::in_place`] gives them: for system calls only.
    pub fn bytes(&self) -> Option<&[u8]> {
        let blob = self.lowers.layers.get(self.layer)?.blob();
        blob.in_place(self.file_offset, self.length_bytes)
    }

    /// The file they are in, and from which of its bytes on, if it has them as they are.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        let blob = self.lowers.layers.get(self.layer)?.blob();
        blob.in_file(self.file_offset, self.length_bytes)
    }

    /// How many they are.
    pub fn length_bytes(&self) -> u64 {
        self.length_bytes
    }
}

struct State {
    lowers: Arc<Lowers>,
    upper: Option<Arc<Upper>>,
}

impl State {
    fn read(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<(), StackError> {
        let start = offset_bytes / SECTOR_BYTES;
        let end = (offset_bytes + buffer.len() as u64).div_ceil(SECTOR_BYTES);
        let mut target = Target {
            buffer,
            offset_bytes,
        };
        let Some(upper) = &self.upper else {
            return self.lowers.read(&mut target, start, end);
        };
        let mut segments = Vec::new();
        upper.lookup(start, end, &mut segments);
        let mut cursor = start;
        for segment in segments {
            if cursor < segment.offset() {
                self.lowers.read(&mut target, cursor, segment.offset())?;
            }
            cursor = segment.end();
            if segment.is_zeroed() {
                target.zero(segment.offset(), segment.end());
            } else {
                let (bytes, file_offset) = target.place(&segment);
                upper.read_data(bytes, file_offset)?;
            }
        }
        if cursor < end {
            self.lowers.read(&mut target, cursor, end)?;
        }
        Ok(())
    }

    /// Data ranges inside `[start, end)`, clipped and in order.
    fn data_ranges(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut upper = Vec::new();
        if let Some(open) = &self.upper {
            open.lookup(start, end, &mut upper);
        }
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let below = |ranges: &mut Vec<(u64, u64)>, start: u64, end: u64| {
            if start < end {
                let found = self.lowers.index.range(start, end);
                let data = found.filter(|segment| !segment.is_zeroed());
                ranges.extend(data.map(|s| (s.offset().max(start), s.end().min(end))));
            }
        };
        let mut cursor = start;
        for segment in upper {
            below(&mut ranges, cursor, segment.offset());
            if !segment.is_zeroed() {
                ranges.push((segment.offset(), segment.end()));
            }
            cursor = segment.end();
        }
        below(&mut ranges, cursor, end);
        ranges
    }
}

/// An open stack. All methods may be called from several threads.
pub struct Stack {
    opener: Opener,
    virtual_size_bytes: u64,
    state: RwLock<State>,
    /// Held alone by writes that read a sector first, shared by all others.
    sector_writes: RwLock<()>,
    /// Layers sealed without `sync`; the next flush makes them durable.
    unsynced: Mutex<Vec<Arc<FileBlob>>>,
    /// Told of each read, if set. Apart from `state`, which a slow read may hold.
    recorder: RwLock<Option<Arc<Recorder>>>,
    may_wait: AtomicBool,
    /// Where the uppers keep their journals, if they do.
    journals: Option<PathBuf>,
}

impl Stack {
    /// Opens lowers and upper. A new upper is created for the given size; an
    /// existing one must have been made for it.
    pub fn open(opener: &Opener, spec: &StackSpec) -> Result<Stack, StackError> {
        let lowers = Lowers::open(opener, &spec.lowers)?;
        let below_bytes = lowers.virtual_size_bytes();
        if let Some(wanted_bytes) = spec.virtual_size_bytes {
            let least_bytes = below_bytes;
            if wanted_bytes < least_bytes || wanted_bytes % SECTOR_BYTES != 0 {
                return Err(StackError::BadSize {
                    wanted_bytes,
                    least_bytes,
                });
            }
        }
        let mut virtual_size_bytes = spec.virtual_size_bytes.unwrap_or(below_bytes);
        let mut upper = None;
        if let Some(paths) = &spec.upper {
            let mut opened = Upper::open_or_create(
                &paths.data,
                &paths.index,
                spec.upper_layout,
                virtual_size_bytes,
                lowers.top_uuid(),
            )?;
            virtual_size_bytes = match opened.header().virtual_size_bytes {
                // "As below": from now on it says so itself.
                0 => opened.adopt_size(virtual_size_bytes)?,
                upper_bytes => match spec.virtual_size_bytes {
                    Some(wanted_bytes) if wanted_bytes != upper_bytes => {
                        return Err(StackError::UpperSize {
                            upper_bytes,
                            wanted_bytes,
                        });
                    }
                    _ => upper_bytes,
                },
            };
            upper = Some(Arc::new(opened));
        }
        if virtual_size_bytes == 0 {
            return Err(StackError::NoSize);
        }
        let lowers = Arc::new(lowers);
        let may_wait = AtomicBool::new(may_wait(&lowers));
        Ok(Stack {
            opener: opener.clone(),
            virtual_size_bytes,
            state: RwLock::new(State { lowers, upper }),
            sector_writes: RwLock::new(()),
            unsynced: Mutex::new(Vec::new()),
            recorder: RwLock::default(),
            may_wait,
            journals: None,
        })
    }

    /// A read-only stack over opened layers (offline tools).
    pub fn from_lowers(lowers: Lowers, virtual_size_bytes: u64) -> Stack {
        let lowers = Arc::new(lowers);
        let may_wait = AtomicBool::new(may_wait(&lowers));
        Stack {
            opener: Opener::default(),
            virtual_size_bytes,
            state: RwLock::new(State {
                lowers,
                upper: None,
            }),
            sector_writes: RwLock::new(()),
            unsynced: Mutex::new(Vec::new()),
            recorder: RwLock::default(),
            may_wait,
            journals: None,
        }
    }

    /// Makes writes outlive a kill of this process, flushed or not: their records are kept
    /// in a journal in `folder`, and those of a process that was killed are taken over.
    /// `folder` must be empty after a restart of the machine. Before any I/O.
    pub fn keep_journals(&mut self, folder: &Path) -> Result<(), StackError> {
        if let Some(upper) = &self.state.get_mut().upper {
            upper.keep_journal(folder)?;
        }
        self.journals = Some(folder.to_owned());
        Ok(())
    }

    /// Ends the journal, after the last flush.
    pub fn end_journal(&self) {
        if let Some(upper) = &self.state.read().upper {
            upper.end_journal();
        }
    }

    /// Size of the disk.
    pub fn virtual_size_bytes(&self) -> u64 {
        self.virtual_size_bytes
    }

    /// Whether the stack has an upper.
    pub fn is_writable(&self) -> bool {
        self.state.read().upper.is_some()
    }

    /// Whether a read may have to wait for another machine. Takes no lock: such a read
    /// may hold one for long.
    pub fn may_wait(&self) -> bool {
        self.may_wait.load(Ordering::Relaxed)
    }

    /// Looks again whether reads may have to wait: layers become local while in use.
    pub fn settle(&self) {
        if let Some(state) = self.state.try_read() {
            self.may_wait
                .store(may_wait(&state.lowers), Ordering::Relaxed);
        }
    }

    /// Files of the sealed layers, bottom first.
    pub fn lower_paths(&self) -> Vec<PathBuf> {
        let state = self.state.read();
        let layers = state.lowers.layers.iter();
        layers.map(|layer| layer.path().to_owned()).collect()
    }

    /// How the upper is written, if there is one.
    pub fn upper_layout(&self) -> Option<UpperLayout> {
        self.state.read().upper.as_ref().map(|upper| upper.layout())
    }

    /// Figures of the upper, if there is one.
    pub fn upper_stats(&self) -> Option<UpperStats> {
        self.state.read().upper.as_ref().map(|upper| upper.stats())
    }

    /// Bytes recovery cut off the upper's index when it was opened.
    pub fn dropped_bytes(&self) -> u64 {
        let state = self.state.read();
        state
            .upper
            .as_ref()
            .map_or(0, |upper| upper.dropped_bytes())
    }

    /// Identity of the topmost sealed layer, or the nil uuid.
    pub fn top_uuid(&self) -> String {
        self.state.read().lowers.top_uuid().to_owned()
    }

    /// Reads up to the end of the disk; returns the bytes filled.
    pub fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<usize, StackError> {
        let left = self.virtual_size_bytes.saturating_sub(offset_bytes);
        let count = left.min(buffer.len() as u64) as usize;
        if count > 0 {
            self.note(offset_bytes, count as u64);
            let state = self.state.read();
            state.read(&mut buffer[..count], offset_bytes)?;
        }
        Ok(count)
    }

    /// Where a read up to the end of the disk would find all its bytes in one piece, if
    /// there is such a place. Sealed layers do not change, so it stays right for as long
    /// as it is held, whatever is written to the disk meanwhile.
    pub fn in_place(&self, length_bytes: u64, offset_bytes: u64) -> Option<InPlace> {
        let left = self.virtual_size_bytes.checked_sub(offset_bytes)?;
        let length_bytes = length_bytes.min(left);
        let end_bytes = offset_bytes + length_bytes;
        let state = self.state.read();
        let (start, end) = (
            offset_bytes / SECTOR_BYTES,
            end_bytes.div_ceil(SECTOR_BYTES),
        );
        let upper = state.upper.as_ref();
        if upper.is_some_and(|upper| upper.maps_any(start, end)) {
            return None;
        }
        let (layer, file_offset) = state.lowers.piece(offset_bytes, end_bytes)?;
        let lowers = state.lowers.clone();
        drop(state);
        self.note(offset_bytes, length_bytes);
        Some(InPlace {
            lowers,
            layer,
            file_offset,
            length_bytes,
        })
    }

    fn note(&self, offset_bytes: u64, length_bytes: u64) {
        if let Some(recorder) = self.recorder.read().as_deref() {
            recorder.note(offset_bytes, length_bytes);
        }
    }

    /// Has reads noted from now on, or, with `None`, no longer.
    pub fn record_reads(&self, recorder: Option<Arc<Recorder>>) {
        *self.recorder.write() = recorder;
    }

    /// The topmost layer that is on another machine.
    pub fn top_remote(&self) -> Option<PathBuf> {
        let state = self.state.read();
        let mut layers = state.lowers.layers.iter().rev();
        let found = layers.find(|layer| layer.blob().may_wait())?;
        Some(found.path().to_owned())
    }

    /// Writes bytes at any place inside the disk. Lasting after a flush only.
    pub fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<(), StackError> {
        self.write_held(bytes, offset_bytes)?;
        self.free_garbage();
        Ok(())
    }

    /// Writes as `write_at` does, but whole pages of zeros are recorded as such instead of
    /// stored, also where nothing lies below: this layer may come to lie upon others.
    pub fn write_recording_zeros(&self, bytes: &[u8], offset_bytes: u64) -> Result<(), StackError> {
        let before = (BLOCK_BYTES - offset_bytes as usize % BLOCK_BYTES) % BLOCK_BYTES;
        let (head, rest) = bytes.split_at(before.min(bytes.len()));
        let (whole, tail) = rest.split_at(rest.len() / BLOCK_BYTES * BLOCK_BYTES);
        let mut place_bytes = offset_bytes;
        let mut write = |part: &[u8]| {
            let result = match part {
                [] => Ok(()),
                part if part.len() % BLOCK_BYTES == 0 && is_zero(part) => {
                    self.record_zeros(place_bytes, part.len() as u64)
                }
                part => self.write_at(part, place_bytes),
            };
            place_bytes += part.len() as u64;
            result
        };
        write(head)?;
        let pages: Vec<_> = whole.chunks_exact(BLOCK_BYTES).collect();
        let mut start = 0;
        for run in pages.chunk_by(|page, next| is_zero(page) == is_zero(next)) {
            let end = start + run.len() * BLOCK_BYTES;
            write(&whole[start..end])?;
            start = end;
        }
        write(tail)
    }

    fn record_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), StackError> {
        self.check_range(offset_bytes, length_bytes)?;
        let state = self.state.read();
        let upper = state.upper.as_ref().ok_or(StackError::ReadOnly)?;
        let _shared = self.sector_writes.read();
        let (start, end) = (
            offset_bytes / SECTOR_BYTES,
            (offset_bytes + length_bytes) / SECTOR_BYTES,
        );
        Ok(upper.zero_sectors(start, end, true)?)
    }

    fn write_held(&self, bytes: &[u8], offset_bytes: u64) -> Result<(), StackError> {
        let length_bytes = bytes.len() as u64;
        self.check_range(offset_bytes, length_bytes)?;
        let state = self.state.read();
        let upper = state.upper.as_ref().ok_or(StackError::ReadOnly)?;
        let grain_bytes = upper.grain_bytes();
        let end_bytes = offset_bytes + length_bytes;
        let is_end = end_bytes == self.virtual_size_bytes && end_bytes % SECTOR_BYTES == 0;
        if offset_bytes % grain_bytes == 0 && (end_bytes % grain_bytes == 0 || is_end) {
            let _shared = self.sector_writes.read();
            return Ok(upper.write_sectors(offset_bytes / SECTOR_BYTES, bytes)?);
        }
        let _alone = self.sector_writes.write();
        let start = offset_bytes / grain_bytes * (grain_bytes / SECTOR_BYTES);
        let limit = self.virtual_size_bytes.div_ceil(SECTOR_BYTES);
        let grains_end = end_bytes.div_ceil(grain_bytes) * (grain_bytes / SECTOR_BYTES);
        let end = grains_end.min(limit);
        let mut sectors = vec![0; ((end - start) * SECTOR_BYTES) as usize];
        state.read(&mut sectors, start * SECTOR_BYTES)?;
        let shift = (offset_bytes - start * SECTOR_BYTES) as usize;
        sectors[shift..shift + bytes.len()].copy_from_slice(bytes);
        Ok(upper.write_sectors(start, &sectors)?)
    }

    /// Makes a range read as zero, and frees its old data for the next commit.
    pub fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), StackError> {
        self.check_range(offset_bytes, length_bytes)?;
        let end_bytes = offset_bytes + length_bytes;
        let grain_bytes = {
            let state = self.state.read();
            let upper = state.upper.as_ref().ok_or(StackError::ReadOnly)?;
            upper.grain_bytes()
        };
        let start_bytes = offset_bytes.next_multiple_of(grain_bytes);
        let whole_end_bytes = end_bytes / grain_bytes * grain_bytes;
        if start_bytes > whole_end_bytes {
            // Inside one grain.
            return self.write_at(&vec![0; length_bytes as usize], offset_bytes);
        }
        let head = start_bytes - offset_bytes;
        if head > 0 {
            self.write_at(&vec![0; head as usize], offset_bytes)?;
        }
        let tail = end_bytes - whole_end_bytes;
        if tail > 0 {
            self.write_at(&vec![0; tail as usize], whole_end_bytes)?;
        }
        let state = self.state.read();
        let upper = state.upper.as_ref().ok_or(StackError::ReadOnly)?;
        let _shared = self.sector_writes.read();
        for (from, to) in windows(start_bytes / SECTOR_BYTES, whole_end_bytes / SECTOR_BYTES) {
            // A trim of space that is empty already must not grow the log.
            if !state.data_ranges(from, to).is_empty() {
                let hides_data = !state.lowers.index.is_zero(from, to);
                upper.zero_sectors(from, to, hides_data)?;
            }
        }
        Ok(())
    }

    /// Makes everything written before the call durable. No-op when read-only.
    pub fn flush(&self) -> Result<(), StackError> {
        let upper = self.state.read().upper.clone();
        {
            let mut unsynced = self.unsynced.lock();
            for blob in unsynced.iter() {
                blob.sync()
                    .map_err(|source| StackError::SyncLayer { source })?;
            }
            unsynced.clear();
        }
        match upper {
            Some(upper) => upper.flush()?,
            None => return Ok(()),
        }
        self.free_garbage();
        Ok(())
    }

    /// Gives back the room of what was overwritten or discarded, once it is much.
    fn free_garbage(&self) {
        let (upper, garbage) = {
            let state = self.state.read();
            let Some(upper) = &state.upper else {
                return;
            };
            let Some(garbage) = upper.take_garbage() else {
                return;
            };
            (upper.clone(), garbage)
        };
        // Whoever looked a place up before it was superseded has read it when this
        // has been held once.
        drop(self.state.write());
        let state = self.state.read(); // keeps a seal out
        let current = state.upper.as_ref();
        if current.is_some_and(|current| Arc::ptr_eq(current, &upper)) {
            upper.free(garbage);
        }
    }

    /// Whether the whole range reads as zero.
    pub fn reads_zero(&self, offset_bytes: u64, length_bytes: u64) -> bool {
        let start = offset_bytes / SECTOR_BYTES;
        let end = (offset_bytes + length_bytes).div_ceil(SECTOR_BYTES);
        self.state.read().data_ranges(start, end).is_empty()
    }

    /// First byte at or after `offset_bytes` that a layer holds data for.
    pub fn next_data(&self, offset_bytes: u64) -> Option<u64> {
        let state = self.state.read();
        let limit = self.virtual_size_bytes.div_ceil(SECTOR_BYTES);
        for (from, to) in windows(offset_bytes / SECTOR_BYTES, limit) {
            if let Some((start, _)) = state.data_ranges(from, to).first() {
                return Some((start * SECTOR_BYTES).max(offset_bytes));
            }
        }
        None
    }

    /// First byte at or after `offset_bytes` that no layer holds data for; the
    /// end of the disk counts as a hole.
    pub fn next_hole(&self, offset_bytes: u64) -> u64 {
        let state = self.state.read();
        let limit = self.virtual_size_bytes.div_ceil(SECTOR_BYTES);
        let mut cursor = offset_bytes / SECTOR_BYTES;
        for (from, to) in windows(cursor, limit) {
            for (start, end) in state.data_ranges(from, to) {
                if start > cursor {
                    return (cursor * SECTOR_BYTES).max(offset_bytes);
                }
                cursor = end;
            }
            if cursor < to {
                return (cursor * SECTOR_BYTES).max(offset_bytes);
            }
        }
        self.virtual_size_bytes
    }

    /// Seals the upper in place, makes it the top lower and goes on with a
    /// fresh upper. Atomic for I/O; on failure the stack is as before. Without
    /// `sync` the sealed layer becomes durable with the next flush.
    pub fn seal(&self, fresh: &UpperPaths, sync: bool) -> Result<SealedUpper, StackError> {
        // Most of the flushing happens before I/O is stopped.
        if sync {
            self.flush()?;
        }
        let fresh_upper = self.create_fresh(fresh)?;
        let result = self.swap_upper(&fresh_upper, sync);
        match result {
            Ok((sealed, old_index)) => {
                // Best effort: a sealed data file is never opened as an upper
                // again, so a left-over index file is only clutter.
                let _ = std::fs::remove_file(old_index);
                Ok(sealed)
            }
            Err(error) => {
                // Best effort: an empty fresh pair is usable by the next try.
                fresh_upper.end_journal();
                let _ = std::fs::remove_file(&fresh.data);
                let _ = std::fs::remove_file(&fresh.index);
                Err(error)
            }
        }
    }

    /// Reads from `merged`, a commit of the sealed layers `run`, in their place
    /// from now on. Atomic for I/O; on failure the stack is as before. `merged`
    /// is made durable first, since flushes have vouched for the layers' data.
    ///
    /// That both read the same is the caller's word. Seals of the same stack
    /// must not run meanwhile; they would make this fail.
    pub fn replace(&self, run: &[PathBuf], merged: &Path) -> Result<(), StackError> {
        let before = self.state.read().lowers.clone();
        let mut paths = self.lower_paths();
        let found = (0..paths.len()).find(|&at| !run.is_empty() && paths[at..].starts_with(run));
        let at = found.ok_or(StackError::NoSuchRun)?;
        paths.splice(at..at + run.len(), [merged.to_owned()]);
        std::fs::File::open(merged)
            .and_then(|file| file.sync_all())
            .map_err(|source| StackError::SyncReplacement {
                path: merged.to_owned(),
                source,
            })?;
        let after = Lowers::open(&self.opener, &paths)?;
        let (replacement_bytes, layers_bytes) =
            (after.virtual_size_bytes(), before.virtual_size_bytes());
        if replacement_bytes != layers_bytes {
            return Err(StackError::ReplacementSize {
                replacement_bytes,
                layers_bytes,
            });
        }
        let mut state = self.state.write();
        if !Arc::ptr_eq(&state.lowers, &before) {
            return Err(StackError::NoSuchRun);
        }
        self.may_wait.store(may_wait(&after), Ordering::Relaxed);
        state.lowers = Arc::new(after);
        Ok(())
    }

    fn create_fresh(&self, fresh: &UpperPaths) -> Result<Arc<Upper>, StackError> {
        let (parent_uuid, layout) = {
            let state = self.state.read();
            let upper = state.upper.as_ref().ok_or(StackError::ReadOnly)?;
            (upper.header().uuid.clone(), upper.layout())
        };
        let upper = Upper::open_or_create(
            &fresh.data,
            &fresh.index,
            layout,
            self.virtual_size_bytes,
            &parent_uuid,
        )?;
        if !upper.is_empty() {
            let path = fresh.data.clone();
            return Err(StackError::FreshUpperUsed { path });
        }
        if let Some(folder) = &self.journals {
            upper.keep_journal(folder)?;
        }
        Ok(Arc::new(upper))
    }

    fn swap_upper(
        &self,
        fresh: &Arc<Upper>,
        sync: bool,
    ) -> Result<(SealedUpper, PathBuf), StackError> {
        let mut state = self.state.write();
        let count = state.lowers.layers.len() + 1;
        if count > MAX_LAYERS {
            return Err(StackError::TooManyLayers { count });
        }
        let upper = state.upper.clone().ok_or(StackError::ReadOnly)?;
        let (layer, entries, blob) = upper.seal(sync)?;
        if !sync {
            self.unsynced.lock().push(blob);
        }
        let mapped_bytes = upper.stats().mapped_bytes;
        let sealed = SealedUpper {
            path: layer.path().to_owned(),
            size_bytes: layer.blob().size_bytes(),
            mapped_bytes,
            uuid: layer.trailer().uuid.clone(),
        };
        let tag = (count - 1) as u8;
        let index = state.lowers.index.with_top(&entries, tag);
        let mut layers = state.lowers.layers.clone();
        layers.push(layer);
        state.lowers = Arc::new(Lowers { layers, index });
        state.upper = Some(fresh.clone());
        upper.end_journal();
        let old_index: &Path = upper.index_path();
        Ok((sealed, old_index.to_owned()))
    }

    fn check_range(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), StackError> {
        let end = offset_bytes.checked_add(length_bytes);
        if end.is_some_and(|end| end <= self.virtual_size_bytes) {
            return Ok(());
        }
        Err(StackError::OutOfRange {
            offset_bytes,
            length_bytes,
            virtual_size_bytes: self.virtual_size_bytes,
        })
    }
}

fn may_wait(lowers: &Lowers) -> bool {
    let mut layers = lowers.layers.iter();
    layers.any(|layer| layer.blob().may_wait())
}

/// `[start, end)` in pieces that bound the work of one lookup.
fn windows(start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut cursor = start;
    std::iter::from_fn(move || {
        (cursor < end).then(|| {
            let from = cursor;
            cursor = end.min(from + SEEK_WINDOW_SECTORS);
            (from, cursor)
        })
    })
}

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests;
