//! Reading the two files of an upper that keeps a log back into a map (spec 1.6).
//!
//! Recovery keeps the longest prefix of the record log that is whole: a torn
//! last record, a tail of zero bytes, and records whose data lies past the end
//! of the data file are cut off. By the flush order (data before records) no
//! record that a flush confirmed is ever among them. Anything else that does
//! not fit is an error, not a guess.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::extents::ExtentMap;
use crate::format::{
    flags, Block, FormatError, Segment, BLOCK_BYTES, ENTRY_BYTES, FIRST_DATA_SECTOR,
    INVALID_SECTOR, MAX_UPPER_RECORDS, SECTOR_BYTES,
};

use super::{sparse, UpperError};

/// Records read at a time (1 MiB).
const CHUNK_RECORDS: u64 = 65_536;

/// What was found in the two files of an upper.
pub(crate) struct Replay {
    /// Header of the data file.
    pub header: Block,
    /// The live map.
    pub map: ExtentMap,
    /// Sector at which the next data is appended.
    pub data_end: u64,
    /// Bytes of the index file that are good.
    pub index_bytes: u64,
    /// Records replayed.
    pub records: u64,
    /// Bytes of the index file cut off by recovery.
    pub dropped_bytes: u64,
}

/// Reads the log without changing either file.
pub(crate) fn replay(
    data_path: &Path,
    data: &File,
    index_path: &Path,
    index: &File,
) -> Result<Replay, UpperError> {
    let header = read_header(data_path, data)?;
    if header.flags & flags::SPARSE != 0 {
        return sparse::scan(data_path, data, header);
    }
    let index_header = read_header(index_path, index)?;
    check_headers(data_path, data, &header, index_path, &index_header)?;
    let data_bytes = size_of(data_path, data)?;
    let index_file_bytes = size_of(index_path, index)?;
    let total = (index_file_bytes - BLOCK_BYTES as u64) / ENTRY_BYTES as u64;
    if total > MAX_UPPER_RECORDS {
        let limit = MAX_UPPER_RECORDS;
        let source = FormatError::TooManyEntries {
            entries: total,
            limit,
        };
        return Err(UpperError::format(index_path, source));
    }
    let mut reader = LogReader {
        path: index_path,
        file: index,
        total,
        data_end: data_bytes / SECTOR_BYTES,
        map: ExtentMap::default(),
        kept: 0,
    };
    reader.run()?;
    let index_bytes = BLOCK_BYTES as u64 + reader.kept * ENTRY_BYTES as u64;
    Ok(Replay {
        header,
        map: reader.map,
        data_end: data_bytes.div_ceil(SECTOR_BYTES).max(FIRST_DATA_SECTOR),
        index_bytes,
        records: reader.kept,
        dropped_bytes: index_file_bytes - index_bytes,
    })
}

/// Whether the last block of the file is a sealed trailer.
pub(crate) fn is_sealed(path: &Path, data: &File) -> Result<bool, UpperError> {
    let size_bytes = size_of(path, data)?;
    if size_bytes < 2 * BLOCK_BYTES as u64 {
        return Ok(false);
    }
    let mut bytes = [0; BLOCK_BYTES];
    data.read_exact_at(&mut bytes, size_bytes - BLOCK_BYTES as u64)
        .map_err(|source| UpperError::io("read", path, source))?;
    let sealed = flags::DATA | flags::SEALED;
    Ok(Block::decode(&bytes, "trailer").is_ok_and(|block| block.flags & sealed == sealed))
}

pub(crate) fn size_of(path: &Path, file: &File) -> Result<u64, UpperError> {
    let metadata = file.metadata();
    Ok(metadata
        .map_err(|source| UpperError::io("stat", path, source))?
        .len())
}

