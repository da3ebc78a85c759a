//! What a first boot read of a disk, kept beside its topmost remote layer.
//!
//! ```text
//! 0   8  "AENVTR1\0"            8   4  bytes of a granule     12  4  their number
//! 16  4  for each granule: its number on the disk, in the order of the first reads
//! end 4  CRC32C of all before
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use lsmt::recorder::{GRANULE_BYTES, MAX_GRANULES};

const MAGIC: &[u8; 8] = b"AENVTR1\0";
const HEADER_BYTES: usize = 16;
const CRC_BYTES: usize = 4;

/// Where the trace of a disk is, by its topmost remote layer.
pub fn path_of(layer: &Path) -> PathBuf {
    layer.with_extension("trace")
}

/// Writes a trace; what is too far up for the format is left out.
pub fn write(path: &Path, granules: &[u64]) -> io::Result<()> {
    let granules = granules
        .iter()
        .filter_map(|granule| u32::try_from(*granule).ok());
    let granules: Vec<u32> = granules.take(MAX_GRANULES).collect();
    let mut bytes = MAGIC.to_vec();
    bytes.extend((GRANULE_BYTES as u32).to_le_bytes());
    bytes.extend((granules.len() as u32).to_le_bytes());
    bytes.extend(granules.iter().flat_map(|granule| granule.to_le_bytes()));
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    let temporary = path.with_extension("trace.new");
    File::create(&temporary)?.write_all(&bytes)?;
    std::fs::rename(&temporary, path)
}

/// Reads a trace; `None` when there is none or it is damaged.
pub fn read(path: &Path) -> Option<Vec<u64>> {
    let limit = (HEADER_BYTES + CRC_BYTES + 4 * MAX_GRANULES) as u64;
    if std::fs::metadata(path).ok()?.len() > limit {
        return None;
    }
    let bytes = std::fs::read(path).ok()?;
    let (body, crc) = bytes.split_last_chunk::<CRC_BYTES>()?;
    if !body.starts_with(MAGIC) || crc32c::crc32c(body) != u32::from_le_bytes(*crc) {
        return None;
    }
    let number = |bytes: &[u8]| Some(u32::from_le_bytes(bytes.try_into().ok()?));
    let entries = body.get(HEADER_BYTES..)?;
    if number(&body[8..12])? != GRANULE_BYTES as u32
        || number(&body[12..16])? as usize * 4 != entries.len()
    {
        return None;
    }
    entries
        .chunks(4)
        .map(|entry| number(entry).map(u64::from))
        .collect()
}

/// Runs of granules that follow each other on the disk, at most so many in each.
pub fn runs(granules: &[u64], most: u64) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for granule in granules {
        match runs.last_mut() {
            Some((start, count)) if *start + *count == *granule && *count < most => *count += 1,
            _ => runs.push((*granule, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_back_and_damage_makes_it_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = path_of(&folder.path().join("layer.lsmt"));
        assert_eq!(path.file_name().unwrap(), "layer.trace");
        assert_eq!(read(&path), None);
        for granules in [vec![], vec![5, 6, 7, 1], vec![u64::from(u32::MAX), 0]] {
            write(&path, &granules).unwrap();
            assert_eq!(read(&path), Some(granules));
        }
        let good = std::fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            assert_eq!(read(&path), None, "byte {at}");
            std::fs::write(&path, &good[..at]).unwrap();
            assert_eq!(read(&path), None, "{at} bytes");
        }
    }

    #[test]
    fn neighbours_are_read_together() {
        assert_eq!(
            runs(&[4, 5, 6, 7, 1, 2, 9], 3),
            [(4, 3), (7, 1), (1, 2), (9, 1)]
        );
        assert_eq!(runs(&[], 3), []);
    }
}
