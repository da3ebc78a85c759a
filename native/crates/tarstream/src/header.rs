//! The 512-byte header of a member.

use super::sparse::{add_old, Part};
use super::{malformed, text, MemberKind, TarError, RECORD_BYTES};

const CHECKSUM: std::ops::Range<usize> = 148..156;

/// The fields of a header.
pub struct Header {
    pub path: Vec<u8>,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub size_bytes: u64,
    pub mtime_s: i64,
    pub type_flag: u8,
    pub link: Vec<u8>,
    pub device: (u32, u32),
    /// Of a sparse file in GNU's old format.
    pub sparse_parts: Vec<Part>,
    pub sparse_goes_on: bool,
    pub real_size_bytes: u64,
}

impl Header {
    /// Checks and reads a header.
    pub fn parse(record: &[u8; RECORD_BYTES]) -> Result<Header, TarError> {
        check_sum(record)?;
        let positive = |range: std::ops::Range<usize>, what: &str| {
            let value = number(&record[range]).filter(|value| *value >= 0);
            value
                .map(|value| value as u64)
                .ok_or_else(|| malformed(format!("a header's {what} is no number")))
        };
        let device = |range| {
            let value = positive(range, "device number")?;
            u32::try_from(value).map_err(|_| malformed("a device number is too large"))
        };
        let type_flag = record[156];
        let mut header = Header {
            path: full_path(record),
            mode: (positive(100..108, "mode")? & 0o7777) as u32,
            uid: positive(108..116, "owner")?,
            gid: positive(116..124, "group")?,
            size_bytes: positive(124..136, "size")?,
            mtime_s: number(&record[136..148])
                .ok_or_else(|| malformed("a header's time is no number"))?,
            type_flag,
            link: text(&record[157..257]),
            device: match type_flag {
                b'3' | b'4' => (device(329..337)?, device(337..345)?),
                _ => (0, 0),
            },
            sparse_parts: Vec::new(),
            sparse_goes_on: false,
            real_size_bytes: 0,
        };
        if type_flag == b'S' {
            add_old(&mut header.sparse_parts, &record[386..482])?;
            header.sparse_goes_on = record[482] != 0;
            header.real_size_bytes = positive(483..495, "real size")?;
        }
        Ok(header)
    }

    /// What the member is. `path` is its full path: an old archive marks a directory by the slash at its end.
    pub fn kind(&self, path: &[u8]) -> Result<MemberKind, TarError> {
        Ok(match self.type_flag {
            b'0' | 0 if path.ends_with(b"/") => MemberKind::Directory,
            b'0' | 0 | b'7' | b'S' => MemberKind::File,
            b'1' => MemberKind::HardLink,
            b'2' => MemberKind::Symlink,
            b'3' => MemberKind::Character,
            b'4' => MemberKind::Block,
            b'5' => MemberKind::Directory,
            b'6' => MemberKind::Fifo,
            other => {
                let shown = other.escape_ascii();
                return Err(malformed(format!(
                    "a member has the unknown type '{shown}'"
                )));
            }
        })
    }
}

/// ustar and star split a long path; GNU has other things in the second field.
fn full_path(record: &[u8; RECORD_BYTES]) -> Vec<u8> {
    let name = text(&record[..100]);
    let prefix = match (&record[257..263], &record[508..512]) {
        (b"ustar\0", b"tar\0") => text(&record[345..476]),
        (b"ustar\0", _) => text(&record[345..500]),
        _ => Vec::new(),
    };
    if prefix.is_empty() {
        return name;
    }
    [prefix.as_slice(), name.as_slice()].join(&b'/')
}

/// Some old writers summed signed bytes.
fn check_sum(record: &[u8; RECORD_BYTES]) -> Result<(), TarError> {
    let wanted = number(&record[CHECKSUM]);
    let byte = |(at, byte): (usize, &u8)| if CHECKSUM.contains(&at) { b' ' } else { *byte };
    let bytes = || record.iter().enumerate().map(byte);
    let unsigned: i64 = bytes().map(i64::from).sum();
    let signed: i64 = bytes().map(|byte| i64::from(byte as i8)).sum();
    if wanted == Some(unsigned) || wanted == Some(signed) {
        return Ok(());
    }
    Err(malformed("the checksum of a header is wrong"))
}

/// Octal text, or binary with the highest bit set. Empty means 0.
pub fn number(field: &[u8]) -> Option<i64> {
    if field[0] & 0x80 != 0 {
        return binary(field);
    }
    let mut value: i64 = 0;
    let digits: Vec<u8> = text(field).trim_ascii().to_vec();
    for digit in digits {
        if !(b'0'..=b'7').contains(&digit) {
            return None;
        }
        value = value.checked_mul(8)?.checked_add(i64::from(digit - b'0'))?;
    }
    Some(value)
}

fn binary(field: &[u8]) -> Option<i64> {
    let is_negative = field[0] & 0x40 != 0;
    let fill = if is_negative { 0xff } else { 0 };
    let mut value: i64 = if is_negative { -1 } else { 0 };
    for (index, byte) in field.iter().enumerate() {
        let byte = if index == 0 && !is_negative {
            byte & 0x7f
        } else {
            *byte
        };
        if index + 8 < field.len() {
            if byte != fill {
                return None;
            }
        } else {
            value = value << 8 | i64::from(byte);
        }
    }
    ((value < 0) == is_negative).then_some(value)
}
