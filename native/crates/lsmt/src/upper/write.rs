//! Writing and discarding, by the layout of the upper.

use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use super::{LogState, Upper, UpperError, UpperLayout, MAX_PIECE_SECTORS};
use crate::extents::join;
use crate::format::{
    Segment, BLOCK_BYTES, ENTRY_BYTES, FIRST_DATA_SECTOR, MAX_ENTRY_SECTORS, SECTOR_BYTES,
};
use crate::sys;

/// Zeros written at once (1 MiB).
const MAX_ZEROS_SECTORS: u64 = 2048;
/// Records kept in memory before a write forces a flush (1 MiB).
const MAX_PENDING_RECORDS: usize = 65_536;
/// Records for which the index file gets room at a time (16 KiB).
const ROOM_RECORDS: u64 = 1024;
/// More writes than this are never on their way at once.
const MAX_WRITERS: u64 = 256;

impl Upper {
    /// Writes whole grains. Lasting only after [`Upper::flush`].
    pub(crate) fn write_sectors(&self, sector: u64, bytes: &[u8]) -> Result<(), UpperError> {
        debug_assert_eq!(bytes.len() as u64 % SECTOR_BYTES, 0);
        match self.layout {
            UpperLayout::Append => self.append_sectors(sector, bytes),
            UpperLayout::Hybrid => self.overwrite_or_append(sector, bytes),
            UpperLayout::Sparse => self.write_sparse(sector, bytes),
        }
    }

    /// What has a place keeps it, the rest gets one.
    fn overwrite_or_append(&self, sector: u64, bytes: &[u8]) -> Result<(), UpperError> {
        let part = |from: u64, to: u64| {
            let byte = |at: u64| ((at - sector) * SECTOR_BYTES) as usize;
            &bytes[byte(from)..byte(to)]
        };
        let end = sector + bytes.len() as u64 / SECTOR_BYTES;
        let mut found = Vec::new();
        self.lookup(sector, end, &mut found);
        let mut cursor = sector;
        for segment in found.iter().filter(|segment| !segment.is_zeroed()) {
            self.append_sectors(cursor, part(cursor, segment.offset()))?;
            let content = part(segment.offset(), segment.end());
            self.overwrite(content, segment.moffset())?;
            cursor = segment.end();
        }
        self.append_sectors(cursor, part(cursor, end))
    }

    fn write_sparse(&self, sector: u64, bytes: &[u8]) -> Result<(), UpperError> {
        self.overwrite(bytes, FIRST_DATA_SECTOR + sector)?;
        let end = sector + bytes.len() as u64 / SECTOR_BYTES;
        let mut state = self.state.write();
        let mut offset = sector;
        while offset < end {
            let sectors = (end - offset).min(MAX_PIECE_SECTORS);
            let place = FIRST_DATA_SECTOR + offset;
            state.map.insert(Segment::data(offset, sectors, place));
            offset += sectors;
        }
        Ok(())
    }

    fn overwrite(&self, bytes: &[u8], moffset: u64) -> Result<(), UpperError> {
        let written = self.data.write_all_at(bytes, moffset * SECTOR_BYTES);
        // Also what was written in part must reach the disk some time.
        self.is_dirty.store(true, Ordering::Release);
        written.map_err(|source| UpperError::io("write", &self.data_path, source))
    }

    fn append_sectors(&self, sector: u64, bytes: &[u8]) -> Result<(), UpperError> {
        let mut offset = sector;
        for piece in bytes.chunks((MAX_PIECE_SECTORS * SECTOR_BYTES) as usize) {
            self.make_room_for_records()?;
            let sectors = piece.len() as u64 / SECTOR_BYTES;
            let moffset = self.reserve(sectors);
            let written = self.data.write_all_at(piece, moffset * SECTOR_BYTES);
            if let Err(source) = written {
                self.give_back(moffset, sectors);
                return Err(UpperError::io("write", &self.data_path, source));
            }
            if let Err(error) = self.record(Segment::data(offset, sectors, moffset)) {
                self.give_back(moffset, sectors);
                return Err(error);
            }
            offset += sectors;
        }
        Ok(())
    }

