//! The reverse of a capture: what layers hold is written into the private mapping of the
//! stack below them, which then reads as all of them together, and has diverged by them.
//!
//! A VM that starts so shares the pages of that stack with all others upon it, and has only
//! what is its own for itself. The process must not use the memory meanwhile: its guest has
//! not run yet.

use lsmt::format::SECTOR_BYTES;
use lsmt::lowers::Lowers;
use lsmt::Stack;

use super::maps::{FileIdentity, Mapping};
use super::pagemap::Run;
use super::{batches, mappings, process_error, CaptureError};
use crate::sys;

/// Fills `pid`'s mapping of `file`, of `size_bytes`, with what `layers` hold; returns the bytes written.
pub fn fill(
    pid: i32,
    file: FileIdentity,
    size_bytes: u64,
    layers: Lowers,
) -> Result<u64, CaptureError> {
    let runs = runs(pid, &mappings(pid, file)?, size_bytes, &layers)?;
    let layers = Stack::from_lowers(layers, size_bytes);
    batches::each(&runs, |batch, buffer| {
        let mut rest = &mut *buffer;
        for run in batch {
            let (bytes, after) = rest.split_at_mut(run.length_bytes as usize);
            layers.read_at(bytes, run.file_offset)?;
            rest = after;
        }
        let count = sys::write_process_memory(pid, &batches::ranges(batch), buffer);
        batches::whole(count, buffer.len())
            .map_err(|source| process_error(pid, "write memory", source))
    })?;
    Ok(runs.iter().map(|run| run.length_bytes).sum())
}

/// Where what the layers hold belongs in the process.
fn runs(
    pid: i32,
    mappings: &[Mapping],
    size_bytes: u64,
    layers: &Lowers,
) -> Result<Vec<Run>, CaptureError> {
    let mut runs: Vec<Run> = Vec::new();
    for segment in layers.index().segments() {
        let mut from = segment.offset() * SECTOR_BYTES;
        let to = (segment.end() * SECTOR_BYTES).min(size_bytes);
        while from < to {
            let outside = CaptureError::Outside {
                pid,
                file_offset: from,
            };
            let mapping = holding(mappings, from).ok_or(outside)?;
            let end = to.min(mapping.file_offset + (mapping.end - mapping.start));
            let run = Run {
                address: mapping.start + (from - mapping.file_offset),
                file_offset: from,
                length_bytes: end - from,
            };
            match runs.last_mut() {
                Some(last) if last.is_followed_by(&run) => last.length_bytes += run.length_bytes,
                _ => runs.push(run),
            }
            from = end;
        }
    }
    Ok(runs)
}

fn holding(mappings: &[Mapping], file_offset: u64) -> Option<&Mapping> {
    let after = mappings.partition_point(|mapping| mapping.file_offset <= file_offset);
    let found = mappings.get(after.checked_sub(1)?)?;
    (file_offset < found.file_offset + (found.end - found.start)).then_some(found)
}
