//! Data in an upper's file that nothing maps any more, and giving its room back.
//!
//! What a write or a discard supersedes becomes garbage with the flush that makes
//! its records durable: until then a crash brings the old data back. So an upper
//! that is overwritten for ever stays as large as its live data and a bounded rest.

use super::{Upper, UpperLayout};
use crate::extents::ExtentMap;
use crate::format::{FIRST_DATA_SECTOR, SECTOR_BYTES};
use crate::sys;

/// Garbage that is not worth the work of freeing it.
const TOLERATED_BYTES: u64 = 16 << 20;
/// Nor is as much as this part of the live data.
const TOLERATED_SHARE: u64 = 8;

/// Places in the data file.
#[derive(Debug, Default)]
pub(crate) struct Garbage {
    /// First sector and sectors, in no order.
    places: Vec<(u64, u64)>,
    sectors: u64,
}

impl Garbage {
    /// What the file of a log holds beside the data that `map` names.
    pub(super) fn beside(map: &ExtentMap, data_end: u64) -> Garbage {
        let data = map.iter().filter(|segment| !segment.is_zeroed());
        let mut used: Vec<(u64, u64)> = data.map(|s| (s.moffset(), s.mend())).collect();
        used.sort_unstable();
        let mut found = Garbage::default();
        let mut cursor = FIRST_DATA_SECTOR;
        for (start, end) in used {
            if start > cursor {
                found.add(cursor, start - cursor);
            }
            cursor = cursor.max(end);
        }
        if data_end > cursor {
            found.add(cursor, data_end - cursor);
        }
        found
    }

    /// Adds a place.
    pub(super) fn add(&mut self, place: u64, sectors: u64) {
        self.sectors += sectors;
        if let Some(last) = self.places.last_mut() {
            if last.0 + last.1 == place {
                last.1 += sectors;
                return;
            }
        }
        self.places.push((place, sectors));
    }

    /// Takes over what another one has.
    pub(super) fn append(&mut self, mut other: Garbage) {
        self.sectors += other.sectors;
        self.places.append(&mut other.places);
    }

    /// Every place once, neighbours as one, in the order of the file.
    fn joined(mut self) -> Vec<(u64, u64)> {
        self.places.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::with_capacity(self.places.len());
        for (place, sectors) in self.places {
            match joined.last_mut() {
                Some(last) if last.0 + last.1 == place => last.1 += sectors,
                _ => joined.push((place, sectors)),
            }
        }
        joined
    }
}

impl Upper {
    /// The garbage, if it is so much that it should be freed now. The caller frees it.
    pub(crate) fn take_garbage(&self) -> Option<Garbage> {
        {
            let state = self.state.read();
            let bytes = state.garbage.sectors * SECTOR_BYTES;
            let live_bytes = state.map.mapped_sectors() * SECTOR_BYTES;
            if bytes <= TOLERATED_BYTES.max(live_bytes / TOLERATED_SHARE)
                || self.layout == UpperLayout::Sparse
            {
                return None;
            }
        }
        Some(std::mem::take(&mut self.state.write().garbage))
    }

    /// Gives the room of garbage back to the file system, as far as it can. Nobody
    /// may still read what they looked up before it was superseded, and the file
    /// must not be sealed: a sealed file does not change.
    pub(crate) fn free(&self, garbage: Garbage) {
        for (place, sectors) in garbage.joined() {
            let (offset, length_bytes) = (place * SECTOR_BYTES, sectors * SECTOR_BYTES);
            // Best effort: what cannot be freed is only room.
            if !matches!(sys::punch_hole(&self.data, offset, length_bytes), Ok(true)) {
                return;
            }
        }
    }
}
