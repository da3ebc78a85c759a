//! Seeded noise for the tests of parsers: every failure repeats by its seed.

/// Source of random and damaged input (xorshift64*).
pub struct Noise {
    state: u64,
}

/// Bytes that mean something to one parser or another.
const TOKENS: &[&[u8]] = &[
    b"\0",
    b"\xff",
    b"\r\n",
    b"\r\n\r\n",
    b"--",
    b"\"",
    b"\\",
    b"%",
    b"%00",
    b"%ff",
    b";",
    b",",
    b"=",
    b":",
    b"*",
    b"{",
    b"}",
    b"[",
    b"null",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"bytes=",
    b"q=",
    b"..",
    b"/",
    b"~",
    b"'",
];

impl Noise {
    /// A source that always gives the same for the same seed.
    pub fn new(seed: u64) -> Self {
        Self {
            state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        }
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit.max(1)
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Random bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.below(256) as u8).collect()
    }

    /// One of the seeds with a few things done to it, or nothing like them at all.
    pub fn mutate<T: AsRef<[u8]>>(&mut self, seeds: &[T]) -> Vec<u8> {
        if self.below(8) == 0 {
            let length = self.below(300);
            return self.bytes(length);
        }
        let seed = self.below(seeds.len());
        let mut bytes = seeds[seed].as_ref().to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len() + 1);
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => {
                    let end = at + self.below(bytes.len() - at + 1);
                    bytes.drain(at..end);
                }
                2 => {
                    let token = self.pick(TOKENS);
                    bytes.splice(at..at, token.iter().copied());
                }
                3 => {
                    let end = at + self.below(bytes.len() - at + 1);
                    let copy = bytes[at..end].to_vec();
                    bytes.splice(at..at, copy);
                }
                _ if at < bytes.len() => bytes[at] = self.below(256) as u8,
                _ => bytes.push(self.below(256) as u8),
            }
        }
        bytes
    }

    /// As [`Noise::mutate`], made text.
    pub fn text(&mut self, seeds: &[&str]) -> String {
        String::from_utf8_lossy(&self.mutate(seeds)).into_owned()
    }
}
