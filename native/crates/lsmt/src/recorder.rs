//! Which parts of a disk were read, in the order of their first reading.

use std::collections::HashSet;

use parking_lot::Mutex;

/// Bytes that are told apart.
pub const GRANULE_BYTES: u64 = 64 << 10;
/// Granules remembered, at most (4 GiB): bounds memory and what a replay fetches.
pub const MAX_GRANULES: usize = 65_536;

#[derive(Default)]
struct Seen {
    known: HashSet<u64>,
    order: Vec<u64>,
}

/// Remembers reads. Cheap enough to be asked for each of them.
#[derive(Default)]
pub struct Recorder {
    seen: Mutex<Seen>,
}

impl Recorder {
    /// Takes note of one read.
    pub fn note(&self, offset_bytes: u64, length_bytes: u64) {
        let end = (offset_bytes + length_bytes).div_ceil(GRANULE_BYTES);
        let mut seen = self.seen.lock();
        for granule in offset_bytes / GRANULE_BYTES..end {
            if seen.order.len() < MAX_GRANULES && seen.known.insert(granule) {
                seen.order.push(granule);
            }
        }
    }

    /// The granules read so far, the first one first.
    pub fn granules(&self) -> Vec<u64> {
        self.seen.lock().order.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_granule_is_told_once_in_order_of_its_first_read() {
        let recorder = Recorder::default();
        for (offset, length) in [
            (3 * GRANULE_BYTES + 5, 1),
            (0, 2 * GRANULE_BYTES + 1),
            (3 * GRANULE_BYTES, 10),
            (9, 0),
        ] {
            recorder.note(offset, length);
        }
        assert_eq!(recorder.granules(), [3, 0, 1, 2]);
        recorder.note(0, (MAX_GRANULES as u64 + 10) * GRANULE_BYTES);
        assert_eq!(recorder.granules().len(), MAX_GRANULES);
    }
}
