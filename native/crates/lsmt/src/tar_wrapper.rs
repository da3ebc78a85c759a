//! The tar wrapper of a layer in an OCI image (overlaybd spec 3): one file entry
//! whose content is the layer.
//!
//! ```text
//! written: pax header | "NN size=SIZE\n" | file header | layer | 0 to 512 | two zero blocks
//! ```

use std::io::{self, Read};

use thiserror::Error;

use crate::blob::Blob;

/// Bytes of a tar header.
const HEADER_BYTES: usize = 512;
/// Headers and extended records before the content, at most.
const MAX_HEADERS_BYTES: u64 = 64 << 10;
/// What a reference writer puts in place of `ustar` until it has finished.
const UNFINISHED: &[u8] = b"xxtar";

/// Bytes before the content of a written wrapper; the reference expects just these.
pub(crate) const HEADERS_BYTES: usize = 3 * HEADER_BYTES;
/// Largest size that the field of a plain header can state.
const MAX_OCTAL_BYTES: u64 = (8 << 30) - 1;
/// Type and permissions of the file, as the reference states both.
const FILE_MODE: u32 = 0o100_644;

/// Why a tar wrapper is not usable.
#[derive(Debug, Error)]
pub enum TarError {
    /// The headers could not be read or make no sense.
    #[error("cannot read the headers of the tar wrapper: {0}")]
    Headers(#[from] io::Error),
    /// Its writer has not finished.
    #[error("the tar wrapper is unfinished: its writer was interrupted; convert the layer again")]
    Unfinished,
    /// The archive starts with something else than a file.
    #[error("the tar archive does not start with a file, so it wraps no layer")]
    NoFile,
    /// The content is cut off.
    #[error(
        "the tar wrapper promises {wanted_bytes} bytes at byte {offset}, the file has {size_bytes}"
    )]
    Short {
        /// Where the content starts.
        offset: u64,
        /// Its length.
        wanted_bytes: u64,
        /// Size of the file.
        size_bytes: u64,
    },
}

/// Where the content of the first file of a tar archive lies: offset and length.
/// `None` when the blob is no tar archive.
pub fn payload(blob: &dyn Blob, start: &[u8]) -> Result<Option<(u64, u64)>, TarError> {
    let Some(header) = start.get(..HEADER_BYTES) else {
        return Ok(None);
    };
    if &header[257..262] == UNFINISHED {
        return Err(TarError::Unfinished);
    }
    if &header[257..262] != b"ustar" || !has_checksum(header) {
        return Ok(None);
    }
    let reader = Headers { blob, position: 0 }.take(MAX_HEADERS_BYTES);
    let mut archive = tar::Archive::new(reader);
    let Some(entry) = archive.entries()?.next() else {
        return Err(TarError::NoFile);
    };
    let entry = entry?;
    if !entry.header().entry_type().is_file() {
        return Err(TarError::NoFile);
    }
    let (offset, wanted_bytes) = (entry.raw_file_position(), entry.size());
    let end = offset.checked_add(wanted_bytes);
    if end.is_none_or(|end| end > blob.size_bytes()) {
        return Err(TarError::Short {
            offset,
            wanted_bytes,
            size_bytes: blob.size_bytes(),
        });
    }
    Ok(Some((offset, wanted_bytes)))
}

/// The headers before a layer of `size_bytes`: exactly one extended record and
/// one file header.
pub(crate) fn headers(size_bytes: u64) -> io::Result<[u8; HEADERS_BYTES]> {
    let record = size_record(size_bytes);
    let mut bytes = [0; HEADERS_BYTES];
    let pax_type = tar::EntryType::XHeader;
    let pax = header("overlaybd.pax", pax_type, 0, record.len() as u64)?;
    bytes[..HEADER_BYTES].copy_from_slice(&pax);
    bytes[HEADER_BYTES..HEADER_BYTES + record.len()].copy_from_slice(record.as_bytes());
    let stated_bytes = if size_bytes <= MAX_OCTAL_BYTES {
        size_bytes
    } else {
        0
    };
    let file_type = tar::EntryType::Regular;
    let file = header("overlaybd.commit", file_type, FILE_MODE, stated_bytes)?;
    bytes[2 * HEADER_BYTES..].copy_from_slice(&file);
    Ok(bytes)
}

/// What follows a layer of `size_bytes`: padding and the end of the archive.
pub(crate) fn end(size_bytes: u64) -> Vec<u8> {
    let padding = size_bytes.next_multiple_of(HEADER_BYTES as u64) - size_bytes;
    vec![0; padding as usize + 2 * HEADER_BYTES]
}

fn header(
    name: &str,
    kind: tar::EntryType,
    mode: u32,
    size_bytes: u64,
) -> io::Result<[u8; HEADER_BYTES]> {
    let mut header = tar::Header::new_ustar();
    header.set_path(name)?;
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size_bytes);
    header.set_username("root")?;
    header.set_groupname("root")?;
    header.set_cksum();
    Ok(*header.as_bytes())
}

/// `LENGTH size=SIZE` and a line end, where LENGTH counts itself.
fn size_record(size_bytes: u64) -> String {
    let rest = format!(" size={size_bytes}\n");
    let mut length = rest.len();
    while length != rest.len() + length.to_string().len() {
        length = rest.len() + length.to_string().len();
    }
    format!("{length}{rest}")
}

/// Whether the header's checksum is right, so that these are no chance bytes.
fn has_checksum(header: &[u8]) -> bool {
    let text = String::from_utf8_lossy(&header[148..156]);
    let text = text.trim_matches(|letter: char| letter == '\0' || letter == ' ');
    let sum = |field: std::ops::Range<usize>| -> u64 {
        header[field].iter().map(|byte| u64::from(*byte)).sum()
    };
    // The field itself counts as blanks.
    let expected = sum(0..148) + 8 * u64::from(b' ') + sum(156..HEADER_BYTES);
    u64::from_str_radix(text, 8) == Ok(expected)
}

/// A blob as a stream.
struct Headers<'a> {
    blob: &'a dyn Blob,
    position: u64,
}

impl Read for Headers<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.blob.size_bytes().saturating_sub(self.position);
        let count = left.min(buffer.len() as u64) as usize;
        self.blob
            .read_exact_at(&mut buffer[..count], self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}
