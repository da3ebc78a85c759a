//! The records of pax headers: what did not fit into the header itself.

use std::collections::BTreeMap;

use super::sparse::{self, Part};
use super::{malformed, TarError};

const XATTR: &[u8] = b"SCHILY.xattr.";

/// Records by key, and the numbers of a sparse map in GNU's format 0.0, whose keys repeat.
#[derive(Debug, Clone, Default)]
pub struct Records {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    sparse_numbers: Vec<u64>,
}

impl Records {
    /// Adds the records of one header: `<length> <key>=<value>\n`. An empty value takes a key away.
    pub fn merge(&mut self, mut bytes: &[u8]) -> Result<(), TarError> {
        let bad = || malformed("a pax record is malformed");
        while !bytes.is_empty() && bytes[0] != 0 {
            let space = bytes
                .iter()
                .position(|byte| *byte == b' ')
                .ok_or_else(bad)?;
            let length = decimal(&bytes[..space]).ok_or_else(bad)? as usize;
            if length <= space + 1 || length > bytes.len() || bytes[length - 1] != b'\n' {
                return Err(bad());
            }
            let record = &bytes[space + 1..length - 1];
            let equals = record
                .iter()
                .position(|byte| *byte == b'=')
                .ok_or_else(bad)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            if key == b"GNU.sparse.offset" || key == b"GNU.sparse.numbytes" {
                self.sparse_numbers.push(decimal(value).ok_or_else(bad)?);
            } else if value.is_empty() && !key.starts_with(XATTR) {
                self.values.remove(key);
            } else {
                self.values.insert(key.to_vec(), value.to_vec());
            }
            bytes = &bytes[length..];
        }
        Ok(())
    }

    fn text(&self, key: &str) -> Option<Vec<u8>> {
        self.values.get(key.as_bytes()).cloned()
    }

    /// The member's path.
    pub fn path(&self) -> Option<Vec<u8>> {
        self.text("GNU.sparse.name").or_else(|| self.text("path"))
    }

    /// The target of a link.
    pub fn link(&self) -> Option<Vec<u8>> {
        self.text("linkpath")
    }

    /// A whole number.
    pub fn number(&self, key: &str) -> Result<Option<u64>, TarError> {
        let Some(value) = self.values.get(key.as_bytes()) else {
            return Ok(None);
        };
        let number = decimal(value)
            .ok_or_else(|| malformed(format!("the pax record {key} is no number")))?;
        Ok(Some(number))
    }

    /// The time of the last change: seconds with a fraction, negative before 1970.
    pub fn mtime(&self) -> Result<Option<(i64, u32)>, TarError> {
        let Some(value) = self.values.get(b"mtime".as_slice()) else {
            return Ok(None);
        };
        let bad = || malformed("the pax record mtime is no time");
        let is_negative = value.starts_with(b"-");
        let digits = value.strip_prefix(b"-").unwrap_or(value);
        let mut halves = digits.splitn(2, |byte| *byte == b'.');
        let whole = decimal(halves.next().unwrap_or_default()).ok_or_else(bad)?;
        let mut seconds = i64::try_from(whole).map_err(|_| bad())?;
        let mut nanoseconds: u32 = 0;
        let mut weight = 100_000_000;
        for digit in halves.next().unwrap_or_default() {
            if !digit.is_ascii_digit() {
                return Err(bad());
            }
            nanoseconds += u32::from(digit - b'0') * weight;
            weight /= 10;
        }
        if is_negative {
            seconds = -seconds;
            if nanoseconds > 0 {
                (seconds, nanoseconds) = (seconds - 1, 1_000_000_000 - nanoseconds);
            }
        }
        Ok(Some((seconds, nanoseconds)))
    }

    /// Extended attributes by full name.
    pub fn xattrs(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let attributes = self.values.iter().filter(|(key, _)| key.starts_with(XATTR));
        attributes
            .map(|(key, value)| (key[XATTR.len()..].to_vec(), value.clone()))
            .collect()
    }

    /// Whether the content begins with a sparse map.
    pub fn is_sparse_1_0(&self) -> bool {
        self.text("GNU.sparse.major").as_deref() == Some(b"1")
    }

    /// The sparse map of GNU's formats 0.0 and 0.1.
    pub fn sparse_map(&self) -> Result<Option<Vec<Part>>, TarError> {
        let bad = || malformed("a sparse map is no list of numbers");
        let numbers = match self.values.get(b"GNU.sparse.map".as_slice()) {
            Some(map) => map
                .split(|byte| *byte == b',')
                .map(decimal)
                .collect::<Option<Vec<u64>>>()
                .ok_or_else(bad)?,
            None if self.sparse_numbers.is_empty() => return Ok(None),
            None => self.sparse_numbers.clone(),
        };
        sparse::from_numbers(&numbers).map(Some)
    }

    /// The size of a sparse file.
    pub fn real_size(&self) -> Result<u64, TarError> {
        let size = self
            .number("GNU.sparse.realsize")?
            .or(self.number("GNU.sparse.size")?);
        size.ok_or_else(|| malformed("a sparse file does not say its size"))
    }
}

/// A decimal number without sign.
pub fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}
