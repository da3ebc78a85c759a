//! A sealed layer: the trailer is checked, the whole index is loaded.
//!
//! Reads every sealed kind (committed, sealed append, sparse, hybrid): they
//! differ in flags only. What is wrapped around them the [`Opener`] takes off. Invariant: the entries of a [`RoLayer`] are sorted,
//! disjoint, inside the virtual size, and point into the data part of the blob.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::blob::{Blob, BlobError, Opener, Wrapping};
use crate::format::{
    flags, Block, FormatError, Segment, BLOCK_BYTES, ENTRY_BYTES, FIRST_DATA_SECTOR,
    INVALID_SECTOR, MAX_LAYER_ENTRIES, SECTOR_BYTES,
};

/// Entries read from the index at a time (1 MiB).
const CHUNK_ENTRIES: u64 = 65_536;

/// Why a layer could not be opened.
#[derive(Debug, Error)]
pub enum LayerError {
    /// The file could not be opened as a blob.
    #[error("layer {path}: {source}")]
    Open {
        /// The layer file.
        path: PathBuf,
        /// The cause.
        source: BlobError,
    },
    /// A read failed.
    #[error("layer {path}: cannot read: {source}")]
    Io {
        /// The layer file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The bytes are not a sealed LSMT layer.
    #[error("layer {path}: {source}")]
    Format {
        /// The layer file.
        path: PathBuf,
        /// The cause.
        source: FormatError,
    },
}

/// An open sealed layer. Cheap to clone: the blob is shared.
#[derive(Clone)]
pub struct RoLayer {
    path: PathBuf,
    blob: Arc<dyn Blob>,
    wrapping: Wrapping,
    trailer: Block,
}

impl RoLayer {
    /// Opens the layer at `path` and reads its index.
    ///
    /// The index is returned beside the layer, because a stack merges it and
    /// then needs it no more.
    pub fn open(opener: &Opener, path: &Path) -> Result<(RoLayer, Vec<Segment>), LayerError> {
        let (blob, wrapping) = opener.open(path).map_err(|source| LayerError::Open {
            path: path.to_owned(),
            source,
        })?;
        let (mut layer, entries) = RoLayer::from_blob(path, blob)?;
        layer.wrapping = wrapping;
        Ok((layer, entries))
    }

    /// Opens a layer over any blob without wrappers; `path` is used in messages
    /// only.
    pub fn from_blob(
        path: &Path,
        blob: Arc<dyn Blob>,
    ) -> Result<(RoLayer, Vec<Segment>), LayerError> {
        let trailer = read_trailer(path, blob.as_ref())?;
        let entries = read_entries(path, blob.as_ref(), &trailer)?;
        let layer = RoLayer {
            path: path.to_owned(),
            blob,
            wrapping: Wrapping::default(),
            trailer,
        };
        Ok((layer, entries))
    }

    /// Builds the layer for a file this process has just sealed.
    pub(crate) fn just_sealed(path: &Path, blob: Arc<dyn Blob>, trailer: Block) -> RoLayer {
        RoLayer {
            path: path.to_owned(),
            blob,
            wrapping: Wrapping::default(),
            trailer,
        }
    }

    /// The file the layer was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The trailer: sizes and identity.
    pub fn trailer(&self) -> &Block {
        &self.trailer
    }

    /// What was taken off the file to get at the layer.
    pub fn wrapping(&self) -> &Wrapping {
        &self.wrapping
    }

