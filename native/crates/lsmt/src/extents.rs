//! The live map of an upper: virtual sectors to sectors of its data file.
//!
//! Invariant: extents are disjoint and none is longer than one index entry
//! (16,383 sectors), so a dump of the map is a valid index.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

use crate::format::{Segment, MAX_ENTRY_SECTORS};

/// Sorted, disjoint extents of one upper.
#[derive(Debug, Default, Clone)]
pub struct ExtentMap {
    extents: BTreeMap<u64, Segment>,
    mapped_sectors: u64,
}

impl ExtentMap {
    /// Number of extents.
    pub fn len(&self) -> usize {
        self.extents.len()
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Sectors that hold live data (zeroed ranges do not count).
    pub fn mapped_sectors(&self) -> u64 {
        self.mapped_sectors
    }

    /// Puts `segment` over whatever was there. Joins it with its left
    /// neighbour when both disk and file ranges continue.
    pub fn insert(&mut self, segment: Segment) {
        self.insert_over(segment, |_, _| {});
    }

    /// As [`ExtentMap::insert`]; tells `superseded` where in the file the data
    /// lies that nothing maps any more, as first sector and sectors.
    pub fn insert_over(&mut self, segment: Segment, superseded: impl FnMut(u64, u64)) {
        self.cut(segment.offset(), segment.end(), superseded);
        if let Some((_, left)) = self.extents.range(..segment.offset()).next_back() {
            if let Some(joined) = join(left, &segment) {
                self.add(joined);
                if !segment.is_zeroed() {
                    // `add` counted the left part a second time.
                    self.mapped_sectors -= joined.length() - segment.length();
                }
                return;
            }
        }
        self.add(segment);
    }

    /// Unmaps `[start, end)`.
    pub fn remove_range(&mut self, start: u64, end: u64) {
        self.cut(start, end, |_, _| {});
    }

    /// Segments that overlap `[start, end)`, not clipped, in order.
    pub fn range(&self, start: u64, end: u64) -> impl Iterator<Item = &Segment> {
        let first = match self.extents.range(..=start).next_back() {
            Some((offset, segment)) if segment.end() > start => *offset,
            _ => start,
        };
        let last = end.max(first);
        self.extents.range(first..last).map(|(_, segment)| segment)
    }

    /// All segments in disk order.
    pub fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.extents.values()
    }

    fn add(&mut self, segment: Segment) {
        if !segment.is_zeroed() {
            self.mapped_sectors += segment.length();
        }
        self.extents.insert(segment.offset(), segment);
    }

    fn remove(&mut self, offset: u64) {
        if let Some(segment) = self.extents.remove(&offset) {
            if !segment.is_zeroed() {
                self.mapped_sectors -= segment.length();
            }
        }
    }

    /// Removes `[start, end)`, keeping what sticks out on both sides.
    fn cut(&mut self, start: u64, end: u64, mut superseded: impl FnMut(u64, u64)) {
        let mut next = match self.extents.range(..=start).next_back() {
            Some((_, segment)) if segment.end() > start => Some(*segment),
            _ => self.first_after(start),
        };
        while let Some(old) = next.filter(|old| old.offset() < end) {
            self.remove(old.offset());
            let gone = old.clip(old.offset().max(start), old.end().min(end));
            if !gone.is_zeroed() {
                superseded(gone.moffset(), gone.length());
            }
            if old.offset() < start {
                self.add(old.clip(old.offset(), start));
            }
            if old.end() > end {
                self.add(old.clip(end, old.end()));
            }
            next = self.first_after(old.offset().max(start));
        }
    }

    fn first_after(&self, offset: u64) -> Option<Segment> {
        let above = (Excluded(offset), Unbounded);
        self.extents.range(above).next().map(|(_, found)| *found)
    }
}

/// `left` and `right` as one segment, if one entry can say both.
pub(crate) fn join(left: &Segment, right: &Segment) -> Option<Segment> {
    let length = left.length() + right.length();
    if left.end() != right.offset()
        || left.is_zeroed() != right.is_zeroed()
        || length > MAX_ENTRY_SECTORS
    {
        return None;
    }
    if left.is_zeroed() {
        return Some(Segment::zeroed(left.offset(), length, left.moffset()));
    }
    (left.mend() == right.moffset()).then(|| Segment::data(left.offset(), length, left.moffset()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(map: &ExtentMap) -> Vec<(u64, u64, u64, bool)> {
        let fields = |s: &Segment| (s.offset(), s.length(), s.moffset(), s.is_zeroed());
        map.iter().map(fields).collect()
    }

    #[test]
    fn an_overwrite_splits_the_old_extent() {
        let mut map = ExtentMap::default();
        map.insert(Segment::data(0, 10, 8));
        map.insert(Segment::zeroed(3, 2, 18));
        assert_eq!(
            shape(&map),
            vec![(0, 3, 8, false), (3, 2, 18, true), (5, 5, 13, false)]
        );
        assert_eq!(map.mapped_sectors(), 8);
        map.insert(Segment::data(0, 10, 18));
        assert_eq!(shape(&map), vec![(0, 10, 18, false)]);
        assert_eq!(map.mapped_sectors(), 10);
    }

    #[test]
    fn what_is_superseded_is_told_exactly() {
        let mut map = ExtentMap::default();
        map.insert(Segment::data(0, 10, 8));
        map.insert(Segment::zeroed(10, 5, 8));
        map.insert(Segment::data(15, 10, 100));
        let mut gone = Vec::new();
        map.insert_over(Segment::data(4, 15, 200), |place, sectors| {
            gone.push((place, sectors));
        });
        assert_eq!(gone, vec![(12, 6), (100, 4)]);
        gone.clear();
        map.insert_over(Segment::zeroed(0, 30, 8), |place, sectors| {
            gone.push((place, sectors));
        });
        assert_eq!(gone, vec![(8, 4), (200, 15), (104, 6)]);
    }

    #[test]
    fn neighbours_that_continue_are_joined_up_to_the_limit() {
        let mut map = ExtentMap::default();
        map.insert(Segment::data(0, MAX_ENTRY_SECTORS - 1, 8));
        map.insert(Segment::data(
            MAX_ENTRY_SECTORS - 1,
            1,
            8 + MAX_ENTRY_SECTORS - 1,
        ));
        assert_eq!(map.len(), 1);
        map.insert(Segment::data(MAX_ENTRY_SECTORS, 1, 8 + MAX_ENTRY_SECTORS));
        assert_eq!(map.len(), 2);
        assert_eq!(map.mapped_sectors(), MAX_ENTRY_SECTORS + 1);
    }

    #[test]
    fn ranges_include_the_extent_that_covers_the_start() {
        let mut map = ExtentMap::default();
        map.insert(Segment::data(0, 10, 8));
        map.insert(Segment::data(20, 10, 100));
        assert_eq!(map.range(5, 6).count(), 1);
        assert_eq!(map.range(10, 20).count(), 0);
        assert_eq!(map.range(9, 21).count(), 2);
    }
}
