//! A sparse upper's map, found by its file's holes (spec 1.8).
//!
//! Sector n of the disk lies at sector 8 + n of the file; what is a hole was never
//! written. Holes are as coarse as the file system's blocks, so whoever writes must
//! write whole blocks ([`GRAIN_BYTES`]) and zeros where a discard hides data below.

use std::fs::File;
use std::path::Path;

use crate::extents::ExtentMap;
use crate::format::{
    flags, Block, FormatError, Segment, BLOCK_BYTES, FIRST_DATA_SECTOR, INVALID_SECTOR,
    MAX_LAYER_ENTRIES, SECTOR_BYTES,
};
use crate::sys;

use super::log::{is_sealed, size_of, Replay};
use super::{UpperError, MAX_PIECE_SECTORS};

/// Granularity of holes on the usual file systems.
pub(crate) const GRAIN_BYTES: u64 = 4096;

/// First sector after the room of the disk in the file. Whole grains, so that what
/// a seal appends makes no data of a hole at the end of the disk.
pub(crate) fn data_end(virtual_size_bytes: u64) -> u64 {
    let sectors = virtual_size_bytes.div_ceil(SECTOR_BYTES);
    FIRST_DATA_SECTOR + sectors.next_multiple_of(GRAIN_BYTES / SECTOR_BYTES)
}

/// Builds the map of the data file, whose header is given.
pub(crate) fn scan(path: &Path, data: &File, header: Block) -> Result<Replay, UpperError> {
    if header.flags & flags::SEALED != 0 || is_sealed(path, data)? {
        return Err(UpperError::Sealed {
            path: path.to_owned(),
        });
    }
    let size_bytes = header.virtual_size_bytes;
    if size_bytes == 0 || size_bytes.div_ceil(SECTOR_BYTES) >= INVALID_SECTOR {
        return Err(UpperError::NoSize {
            path: path.to_owned(),
        });
    }
    let io = |source| UpperError::io("look for data in", path, source);
    let disk_end = FIRST_DATA_SECTOR + size_bytes.div_ceil(SECTOR_BYTES);
    let end = size_of(path, data)?.min(disk_end * SECTOR_BYTES);
    let mut map = ExtentMap::default();
    let mut offset = BLOCK_BYTES as u64;
    while offset < end {
        let Some(start) = sys::seek_data(data, offset).map_err(io)? else {
            break;
        };
        let stop = sys::seek_hole(data, start).map_err(io)?.min(end);
        if start >= stop {
            break;
        }
        insert(&mut map, start / SECTOR_BYTES, stop.div_ceil(SECTOR_BYTES));
        if map.len() as u64 > MAX_LAYER_ENTRIES {
            let entries = map.len() as u64;
            let limit = MAX_LAYER_ENTRIES;
            let source = FormatError::TooManyEntries { entries, limit };
            return Err(UpperError::format(path, source));
        }
        offset = stop;
    }
    Ok(Replay {
        header,
        map,
        data_end: data_end(size_bytes),
        index_bytes: BLOCK_BYTES as u64,
        records: 0,
        dropped_bytes: 0,
    })
}

/// Maps the sectors `[start, end)` of the file.
fn insert(map: &mut ExtentMap, start: u64, end: u64) {
    let mut place = start;
    while place < end {
        let sectors = (end - place).min(MAX_PIECE_SECTORS);
        map.insert(Segment::data(place - FIRST_DATA_SECTOR, sectors, place));
        place += sectors;
    }
}