pub(crate) fn read_header(path: &Path, file: &File) -> Result<Block, UpperError> {
    let mut bytes = [0; BLOCK_BYTES];
    match file.read_exact_at(&mut bytes, 0) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            let part = "header";
            let size_bytes = size_of(path, file)?;
            return Err(UpperError::format(
                path,
                FormatError::TooShort { part, size_bytes },
            ));
        }
        Err(source) => return Err(UpperError::io("read", path, source)),
    }
    Block::decode(&bytes, "header").map_err(|source| UpperError::format(path, source))
}

fn check_headers(
    data_path: &Path,
    data: &File,
    header: &Block,
    index_path: &Path,
    index_header: &Block,
) -> Result<(), UpperError> {
    let bad = |path, flags, reason| {
        let part = "header";
        Err(UpperError::format(
            path,
            FormatError::Flags {
                part,
                flags,
                reason,
            },
        ))
    };
    if header.flags & flags::DATA == 0 {
        return bad(data_path, header.flags, "not an upper's data file");
    }
    if header.flags & flags::SEALED != 0 || is_sealed(data_path, data)? {
        return Err(UpperError::Sealed {
            path: data_path.to_owned(),
        });
    }
    if index_header.flags & flags::DATA != 0 {
        return bad(index_path, index_header.flags, "not an upper's index file");
    }
    if header.uuid != index_header.uuid {
        return Err(UpperError::Mismatch {
            data: data_path.to_owned(),
            index: index_path.to_owned(),
        });
    }
    Ok(())
}

struct LogReader<'a> {
    path: &'a Path,
    file: &'a File,
    total: u64,
    /// Whole sectors in the data file.
    data_end: u64,
    map: ExtentMap,
    kept: u64,
}

impl LogReader<'_> {
    fn run(&mut self) -> Result<(), UpperError> {
        let mut buffer = vec![0; CHUNK_RECORDS.min(self.total) as usize * ENTRY_BYTES];
        while self.kept < self.total {
            let count = CHUNK_RECORDS.min(self.total - self.kept) as usize;
            let chunk = &mut buffer[..count * ENTRY_BYTES];
            let offset = BLOCK_BYTES as u64 + self.kept * ENTRY_BYTES as u64;
            self.file
                .read_exact_at(chunk, offset)
                .map_err(|source| UpperError::io("read", self.path, source))?;
            for raw in chunk.chunks_exact(ENTRY_BYTES) {
                if raw.iter().all(|byte| *byte == 0) {
                    return self.require_zero_tail();
                }
                let mut word = [0; ENTRY_BYTES];
                word.copy_from_slice(raw);
                let record = Segment::decode(&word);
                if record.is_padding() {
                    self.kept += 1;
                    continue;
                }
                self.check(&record)?;
                if record.mend() > self.data_end {
                    return Ok(());
                }
                self.map.insert(record);
                self.kept += 1;
            }
        }
        Ok(())
    }

    fn check(&self, record: &Segment) -> Result<(), UpperError> {
        let reason = if record.length() == 0 {
            "length is zero"
        } else if record.end() > INVALID_SECTOR {
            "range ends past the largest disk"
        } else if record.moffset() < FIRST_DATA_SECTOR {
            "data lies inside the header"
        } else {
            return Ok(());
        };
        Err(self.bad_record(reason))
    }

    fn bad_record(&self, reason: &'static str) -> UpperError {
        let position = self.kept;
        UpperError::format(self.path, FormatError::Entry { position, reason })
    }

    /// A crash can leave the file longer than what was written to it; zeros in
    /// the middle of the log are damage instead.
    fn require_zero_tail(&self) -> Result<(), UpperError> {
        let mut offset = BLOCK_BYTES as u64 + self.kept * ENTRY_BYTES as u64;
        let mut buffer = vec![0; 1 << 20];
        loop {
            let count = self
                .file
                .read_at(&mut buffer, offset)
                .map_err(|source| UpperError::io("read", self.path, source))?;
            if count == 0 {
                return Ok(());
            }
            if buffer[..count].iter().any(|byte| *byte != 0) {
                return Err(self.bad_record("zero bytes in the middle of the log"));
            }
            offset += count as u64;
        }
    }
}
