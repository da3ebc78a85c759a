//! One sorted index over many layers, built once (spec 1.9).
//!
//! Invariant: segments are sorted and disjoint and their tag is the position of
//! their layer, bottom first. Reading costs one binary search whatever the
//! number of layers.

use crate::format::Segment;

/// Largest number of entries kept for one stack: 2 GiB of memory.
pub const MAX_MERGED_ENTRIES: usize = 128_000_000;

/// The merged index of the sealed layers of a stack.
#[derive(Debug, Default, Clone)]
pub struct MergedIndex {
    segments: Vec<Segment>,
}

impl MergedIndex {
    /// Merges the indexes of `layers`, bottom first; upper ones hide lower ones.
    pub fn build(layers: Vec<Vec<Segment>>) -> MergedIndex {
        let tagged = layers.into_iter().enumerate().map(|(tag, entries)| {
            let tag = tag as u8;
            entries
                .into_iter()
                .map(|segment| segment.with_tag(tag))
                .collect()
        });
        MergedIndex {
            segments: merge_all(tagged.collect()),
        }
    }

    /// The index with one more layer, tagged `tag`, on top.
    pub fn with_top(&self, top: &[Segment], tag: u8) -> MergedIndex {
        let tagged: Vec<Segment> = top.iter().map(|segment| segment.with_tag(tag)).collect();
        MergedIndex {
            segments: overlay(&tagged, &self.segments),
        }
    }

    /// All segments in disk order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Segments that overlap `[start, end)`, not clipped.
    pub fn range(&self, start: u64, end: u64) -> impl Iterator<Item = &Segment> {
        let first = self
            .segments
            .partition_point(|segment| segment.end() <= start);
        self.segments[first..]
            .iter()
            .take_while(move |segment| segment.offset() < end)
    }

    /// Whether every sector of `[start, end)` reads as zero.
    pub fn is_zero(&self, start: u64, end: u64) -> bool {
        self.range(start, end).all(Segment::is_zeroed)
    }
}

/// Halves instead of folding: n layers cost log n passes, not n.
fn merge_all(mut layers: Vec<Vec<Segment>>) -> Vec<Segment> {
    match layers.len() {
        0 => Vec::new(),
        1 => layers.swap_remove(0),
        count => {
            let upper_half = layers.split_off(count / 2);
            let bottom = merge_all(layers);
            overlay(&merge_all(upper_half), &bottom)
        }
    }
}

/// All of `top`, and `bottom` in the gaps of `top`.
fn overlay(top: &[Segment], bottom: &[Segment]) -> Vec<Segment> {
    let mut merged = Vec::with_capacity(top.len() + bottom.len());
    let mut below = bottom.iter().peekable();
    let mut gap_start = 0;
    let mut fill = |merged: &mut Vec<Segment>, start: u64, end: u64| {
        while let Some(segment) = below.peek() {
            if segment.offset() >= end {
                break;
            }
            if segment.end() > start {
                merged.push(segment.clip(start, end));
            }
            if segment.end() > end {
                break;
            }
            below.next();
        }
    };
    for segment in top {
        if segment.offset() > gap_start {
            fill(&mut merged, gap_start, segment.offset());
        }
        merged.push(*segment);
        gap_start = segment.end();
    }
    fill(&mut merged, gap_start, u64::MAX);
    merged.shrink_to_fit();
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(index: &MergedIndex) -> Vec<(u64, u64, u64, u8)> {
        let fields = |s: &Segment| (s.offset(), s.length(), s.moffset(), s.tag());
        index.segments().iter().map(fields).collect()
    }

    #[test]
    fn upper_layers_hide_lower_ones() {
        let bottom = vec![Segment::data(0, 100, 8)];
        let middle = vec![Segment::data(10, 10, 8), Segment::zeroed(40, 5, 18)];
        let top = vec![Segment::data(15, 30, 8)];
        let merged = MergedIndex::build(vec![bottom, middle, top]);
        let expected = vec![
            (0, 10, 8, 0),
            (10, 5, 8, 1),
            (15, 30, 8, 2),
            (45, 55, 53, 0),
        ];
        assert_eq!(shape(&merged), expected);
    }

    #[test]
    fn adding_a_top_equals_building_with_it() {
        let layers: Vec<Vec<Segment>> = (0..5_u64)
            .map(|layer| {
                (0..50)
                    .map(|slot| Segment::data(slot * 7 + layer, 5 + layer % 3, 8 + slot))
                    .filter(|segment| segment.offset() % 7 == layer)
                    .collect()
            })
            .collect();
        let mut grown = MergedIndex::default();
        for (tag, layer) in layers.iter().enumerate() {
            grown = grown.with_top(layer, tag as u8);
        }
        assert_eq!(shape(&grown), shape(&MergedIndex::build(layers)));
    }

    #[test]
    fn range_and_zero_queries_respect_edges() {
        let index = MergedIndex::build(vec![vec![
            Segment::data(10, 10, 8),
            Segment::zeroed(30, 10, 18),
        ]]);
        assert_eq!(index.range(0, 10).count(), 0);
        assert_eq!(index.range(19, 31).count(), 2);
        assert!(index.is_zero(20, 60) && !index.is_zero(19, 20));
    }
}
