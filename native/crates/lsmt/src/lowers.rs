//! The sealed part of a stack: open layers and their one merged index.

use std::path::PathBuf;

use crate::blob::Opener;
use crate::format::{Segment, MAX_LAYERS, NIL_UUID, SECTOR_BYTES};
use crate::layer::RoLayer;
use crate::merge::{MergedIndex, MAX_MERGED_ENTRIES};
use crate::stack_error::StackError;

/// The sealed layers of a stack and their merged index.
pub struct Lowers {
    pub(crate) layers: Vec<RoLayer>,
    pub(crate) index: MergedIndex,
}

impl Lowers {
    /// Opens layers, bottom first.
    pub fn open(opener: &Opener, paths: &[PathBuf]) -> Result<Lowers, StackError> {
        if paths.len() > MAX_LAYERS {
            let count = paths.len();
            return Err(StackError::TooManyLayers { count });
        }
        let mut layers = Vec::with_capacity(paths.len());
        let mut indexes = Vec::with_capacity(paths.len());
        let mut entries = 0;
        for path in paths {
            let (layer, index) = RoLayer::open(opener, path)?;
            entries += index.len();
            if entries > MAX_MERGED_ENTRIES {
                return Err(StackError::TooManyEntries { entries });
            }
            layers.push(layer);
            indexes.push(index);
        }
        let index = MergedIndex::build(indexes);
        Ok(Lowers { layers, index })
    }

    /// Layers already open, with their indexes, bottom first.
    pub fn from_layers(opened: Vec<(RoLayer, Vec<Segment>)>) -> Result<Lowers, StackError> {
        if opened.len() > MAX_LAYERS {
            let count = opened.len();
            return Err(StackError::TooManyLayers { count });
        }
        let (layers, indexes) = opened.into_iter().unzip();
        let index = MergedIndex::build(indexes);
        Ok(Lowers { layers, index })
    }

    /// The layers, bottom first.
    pub fn layers(&self) -> &[RoLayer] {
        &self.layers
    }

    /// The merged index.
    pub fn index(&self) -> &MergedIndex {
        &self.index
    }

    /// Size of the topmost layer that states one, else 0 (spec 1.9).
    pub fn virtual_size_bytes(&self) -> u64 {
        let mut sizes = self.layers.iter().rev();
        sizes
            .find_map(|layer| match layer.trailer().virtual_size_bytes {
                0 => None,
                size_bytes => Some(size_bytes),
            })
            .unwrap_or(0)
    }

    pub(crate) fn top_uuid(&self) -> &str {
        self.layers
            .last()
            .map_or(NIL_UUID, |layer| layer.trailer().uuid.as_str())
    }

    /// The layer and the byte of its file where all of `[start_bytes, end_bytes)` is in
    /// one piece, if it is.
    pub(crate) fn piece(&self, start_bytes: u64, end_bytes: u64) -> Option<(usize, u64)> {
        let (start, end) = (start_bytes / SECTOR_BYTES, end_bytes.div_ceil(SECTOR_BYTES));
        let segment = self.index.range(start, end).next()?;
        if segment.is_zeroed() || segment.offset() > start || segment.end() < end {
            return None;
        }
        let piece = segment.clip(start, end);
        let file_offset = piece.moffset() * SECTOR_BYTES + start_bytes % SECTOR_BYTES;
        Some((usize::from(piece.tag()), file_offset))
    }

    /// Fills the part of `target` inside the sectors `[start, end)`.
    pub(crate) fn read(
        &self,
        target: &mut Target<'_>,
        start: u64,
        end: u64,
    ) -> Result<(), StackError> {
        let mut cursor = start;
        for segment in self.index.range(start, end) {
            let piece = segment.clip(start, end);
            target.zero(cursor, piece.offset());
            cursor = piece.end();
            if piece.is_zeroed() {
                target.zero(piece.offset(), piece.end());
                continue;
            }
            let layer = &self.layers[usize::from(piece.tag())];
            let (bytes, file_offset) = target.place(&piece);
            layer
                .blob()
                .read_exact_at(bytes, file_offset)
                .map_err(|source| StackError::Read {
                    path: layer.path().to_owned(),
                    source,
                })?;
        }
        target.zero(cursor, end);
        Ok(())
    }
}

/// A caller's buffer and the disk position it stands for.
pub(crate) struct Target<'a> {
    /// The caller's buffer.
    pub buffer: &'a mut [u8],
    /// Disk position of its first byte.
    pub offset_bytes: u64,
}

impl Target<'_> {
    /// The part of the buffer inside the sectors, and how far into them it starts.
    fn part(&mut self, start: u64, end: u64) -> (&mut [u8], u64) {
        let limit = self.offset_bytes + self.buffer.len() as u64;
        let from = (start * SECTOR_BYTES).clamp(self.offset_bytes, limit);
        let to = (end * SECTOR_BYTES).clamp(from, limit);
        let base = self.offset_bytes;
        let bytes = &mut self.buffer[(from - base) as usize..(to - base) as usize];
        (bytes, from.saturating_sub(start * SECTOR_BYTES))
    }

    pub(crate) fn zero(&mut self, start: u64, end: u64) {
        if start < end {
            self.part(start, end).0.fill(0);
        }
    }

    /// Where to read a data segment to, and from which byte of its file.
    pub(crate) fn place(&mut self, segment: &Segment) -> (&mut [u8], u64) {
        let (bytes, shift) = self.part(segment.offset(), segment.end());
        (bytes, segment.moffset() * SECTOR_BYTES + shift)
    }
}
