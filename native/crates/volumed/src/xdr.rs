//! External data representation (RFC 4506), as far as RPC and NFS need it.
//!
//! Everything read comes from a guest: each length is checked against what is there and against a
//! named limit before anything is taken.

/// The bytes are not what their type demands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the request is cut short or malformed")]
pub struct Malformed;

/// Reads values from a message, front to back.
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Starts at the front of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// `count` bytes and their padding to a multiple of four.
    pub fn fixed(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let padded = count.checked_next_multiple_of(4).ok_or(Malformed)?;
        if padded > self.rest.len() {
            return Err(Malformed);
        }
        let (taken, rest) = self.rest.split_at(padded);
        self.rest = rest;
        Ok(&taken[..count])
    }

    /// A 32-bit number.
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        let bytes = self.fixed(4)?.try_into().map_err(|_| Malformed)?;
        Ok(u32::from_be_bytes(bytes))
    }

    /// A 64-bit number.
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        let bytes = self.fixed(8)?.try_into().map_err(|_| Malformed)?;
        Ok(u64::from_be_bytes(bytes))
    }

    /// A truth value.
    pub fn bool(&mut self) -> Result<bool, Malformed> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed),
        }
    }

    /// Bytes behind their length, at most `limit` of them.
    pub fn opaque(&mut self, limit: usize) -> Result<&'a [u8], Malformed> {
        let count = self.u32()? as usize;
        if count > limit {
            return Err(Malformed);
        }
        self.fixed(count)
    }
}

/// Builds a message.
#[derive(Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// What was written.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// How many bytes were written.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Takes back everything after the first `length` bytes.
    pub fn truncate(&mut self, length: usize) {
        self.bytes.truncate(length);
    }

    /// A 32-bit number.
    pub fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    /// A 64-bit number.
    pub fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    /// A truth value.
    pub fn bool(&mut self, value: bool) {
        self.u32(u32::from(value));
    }

    /// Bytes and padding, without their length.
    pub fn fixed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Bytes behind their length. None is ever longer than a message, which fits 32 bits.
    pub fn opaque(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.fixed(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut writer = Writer::default();
        writer.u32(7);
        writer.bool(true);
        writer.opaque(b"abcde");
        writer.u64(1 << 40);
        let bytes = writer.into_bytes();
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.u32(), Ok(7));
        assert_eq!(reader.bool(), Ok(true));
        assert_eq!(reader.opaque(5), Ok(&b"abcde"[..]));
        assert_eq!(reader.u64(), Ok(1 << 40));
        assert_eq!(reader.u32(), Err(Malformed));
    }

    #[test]
    fn lengths_are_not_believed() {
        for (bytes, limit) in [
            (&[0, 0, 0, 5, 1, 2, 3, 4, 5, 0, 0, 0][..], 4),
            (&[0, 0, 0, 5, 1, 2, 3, 4, 5][..], 64),
            (&[0xff, 0xff, 0xff, 0xff][..], usize::MAX),
            (&[0, 0][..], 64),
        ] {
            assert_eq!(Reader::new(bytes).opaque(limit), Err(Malformed));
        }
        assert_eq!(Reader::new(&[0, 0, 0, 2]).bool(), Err(Malformed));
    }
}
