//! Writes one sealed layer in a single pass (spec 1.4), wrapped as asked for.
//!
//! Invariants: ranges are given in disk order; the output appears under its
//! final name only when it is complete; a writer dropped before
//! [`LayerWriter::finish`] removes its temporary file.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::extents::join;
use crate::format::{
    encode_entries, flags, new_uuid, Block, Segment, BLOCK_BYTES, ENTRY_BYTES, FIRST_DATA_SECTOR,
    INVALID_SECTOR, MAX_ENTRY_SECTORS, MAX_LAYER_ENTRIES, NIL_UUID, SECTOR_BYTES,
};
use crate::sink::{Encoding, Sink};
use crate::sys;

/// Small appends are gathered to writes of this size.
const BUFFER_BYTES: usize = 1 << 20;

/// Why a layer could not be written.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The operating system refused.
    #[error("layer {path}: cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The output file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A range starts before the end of the one before it, or past the largest disk.
    #[error("layer {path}: range at sector {offset} is out of order or too far")]
    OutOfOrder {
        /// The output file.
        path: PathBuf,
        /// First sector of the range.
        offset: u64,
    },
    /// The content is too fragmented for one layer.
    #[error("layer {path}: more than {MAX_LAYER_ENTRIES} ranges do not fit in one layer")]
    TooManyEntries {
        /// The output file.
        path: PathBuf,
    },
}

/// What [`LayerWriter::finish`] produced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerInfo {
    /// The layer file.
    pub path: PathBuf,
    /// Its size.
    pub size_bytes: u64,
    /// Size of the virtual disk.
    pub virtual_size_bytes: u64,
    /// Bytes of data in it.
    pub stored_bytes: u64,
    /// Its identity.
    pub uuid: String,
}

/// What a new layer states about itself, and what is wrapped around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerOptions {
    /// Size of the virtual disk.
    pub virtual_size_bytes: u64,
    /// Its identity; a random one when absent.
    pub uuid: Option<String>,
    /// Identity of the layer below.
    pub parent_uuid: String,
    /// Free text, cut at 256 bytes.
    pub user_tag: String,
    /// Wrappers.
    pub encoding: Encoding,
}

impl LayerOptions {
    /// A plain layer for a disk of that size, with nothing said about what is below.
    pub fn new(virtual_size_bytes: u64) -> LayerOptions {
        LayerOptions {
            virtual_size_bytes,
            uuid: None,
            parent_uuid: NIL_UUID.to_owned(),
            user_tag: String::new(),
            encoding: Encoding::default(),
        }
    }
}

/// A layer being written to `<output>.tmp`.
pub struct LayerWriter {
    output: PathBuf,
    temporary: PathBuf,
    sink: Sink,
    header: Block,
    entries: Vec<Segment>,
    buffer: Vec<u8>,
    /// Bytes of the layer already written; the buffer follows them.
    written_bytes: u64,
    is_finished: bool,
}

impl LayerWriter {
    /// Starts a layer. An older temporary file of the same name is overwritten;
    /// the output itself is replaced at the end only.
    pub fn create(output: &Path, options: &LayerOptions) -> Result<LayerWriter, WriteError> {
        let mut name = output.as_os_str().to_owned();
        name.push(".tmp");
        let temporary = PathBuf::from(name);
        let file = File::create(&temporary).map_err(|source| WriteError::Io {
            action: "create",
            path: temporary.clone(),
            source,
        })?;
        let header = Block {
            flags: flags::HEADER | flags::DATA | flags::SEALED,
            index_offset: 0,
            index_size: 0,
            virtual_size_bytes: options.virtual_size_bytes,
            uuid: options.uuid.clone().unwrap_or_else(new_uuid),
            parent_uuid: options.parent_uuid.clone(),
            user_tag: options.user_tag.clone(),
        };
        Ok(LayerWriter {
            output: output.to_owned(),
            temporary,
            sink: Sink::new(file, &options.encoding),
            buffer: header.encode().to_vec(),
            header,
            entries: Vec::new(),
            written_bytes: 0,
            is_finished: false,
        })
    }

