//! Reads tar archives as container tools write them (ustar, pax, GNU and old star, sparse files among them), and writes pax ones.
//!
//! The archive is hostile: headers of headers are bounded, every size is checked, and nothing is read that was not asked for.

mod header;
mod pax;
mod sparse;
mod writer;

use std::io::{self, Read};

use thiserror::Error;

use header::Header;
use pax::Records;
pub use sparse::Part;
pub use writer::Writer;

pub(crate) const RECORD_BYTES: usize = 512;
/// Longest header of a header (long name, pax records), as other readers have it.
const EXTRA_BYTES_MAX: u64 = 1 << 20;
/// Most headers of headers before one member.
const EXTRAS_MAX: usize = 16;

/// Why an archive cannot be read.
#[derive(Debug, Error)]
pub enum TarError {
    /// The stream failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is no archive, or a damaged one.
    #[error("malformed archive: {0}")]
    Malformed(String),
}

pub(crate) fn malformed(what: impl Into<String>) -> TarError {
    TarError::Malformed(what.into())
}

/// What a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberKind {
    /// Regular file.
    File,
    /// Another name of a file.
    HardLink,
    /// Symbolic link.
    Symlink,
    /// Character device.
    Character,
    /// Block device.
    Block,
    /// Directory.
    Directory,
    /// Named pipe.
    Fifo,
}

/// One member; its content, if it has any, is read from the archive.
#[derive(Debug, Clone)]
pub struct Member {
    /// As it is in the archive.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: MemberKind,
    /// Target of a link.
    pub link: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u64,
    /// Group.
    pub gid: u64,
    /// Seconds since the epoch.
    pub mtime_s: i64,
    /// And nanoseconds.
    pub mtime_ns: u32,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Extended attributes by full name.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Size of the file, holes included.
    pub size_bytes: u64,
}

/// An archive being read.
pub struct Archive<R> {
    stream: R,
    /// Content bytes of the current member not read yet, and the padding after them.
    left_bytes: u64,
    padding_bytes: u64,
    /// Parts of the current file still to come, last first.
    parts: Vec<Part>,
    globals: Records,
    is_over: bool,
}

impl<R: Read> Archive<R> {
    /// An archive on a stream.
    pub fn new(stream: R) -> Archive<R> {
        Archive {
            stream,
            left_bytes: 0,
            padding_bytes: 0,
            parts: Vec::new(),
            globals: Records::default(),
            is_over: false,
        }
    }

    /// The next member; what was not read of the one before is skipped. None at the end.
    pub fn next_member(&mut self) -> Result<Option<Member>, TarError> {
        self.skip_rest()?;
        let mut records = self.globals.clone();
        let (mut long_path, mut long_link) = (None, None);
        for _ in 0..EXTRAS_MAX {
            let Some(header) = self.read_header()? else {
                return Ok(None);
            };
            match header.type_flag {
                b'x' => records.merge(&self.read_extra(&header)?)?,
                b'g' => {
                    let extra = self.read_extra(&header)?;
                    self.globals.merge(&extra)?;
                    records.merge(&extra)?;
                }
                b'L' => long_path = Some(text(&self.read_extra(&header)?)),
                b'K' => long_link = Some(text(&self.read_extra(&header)?)),
                _ => {
                    return self
                        .member(&header, &records, long_path, long_link)
                        .map(Some)
                }
            }
        }
        Err(malformed("too many headers before one member"))
    }

    /// Reads on to the end of the stream: what follows the archive belongs to its checksum.
    pub fn drain(&mut self) -> Result<(), TarError> {
        io::copy(&mut self.stream, &mut io::sink())?;
        Ok(())
    }

    /// The next piece of the current file: its offset and how many bytes of `buffer` are filled. None at its end.
    pub fn read_content(&mut self, buffer: &mut [u8]) -> Result<Option<(u64, usize)>, TarError> {
        while let Some(part) = self.parts.last_mut() {
            if part.length == 0 {
                self.parts.pop();
                continue;
            }
            let count = part.length.min(buffer.len() as u64) as usize;
            let offset = part.offset;
            part.offset += count as u64;
            part.length -= count as u64;
            self.read_exact(&mut buffer[..count])?;
            return Ok(Some((offset, count)));
        }
        Ok(None)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), TarError> {
        if buffer.len() as u64 > self.left_bytes {
            return Err(malformed("a file is shorter than its parts say"));
        }
        self.left_bytes -= buffer.len() as u64;
        self.stream.read_exact(buffer).map_err(cut_off)
    }

