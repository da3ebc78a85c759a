//! The checksum of ZFile (spec 2.3): CRC-32C as a raw register, that is without
//! the final inversion of the standard form.

/// Start value of a block's checksum; it tells zeroed blocks from valid ones.
pub const BLOCK_SEED: u32 = 100_007;

/// Continues the raw register `seed` over `bytes`.
pub fn raw(seed: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_register_has_the_values_of_the_spec() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(raw(0, b""), 0);
        assert_eq!(raw(0, b"123456789"), 0x58E3_FA20);
        assert_eq!(raw(BLOCK_SEED, b"123456789"), 0x3C9B_D4E0);
        assert_eq!(raw(BLOCK_SEED, &[0; 4096]), 0x1874_6CCD);
        let (left, right) = b"123456789".split_at(4);
        assert_eq!(raw(raw(0, left), right), raw(0, b"123456789"));
    }
}
