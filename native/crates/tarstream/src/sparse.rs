//! Maps of sparse files: which parts of a file the archive has.

use super::header::number;
use super::pax::decimal;
use super::{malformed, TarError, RECORD_BYTES};

/// Most parts of one file: 16 MiB of memory.
const PARTS_MAX: usize = 1 << 20;
const OLD_BYTES: usize = 24;

/// A part with data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Where in the file.
    pub offset: u64,
    /// How many bytes.
    pub length: u64,
}

/// Adds the parts of one header of GNU's old format: pairs of 12-byte numbers, the first empty one ends them.
pub fn add_old(parts: &mut Vec<Part>, fields: &[u8]) -> Result<(), TarError> {
    for field in fields.chunks_exact(OLD_BYTES) {
        if field[0] == 0 {
            break;
        }
        let value = |bytes: &[u8]| number(bytes).and_then(|value| u64::try_from(value).ok());
        match (value(&field[..12]), value(&field[12..])) {
            (Some(offset), Some(length)) => push(parts, offset, length)?,
            _ => return Err(malformed("a sparse map is no list of numbers")),
        }
    }
    Ok(())
}

/// Parts from pairs of offset and length.
pub fn from_numbers(numbers: &[u64]) -> Result<Vec<Part>, TarError> {
    let mut parts = Vec::new();
    if numbers.len() % 2 != 0 {
        return Err(malformed("a sparse map has an offset without a length"));
    }
    for pair in numbers.chunks_exact(2) {
        push(&mut parts, pair[0], pair[1])?;
    }
    Ok(parts)
}

fn push(parts: &mut Vec<Part>, offset: u64, length: u64) -> Result<(), TarError> {
    if parts.len() >= PARTS_MAX {
        return Err(malformed("a sparse map has too many parts"));
    }
    parts.push(Part { offset, length });
    Ok(())
}

/// Parts must be in order, inside the file, and no more than the archive has.
pub fn check(parts: &[Part], size_bytes: u64, stored_bytes: u64) -> Result<(), TarError> {
    let (mut end, mut total) = (0, 0u64);
    for part in parts {
        let part_end = part.offset.checked_add(part.length);
        if part.offset < end || part_end.is_none_or(|part_end| part_end > size_bytes) {
            return Err(malformed(
                "the parts of a sparse file are out of order or outside of it",
            ));
        }
        end = part.offset + part.length;
        total += part.length;
    }
    if total > stored_bytes {
        return Err(malformed("a sparse file has more parts than content"));
    }
    Ok(())
}

/// A map as lines of decimal numbers: how many parts, then offset and length of each.
#[derive(Default)]
pub struct Lines {
    numbers: Vec<u64>,
    digits: Vec<u8>,
    is_bad: bool,
}

impl Lines {
    /// Adds one record of the content.
    pub fn add(&mut self, record: &[u8; RECORD_BYTES]) {
        for byte in record {
            if self
                .wanted()
                .is_some_and(|wanted| self.numbers.len() >= wanted)
            {
                break; // the rest of the last record is padding
            }
            if *byte != b'\n' {
                self.digits.push(*byte);
                self.is_bad |= self.digits.len() > 20;
                continue;
            }
            match decimal(&self.digits) {
                Some(value) => self.numbers.push(value),
                None => self.is_bad = true,
            }
            self.digits.clear();
        }
    }

    fn wanted(&self) -> Option<usize> {
        self.numbers
            .first()
            .map(|count| (*count).min(PARTS_MAX as u64 + 1) as usize * 2 + 1)
    }

    /// Whether all parts are there.
    pub fn is_complete(&self) -> Result<bool, TarError> {
        let too_many = self
            .numbers
            .first()
            .is_some_and(|count| *count > PARTS_MAX as u64);
        if self.is_bad || too_many {
            return Err(malformed("a sparse map is no list of numbers, or too long"));
        }
        Ok(self
            .wanted()
            .is_some_and(|wanted| self.numbers.len() >= wanted))
    }

    /// The parts.
    pub fn parts(&self) -> Result<Vec<Part>, TarError> {
        from_numbers(&self.numbers[1..])
    }
}
