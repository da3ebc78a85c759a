//! Runs of pages in pieces that one system call can take.

use std::io;

use super::pagemap::Run;
use crate::sys::MAX_REMOTE_RANGES;

/// Bytes of one call.
const BATCH_BYTES: usize = 1 << 20;

/// Calls `work` with as many runs as fit, cut where needed, and a buffer of their length.
pub fn each<E>(
    runs: &[Run],
    mut work: impl FnMut(&[Run], &mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut buffer = vec![0; BATCH_BYTES];
    let mut batch: Vec<Run> = Vec::new();
    let mut batch_bytes = 0;
    for run in runs {
        let mut rest = *run;
        while rest.length_bytes > 0 {
            let room = (BATCH_BYTES - batch_bytes) as u64;
            let length_bytes = rest.length_bytes.min(room);
            batch.push(Run {
                length_bytes,
                ..rest
            });
            batch_bytes += length_bytes as usize;
            rest.address += length_bytes;
            rest.file_offset += length_bytes;
            rest.length_bytes -= length_bytes;
            if batch_bytes == BATCH_BYTES || batch.len() == MAX_REMOTE_RANGES {
                work(&batch, &mut buffer[..batch_bytes])?;
                batch.clear();
                batch_bytes = 0;
            }
        }
    }
    if batch.is_empty() {
        return Ok(());
    }
    work(&batch, &mut buffer[..batch_bytes])
}

/// Address and length of each run.
pub fn ranges(batch: &[Run]) -> Vec<(u64, usize)> {
    let runs = batch.iter();
    runs.map(|run| (run.address, run.length_bytes as usize))
        .collect()
}

/// An error unless a call has moved all bytes.
pub fn whole(count: io::Result<usize>, wanted: usize) -> io::Result<()> {
    let count = count?;
    if count == wanted {
        return Ok(());
    }
    let message = format!("{count} of {wanted} bytes are mapped");
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, message))
}