    fn skip_rest(&mut self) -> Result<(), TarError> {
        self.parts.clear();
        let wanted = self.left_bytes + self.padding_bytes;
        let skipped = io::copy(&mut self.stream.by_ref().take(wanted), &mut io::sink())?;
        if skipped < self.left_bytes {
            return Err(malformed("it ends in the middle of a member"));
        }
        (self.left_bytes, self.padding_bytes) = (0, 0);
        Ok(())
    }

    /// None at the end: two empty records, or the end of the stream.
    fn read_header(&mut self) -> Result<Option<Header>, TarError> {
        for _ in 0..2 {
            let mut record = [0; RECORD_BYTES];
            if self.is_over || !read_record(&mut self.stream, &mut record)? {
                break;
            }
            if record.iter().any(|byte| *byte != 0) {
                return Header::parse(&record).map(Some);
            }
        }
        self.is_over = true;
        Ok(None)
    }

    fn expect(&mut self, size_bytes: u64) {
        self.left_bytes = size_bytes;
        let over = size_bytes % RECORD_BYTES as u64;
        self.padding_bytes = if over == 0 {
            0
        } else {
            RECORD_BYTES as u64 - over
        };
    }

    fn read_extra(&mut self, header: &Header) -> Result<Vec<u8>, TarError> {
        if header.size_bytes > EXTRA_BYTES_MAX {
            return Err(malformed("a header of a member is too long"));
        }
        self.expect(header.size_bytes);
        let mut bytes = vec![0; header.size_bytes as usize];
        self.read_exact(&mut bytes)?;
        self.skip_rest()?;
        Ok(bytes)
    }

    fn member(
        &mut self,
        header: &Header,
        records: &Records,
        long_path: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<Member, TarError> {
        let path = records
            .path()
            .or(long_path)
            .unwrap_or_else(|| header.path.clone());
        let kind = header.kind(&path)?;
        let (mtime_s, mtime_ns) = records.mtime()?.unwrap_or((header.mtime_s, 0));
        let mut member = Member {
            kind,
            path,
            link: records
                .link()
                .or(long_link)
                .unwrap_or_else(|| header.link.clone()),
            mode: header.mode,
            uid: records.number("uid")?.unwrap_or(header.uid),
            gid: records.number("gid")?.unwrap_or(header.gid),
            mtime_s,
            mtime_ns,
            device: header.device,
            xattrs: records.xattrs(),
            size_bytes: 0,
        };
        if kind == MemberKind::File {
            let stored = records.number("size")?.unwrap_or(header.size_bytes);
            self.expect(stored);
            self.start_file(&mut member, header, records, stored)?;
        }
        Ok(member)
    }

    fn start_file(
        &mut self,
        member: &mut Member,
        header: &Header,
        records: &Records,
        stored: u64,
    ) -> Result<(), TarError> {
        let (parts, size_bytes) = if header.type_flag == b'S' {
            let mut extensions = Vec::new();
            let mut goes_on = header.sparse_goes_on;
            while goes_on {
                let mut record = [0; RECORD_BYTES];
                self.stream.read_exact(&mut record).map_err(cut_off)?;
                goes_on = record[504] != 0;
                sparse::add_old(&mut extensions, &record[..504])?;
            }
            (
                [header.sparse_parts.clone(), extensions].concat(),
                header.real_size_bytes,
            )
        } else if records.is_sparse_1_0() {
            (self.read_sparse_map()?, records.real_size()?)
        } else if let Some(parts) = records.sparse_map()? {
            (parts, records.real_size()?)
        } else {
            let whole = Part {
                offset: 0,
                length: stored,
            };
            (vec![whole], stored)
        };
        sparse::check(&parts, size_bytes, self.left_bytes)?;
        member.size_bytes = size_bytes;
        self.parts = parts;
        self.parts.reverse();
        Ok(())
    }

    /// GNU's pax format 1.0: the map is in the content, as lines of numbers in whole records.
    fn read_sparse_map(&mut self) -> Result<Vec<Part>, TarError> {
        let mut lines = sparse::Lines::default();
        while !lines.is_complete()? {
            let mut record = [0; RECORD_BYTES];
            self.read_exact(&mut record)?;
            lines.add(&record);
        }
        lines.parts()
    }
}

fn cut_off(error: io::Error) -> TarError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => malformed("it ends in the middle of a member"),
        _ => TarError::Io(error),
    }
}

/// False at the end of the stream; an error in the middle of a record.
fn read_record(stream: &mut impl Read, record: &mut [u8; RECORD_BYTES]) -> Result<bool, TarError> {
    let mut filled = 0;
    while filled < RECORD_BYTES {
        match stream.read(&mut record[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(malformed("it ends in the middle of a header")),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

/// Bytes up to the first zero.
pub(crate) fn text(bytes: &[u8]) -> Vec<u8> {
    bytes
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default()
        .to_vec()
}

#[cfg(test)]
mod tests;
