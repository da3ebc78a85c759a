//! Decompressing single blocks.

use std::io;

use parking_lot::Mutex;
use zstd::bulk::Decompressor;

use super::format::Algorithm;

/// Idle Zstandard contexts kept for the next reader (about 160 KiB each).
const MAX_IDLE: usize = 16;

/// Decompresses blocks for any number of files and threads.
#[derive(Default)]
pub struct Decoders {
    idle: Mutex<Vec<Decompressor<'static>>>,
}

impl Decoders {
    /// Fills `target` exactly with the content of `stored`; anything shorter or
    /// longer is an `InvalidData` error. Allocates nothing that depends on `stored`.
    pub fn decode(&self, algorithm: Algorithm, stored: &[u8], target: &mut [u8]) -> io::Result<()> {
        let wrong = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
        let count = match algorithm {
            Algorithm::Lz4 => lz4_flex::block::decompress_into(stored, target)
                .map_err(|error| wrong(format!("lz4: {error}")))?,
            Algorithm::Zstd => {
                let idle = self.idle.lock().pop();
                let mut decoder = match idle {
                    Some(decoder) => decoder,
                    None => Decompressor::new()?,
                };
                let result = decoder.decompress_to_buffer(stored, target);
                let mut idle = self.idle.lock();
                if idle.len() < MAX_IDLE {
                    idle.push(decoder);
                }
                result.map_err(|error| wrong(format!("zstd: {error}")))?
            }
        };
        if count == target.len() {
            return Ok(());
        }
        Err(wrong(format!(
            "the block holds {count} bytes, not {}",
            target.len()
        )))
    }
}
