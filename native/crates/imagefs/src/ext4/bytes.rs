//! Little-endian fields at byte offsets, as ext4 has them everywhere.

/// The 16-bit field at `at`.
pub fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The 32-bit field at `at`.
pub fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from(le16(bytes, at)) | u32::from(le16(bytes, at + 2)) << 16
}

/// Sets the 16-bit field at `at`.
pub fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

/// Sets the 32-bit field at `at`.
pub fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// The low half of a split field.
pub fn low(value: u64) -> u32 {
    (value & 0xffff_ffff) as u32
}

/// The high half of a split field.
pub fn high(value: u64) -> u32 {
    (value >> 32) as u32
}