    /// The bytes of the layer, without wrappers.
    pub fn blob(&self) -> &dyn Blob {
        self.blob.as_ref()
    }
}

fn read_block(
    path: &Path,
    blob: &dyn Blob,
    offset: u64,
    part: &'static str,
) -> Result<Block, LayerError> {
    let mut bytes = [0; BLOCK_BYTES];
    blob.read_exact_at(&mut bytes, offset)
        .map_err(|source| LayerError::Io {
            path: path.to_owned(),
            source,
        })?;
    Block::decode(&bytes, part).map_err(|source| LayerError::Format {
        path: path.to_owned(),
        source,
    })
}

/// Header magic, then the trailer in the last 4096 bytes (spec 1.3 steps 1-3).
fn read_trailer(path: &Path, blob: &dyn Blob) -> Result<Block, LayerError> {
    let fail = |source| LayerError::Format {
        path: path.to_owned(),
        source,
    };
    let size_bytes = blob.size_bytes();
    if size_bytes < 2 * BLOCK_BYTES as u64 {
        let part = "trailer";
        return Err(fail(FormatError::TooShort { part, size_bytes }));
    }
    let bad_flags = |part, flags, reason| {
        fail(FormatError::Flags {
            part,
            flags,
            reason,
        })
    };
    let header = read_block(path, blob, 0, "header")?;
    if header.flags & flags::DATA == 0 {
        let reason = "an index file is not a layer";
        return Err(bad_flags("header", header.flags, reason));
    }
    let trailer_offset = size_bytes - BLOCK_BYTES as u64;
    let trailer = read_block(path, blob, trailer_offset, "trailer")?;
    if trailer.flags & flags::DATA == 0 || trailer.flags & flags::SEALED == 0 {
        let reason = "a sealed data file is required";
        return Err(bad_flags("trailer", trailer.flags, reason));
    }
    if trailer.index_size > MAX_LAYER_ENTRIES {
        return Err(fail(FormatError::TooManyEntries {
            entries: trailer.index_size,
            limit: MAX_LAYER_ENTRIES,
        }));
    }
    let index_bytes = trailer.index_size * ENTRY_BYTES as u64;
    let end = trailer.index_offset.checked_add(index_bytes);
    let fits = end.is_some_and(|end| end <= trailer_offset);
    if !fits || trailer.index_offset < BLOCK_BYTES as u64 {
        return Err(fail(FormatError::IndexBounds {
            index_offset: trailer.index_offset,
            entries: trailer.index_size,
            limit: trailer_offset,
        }));
    }
    Ok(trailer)
}

fn read_entries(path: &Path, blob: &dyn Blob, trailer: &Block) -> Result<Vec<Segment>, LayerError> {
    let limit = Limit::of(trailer);
    let mut entries: Vec<Segment> = Vec::with_capacity(trailer.index_size as usize);
    let mut bytes = vec![0; (CHUNK_ENTRIES.min(trailer.index_size) as usize) * ENTRY_BYTES];
    let mut position = 0;
    let mut last_end = 0;
    while position < trailer.index_size {
        let count = CHUNK_ENTRIES.min(trailer.index_size - position);
        let chunk = &mut bytes[..count as usize * ENTRY_BYTES];
        let offset = trailer.index_offset + position * ENTRY_BYTES as u64;
        blob.read_exact_at(chunk, offset)
            .map_err(|source| LayerError::Io {
                path: path.to_owned(),
                source,
            })?;
        for raw in chunk.chunks_exact(ENTRY_BYTES) {
            let mut word = [0; ENTRY_BYTES];
            word.copy_from_slice(raw);
            let segment = Segment::decode(&word);
            if let Err(reason) = limit.check(&segment, last_end) {
                let source = FormatError::Entry { position, reason };
                return Err(LayerError::Format {
                    path: path.to_owned(),
                    source,
                });
            }
            if !segment.is_padding() {
                last_end = segment.end();
                if segment.offset() < limit.virtual_end {
                    entries.push(segment.clip(0, limit.virtual_end));
                }
            }
            position += 1;
        }
    }
    Ok(entries)
}

/// What every entry of one layer must respect (spec 1.3 step 4).
struct Limit {
    data_end: u64,
    virtual_end: u64,
}

impl Limit {
    fn of(trailer: &Block) -> Limit {
        let virtual_end = match trailer.virtual_size_bytes {
            0 => INVALID_SECTOR,
            size_bytes => size_bytes.div_ceil(SECTOR_BYTES).min(INVALID_SECTOR),
        };
        Limit {
            data_end: trailer.index_offset / SECTOR_BYTES,
            virtual_end,
        }
    }

    fn check(&self, segment: &Segment, last_end: u64) -> Result<(), &'static str> {
        if segment.is_padding() {
            return Ok(());
        }
        if segment.length() == 0 {
            return Err("length is zero");
        }
        if segment.end() > INVALID_SECTOR {
            return Err("range ends past the largest disk");
        }
        if segment.offset() < last_end {
            return Err("entries overlap or are not sorted");
        }
        if segment.moffset() < FIRST_DATA_SECTOR {
            return Err("data lies inside the header");
        }
        if segment.mend() > self.data_end {
            return Err("data lies past the start of the index");
        }
        Ok(())
    }
}
