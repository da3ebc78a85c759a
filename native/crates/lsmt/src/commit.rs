//! Makes one sealed layer out of sealed layers or of a raw image.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::format::{Segment, NIL_UUID, SECTOR_BYTES};
use crate::layer::RoLayer;
use crate::lowers::Lowers;
use crate::sink::Encoding;
use crate::stack_error::StackError;
use crate::sys;
use crate::writer::{LayerInfo, LayerOptions, LayerWriter, WriteError};

/// Bytes copied at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Granularity at which zeros of an imported image are left out.
const IMPORT_BLOCK_BYTES: usize = 4096;

/// What a committed layer states about itself, how it is wrapped, and whether it
/// is durable at once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommitOptions {
    /// Its identity; a random one when absent.
    pub uuid: Option<String>,
    /// Identity of the layer below; that of the bottom layer's when absent.
    pub parent_uuid: Option<String>,
    /// Free text, cut at 256 bytes.
    pub user_tag: String,
    /// Wrappers.
    pub encoding: Encoding,
    /// Whether content and name must be durable on return.
    pub sync: bool,
}

/// Flattens layers into one sealed layer.
///
/// Overwritten data disappears; zeroed ranges are kept, so the result may stand
/// on top of the layers below the given ones. The same layers and options with a
/// given `uuid` make the same bytes, on one version of this program.
pub fn commit(
    lowers: &Lowers,
    output: &Path,
    options: &CommitOptions,
) -> Result<LayerInfo, StackError> {
    let bottom = lowers.layers().first();
    let below = bottom.map_or(NIL_UUID, |layer| layer.trailer().parent_uuid.as_str());
    let layer = LayerOptions {
        virtual_size_bytes: lowers.virtual_size_bytes(),
        uuid: options.uuid.clone(),
        parent_uuid: options.parent_uuid.clone().unwrap_or(below.to_owned()),
        user_tag: options.user_tag.clone(),
        encoding: options.encoding,
    };
    let mut writer = LayerWriter::create(output, &layer)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    for segment in lowers.index().segments() {
        if segment.is_zeroed() {
            writer.append_zeroed(segment.offset(), segment.length())?;
        } else {
            let layer = &lowers.layers()[usize::from(segment.tag())];
            copy_segment(&mut writer, layer, segment, &mut buffer)?;
        }
    }
    Ok(writer.finish(options.sync)?)
}

fn copy_segment(
    writer: &mut LayerWriter,
    layer: &RoLayer,
    segment: &Segment,
    buffer: &mut [u8],
) -> Result<(), StackError> {
    let mut start = segment.offset();
    while start < segment.end() {
        let end = segment
            .end()
            .min(start + buffer.len() as u64 / SECTOR_BYTES);
        let piece = segment.clip(start, end);
        let bytes = &mut buffer[..(piece.length() * SECTOR_BYTES) as usize];
        layer
            .blob()
            .read_exact_at(bytes, piece.moffset() * SECTOR_BYTES)
            .map_err(|source| StackError::Read {
                path: layer.path().to_owned(),
                source,
            })?;
        writer.append_data(start, bytes)?;
        start = end;
    }
    Ok(())
}

/// Makes a bottom layer of a raw image: holes and all-zero 4 KiB blocks are
/// left out. The virtual size is that of the image (rounded up to a sector)
/// unless a larger one is given.
pub fn import_raw(
    source: &Path,
    output: &Path,
    virtual_size_bytes: Option<u64>,
    sync: bool,
) -> Result<LayerInfo, StackError> {
    import_raw_as(source, output, virtual_size_bytes, None, sync)
}

/// As [`import_raw`], with a chosen identity, so that equal images make equal
/// files.
pub fn import_raw_as(
    source: &Path,
    output: &Path,
    virtual_size_bytes: Option<u64>,
    uuid: Option<String>,
    sync: bool,
) -> Result<LayerInfo, StackError> {
    let failed = |error| StackError::Read {
        path: source.to_owned(),
        source: error,
    };
    let file = File::open(source).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        let message = "a raw image must be a regular file";
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, message)));
    }
    let size_bytes = metadata.len().next_multiple_of(SECTOR_BYTES);
    let wanted_bytes = virtual_size_bytes.unwrap_or(size_bytes);
    if wanted_bytes < size_bytes || wanted_bytes % SECTOR_BYTES != 0 {
        return Err(StackError::BadSize {
            wanted_bytes,
            least_bytes: size_bytes,
        });
    }
    let options = LayerOptions {
        uuid,
        ..LayerOptions::new(wanted_bytes)
    };
    let mut writer = LayerWriter::create(output, &options)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut offset = 0;
    while let Some(data) = sys::seek_data(&file, offset).map_err(failed)? {
        // Whole blocks from aligned places, so that entries stay 4 KiB aligned.
        offset = data / IMPORT_BLOCK_BYTES as u64 * IMPORT_BLOCK_BYTES as u64;
        let count = read_some(&file, &mut buffer, offset).map_err(failed)?;
        if count == 0 {
            break;
        }
        let padded = count.next_multiple_of(SECTOR_BYTES as usize);
        buffer[count..padded].fill(0);
        append_nonzero(&mut writer, offset, &buffer[..padded])?;
        offset += count as u64;
        if count < buffer.len() {
            break;
        }
    }
    Ok(writer.finish(sync)?)
}

/// Reads until the buffer is full or the file ends.
fn read_some(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn append_nonzero(writer: &mut LayerWriter, offset: u64, bytes: &[u8]) -> Result<(), WriteError> {
    let mut run_start = None;
    for (block, content) in bytes.chunks(IMPORT_BLOCK_BYTES).enumerate() {
        let at = block * IMPORT_BLOCK_BYTES;
        if !is_zero(content) {
            run_start.get_or_insert(at);
        } else if let Some(start) = run_start.take() {
            let sector = (offset + start as u64) / SECTOR_BYTES;
            writer.append_data(sector, &bytes[start..at])?;
        }
    }
    if let Some(start) = run_start {
        let sector = (offset + start as u64) / SECTOR_BYTES;
        writer.append_data(sector, &bytes[start..])?;
    }
    Ok(())
}

/// Whether every byte is zero; compares 16 bytes at a time.
pub fn is_zero(bytes: &[u8]) -> bool {
    let mut words = bytes.chunks_exact(16);
    let rest_is_zero = |rest: &[u8]| rest.iter().all(|byte| *byte == 0);
    words.all(|word| *word == [0; 16]) && rest_is_zero(words.remainder())
}