    /// Makes whole grains read as zero. `hides_data` says whether a layer below
    /// holds data there.
    pub(crate) fn zero_sectors(
        &self,
        start: u64,
        end: u64,
        hides_data: bool,
    ) -> Result<(), UpperError> {
        if self.layout == UpperLayout::Sparse {
            return self.zero_sparse(start, end, hides_data);
        }
        let mut offset = start;
        while offset < end {
            self.make_room_for_records()?;
            let sectors = (end - offset).min(MAX_ENTRY_SECTORS);
            // A zeroed record names no data. The one place that can never be
            // past the end of the data file is the first sector.
            self.record(Segment::zeroed(offset, sectors, FIRST_DATA_SECTOR))?;
            offset += sectors;
        }
        Ok(())
    }

    /// Only what is no hole hides what is below, also after the next open.
    fn zero_sparse(&self, start: u64, end: u64, hides_data: bool) -> Result<(), UpperError> {
        let place_bytes = (FIRST_DATA_SECTOR + start) * SECTOR_BYTES;
        let length_bytes = (end - start) * SECTOR_BYTES;
        let is_hole = !hides_data
            && sys::punch_hole(&self.data, place_bytes, length_bytes)
                .map_err(|source| UpperError::io("free a part of", &self.data_path, source))?;
        if is_hole {
            self.is_dirty.store(true, Ordering::Release);
            self.state.write().map.remove_range(start, end);
            return Ok(());
        }
        let zeros = vec![0; (MAX_ZEROS_SECTORS * SECTOR_BYTES) as usize];
        let mut offset = start;
        while offset < end {
            let sectors = (end - offset).min(MAX_ZEROS_SECTORS);
            self.write_sparse(offset, &zeros[..(sectors * SECTOR_BYTES) as usize])?;
            offset += sectors;
        }
        Ok(())
    }

    fn reserve(&self, sectors: u64) -> u64 {
        let mut state = self.state.write();
        let moffset = state.data_end;
        state.data_end += sectors;
        moffset
    }

    /// Takes a failed reservation back if nothing was reserved after it, and
    /// frees what was written of it: the disk may be full.
    fn give_back(&self, moffset: u64, sectors: u64) {
        let mut state = self.state.write();
        if state.data_end == moffset + sectors {
            state.data_end = moffset;
            // Best effort: a longer file is only unreferenced garbage.
            let _ = self.data.set_len(moffset * SECTOR_BYTES);
        }
    }

    pub(super) fn record(&self, segment: Segment) -> Result<(), UpperError> {
        let mut state = self.state.write();
        let LogState {
            map,
            superseded,
            journal,
            ..
        } = &mut *state;
        if let Some(Err(source)) = journal.as_mut().map(|journal| journal.append(&segment)) {
            return Err(UpperError::io(
                "write the journal of",
                &self.data_path,
                source,
            ));
        }
        map.insert_over(segment, |place, sectors| superseded.add(place, sectors));
        if let Some(last) = state.pending.last_mut() {
            if let Some(joined) = join(last, &segment) {
                *last = joined;
                return Ok(());
            }
        }
        state.pending.push(segment);
        state.made_records += 1;
        Ok(())
    }

    /// Before data is written, so that a flush never fails for want of room: a VMM or a
    /// guest waits for room when a write fails so, but takes a failed flush for a loss.
    fn make_room_for_records(&self) -> Result<(), UpperError> {
        let (pending, written, made) = {
            let state = self.state.read();
            let written = state.written_records;
            (state.pending.len(), written, state.made_records)
        };
        if pending >= MAX_PENDING_RECORDS {
            self.flush()?;
        }
        if made + MAX_WRITERS <= self.index_room.load(Ordering::Acquire) {
            return Ok(());
        }
        let room = made + ROOM_RECORDS;
        let place_bytes = |record| BLOCK_BYTES as u64 + record * ENTRY_BYTES as u64;
        let (start, end) = (place_bytes(written), place_bytes(room));
        sys::allocate(&self.index, start, end - start)
            .map_err(|source| UpperError::io("make room in", &self.index_path, source))?;
        self.index_room.fetch_max(room, Ordering::AcqRel);
        Ok(())
    }
}