    /// Appends whole sectors that belong at `offset` (sectors).
    pub fn append_data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), WriteError> {
        debug_assert_eq!(bytes.len() as u64 % SECTOR_BYTES, 0);
        let mut moffset = (self.written_bytes + self.buffer.len() as u64) / SECTOR_BYTES;
        let mut start = offset;
        let end = offset + bytes.len() as u64 / SECTOR_BYTES;
        while start < end {
            let sectors = (end - start).min(MAX_ENTRY_SECTORS);
            self.push(start, sectors, Segment::data, moffset)?;
            start += sectors;
            moffset += sectors;
        }
        if self.buffer.len() + bytes.len() > BUFFER_BYTES {
            self.write_buffer()?;
        }
        if bytes.len() < BUFFER_BYTES / 4 {
            self.buffer.extend_from_slice(bytes);
            return Ok(());
        }
        self.write_buffer()?;
        self.write(bytes)
    }

    /// Records that `sectors` at `offset` read as zero and hide lower layers.
    pub fn append_zeroed(&mut self, offset: u64, sectors: u64) -> Result<(), WriteError> {
        let moffset = (self.written_bytes + self.buffer.len() as u64) / SECTOR_BYTES;
        let mut start = offset;
        let end = offset + sectors;
        while start < end {
            let sectors = (end - start).min(MAX_ENTRY_SECTORS);
            self.push(start, sectors, Segment::zeroed, moffset)?;
            start += sectors;
        }
        Ok(())
    }

    fn push(
        &mut self,
        offset: u64,
        sectors: u64,
        make: fn(u64, u64, u64) -> Segment,
        moffset: u64,
    ) -> Result<(), WriteError> {
        let last_end = self.entries.last().map_or(0, Segment::end);
        if offset < last_end || offset + sectors > INVALID_SECTOR {
            let path = self.output.clone();
            return Err(WriteError::OutOfOrder { path, offset });
        }
        let entry = make(offset, sectors, moffset);
        if let Some(last) = self.entries.last_mut() {
            if let Some(joined) = join(last, &entry) {
                *last = joined;
                return Ok(());
            }
        }
        if self.entries.len() as u64 >= MAX_LAYER_ENTRIES {
            let path = self.output.clone();
            return Err(WriteError::TooManyEntries { path });
        }
        self.entries.push(entry);
        Ok(())
    }

    /// Writes index and trailer and gives the file its final name. With `sync`
    /// the content and the name are durable when this returns.
    pub fn finish(mut self, sync: bool) -> Result<LayerInfo, WriteError> {
        let index_offset = self.written_bytes + self.buffer.len() as u64;
        let stored_bytes = index_offset - FIRST_DATA_SECTOR * SECTOR_BYTES;
        let per_block = BLOCK_BYTES / ENTRY_BYTES;
        let padded = self.entries.len().next_multiple_of(per_block);
        self.entries.resize(padded, Segment::PADDING);
        let trailer = Block {
            flags: flags::DATA | flags::SEALED,
            index_offset,
            index_size: padded as u64,
            ..self.header.clone()
        };
        let index = encode_entries(&self.entries);
        self.write_buffer()?;
        self.write(&index)?;
        self.write(&trailer.encode())?;
        let finished = self.sink.finish(sync);
        let size_bytes = finished.map_err(|source| self.io_error("flush", source))?;
        std::fs::rename(&self.temporary, &self.output)
            .map_err(|source| self.io_error("rename", source))?;
        self.is_finished = true;
        if sync {
            sys::sync_parent(&self.output).map_err(|source| self.io_error("flush", source))?;
        }
        Ok(LayerInfo {
            path: self.output.clone(),
            size_bytes,
            virtual_size_bytes: self.header.virtual_size_bytes,
            stored_bytes,
            uuid: self.header.uuid.clone(),
        })
    }

    fn write_buffer(&mut self) -> Result<(), WriteError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let result = self.write(&buffer);
        buffer.clear();
        self.buffer = buffer;
        result
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        let written = self.sink.append(bytes);
        written.map_err(|source| self.io_error("write", source))?;
        self.written_bytes += bytes.len() as u64;
        Ok(())
    }

    fn io_error(&self, action: &'static str, source: io::Error) -> WriteError {
        let path = self.output.clone();
        WriteError::Io {
            action,
            path,
            source,
        }
    }
}

impl Drop for LayerWriter {
    fn drop(&mut self) {
        if !self.is_finished {
            // Best effort: the next writer of the same output overwrites it.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}
