//! Memory capture: what a process changed in its private mapping of a stack
//! becomes one more layer.
//!
//! The process must not run meanwhile (its guest is paused): the caller sees to
//! that. Invariant: the layer together with the stack below it reads exactly
//! like the process's memory; the output appears only when it is complete.

mod batches;
pub mod fill;
pub mod maps;
pub mod pagemap;

use std::io;
use std::path::Path;
use std::time::Instant;

use lsmt::commit::is_zero;
use lsmt::format::SECTOR_BYTES;
use lsmt::{LayerInfo, LayerOptions, LayerWriter, Stack, StackError};
use thiserror::Error;

use crate::sys;
use maps::{FileIdentity, Mapping};
use pagemap::{Run, PAGE_BYTES};

/// Why memory could not be captured.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// No such process.
    #[error("process {pid} does not exist")]
    NoProcess {
        /// Its id.
        pid: i32,
    },
    /// The process does not map the file privately.
    #[error(
        "process {pid} has no private mapping of device {major:02x}:{minor:02x} inode {inode}"
    )]
    NotMapped {
        /// The process.
        pid: i32,
        /// Device looked for.
        major: u64,
        /// Device looked for.
        minor: u64,
        /// Inode looked for.
        inode: u64,
    },
    /// The same part of the file is mapped twice, so its content is ambiguous.
    #[error("process {pid} maps byte {file_offset} of the stack more than once")]
    MappedTwice {
        /// The process.
        pid: i32,
        /// First byte in doubt.
        file_offset: u64,
    },
    /// Layers hold something for a part of memory that the process does not map.
    #[error("process {pid} does not map byte {file_offset} of the stack, which the layers hold")]
    Outside {
        /// The process.
        pid: i32,
        /// First byte that is not mapped.
        file_offset: u64,
    },
    /// The process's tables or memory could not be read, or written.
    #[error("cannot {action} of process {pid}: {source}")]
    Process {
        /// What was tried.
        action: &'static str,
        /// The process.
        pid: i32,
        /// The cause.
        source: io::Error,
    },
    /// The layer could not be written.
    #[error(transparent)]
    Stack(#[from] StackError),
}

/// What a capture did.
#[derive(Debug)]
pub struct Outcome {
    /// The layer.
    pub layer: LayerInfo,
    /// Pages found.
    pub pages: u64,
    /// Of these, all-zero ones.
    pub zero_pages: u64,
    /// Time to find them.
    pub find_us: u64,
    /// Time to copy and write them.
    pub copy_us: u64,
}

/// Captures what `pid` changed in its mapping of `file` into `output`.
pub fn capture(
    pid: i32,
    file: FileIdentity,
    below: &Stack,
    output: &Path,
    sync: bool,
) -> Result<Outcome, CaptureError> {
    let started = Instant::now();
    let runs = find_runs(pid, file, below.virtual_size_bytes())?;
    let find_us = elapsed_us(started);
    let started = Instant::now();
    let size_bytes = below.virtual_size_bytes();
    let options = LayerOptions {
        parent_uuid: below.top_uuid(),
        ..LayerOptions::new(size_bytes)
    };
    let writer = LayerWriter::create(output, &options);
    let mut copy = Copy {
        pid,
        below,
        writer: writer.map_err(StackError::from)?,
        zero_pages: 0,
    };
    copy.all(&runs)?;
    let Copy {
        writer, zero_pages, ..
    } = copy;
    let layer = writer.finish(sync).map_err(StackError::from)?;
    Ok(Outcome {
        layer,
        pages: runs.iter().map(|run| run.length_bytes / PAGE_BYTES).sum(),
        zero_pages,
        find_us,
        copy_us: elapsed_us(started),
    })
}

fn elapsed_us(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX)
}

fn find_runs(pid: i32, file: FileIdentity, size_bytes: u64) -> Result<Vec<Run>, CaptureError> {
    let mut runs = Vec::new();
    for mapping in &mappings(pid, file)? {
        pagemap::anonymous_runs(pid, mapping, &mut runs)
            .map_err(|source| process_error(pid, "read pagemap", source))?;
    }
    // A mapping may be longer than the file; pages past its end hold nothing.
    let limit = size_bytes.next_multiple_of(PAGE_BYTES);
    runs.retain_mut(|run| {
        run.length_bytes = run.length_bytes.min(limit.saturating_sub(run.file_offset));
        run.length_bytes > 0
    });
    Ok(runs)
}

/// Where the process has the file, by file offset: somewhere, and no part of it twice.
fn mappings(pid: i32, file: FileIdentity) -> Result<Vec<Mapping>, CaptureError> {
    let mappings =
        maps::find(pid, file).map_err(|source| process_error(pid, "read maps", source))?;
    if mappings.is_empty() {
        return Err(CaptureError::NotMapped {
            pid,
            major: file.major,
            minor: file.minor,
            inode: file.inode,
        });
    }
    check_disjoint(pid, &mappings)?;
    Ok(mappings)
}

fn check_disjoint(pid: i32, mappings: &[Mapping]) -> Result<(), CaptureError> {
    for pair in mappings.windows(2) {
        let end = pair[0].file_offset + (pair[0].end - pair[0].start);
        let file_offset = pair[1].file_offset;
        if file_offset < end {
            return Err(CaptureError::MappedTwice { pid, file_offset });
        }
    }
    Ok(())
}

fn process_error(pid: i32, action: &'static str, source: io::Error) -> CaptureError {
    match source.raw_os_error() {
        Some(nix::libc::ESRCH | nix::libc::ENOENT) => CaptureError::NoProcess { pid },
        _ => CaptureError::Process {
            action,
            pid,
            source,
        },
    }
}

struct Copy<'a> {
    pid: i32,
    below: &'a Stack,
    writer: LayerWriter,
    zero_pages: u64,
}

impl Copy<'_> {
    fn all(&mut self, runs: &[Run]) -> Result<(), CaptureError> {
        batches::each(runs, |batch, buffer| self.batch(batch, buffer))
    }

    fn batch(&mut self, batch: &[Run], buffer: &mut [u8]) -> Result<(), CaptureError> {
        let count = sys::read_process_memory(self.pid, &batches::ranges(batch), buffer);
        batches::whole(count, buffer.len())
            .map_err(|source| process_error(self.pid, "read memory", source))?;
        let mut rest = &*buffer;
        for run in batch {
            let (bytes, after) = rest.split_at(run.length_bytes as usize);
            self.run(run.file_offset, bytes).map_err(StackError::from)?;
            rest = after;
        }
        Ok(())
    }

    /// Writes one run as alternating stretches of zero and other pages.
    fn run(&mut self, file_offset: u64, bytes: &[u8]) -> Result<(), lsmt::WriteError> {
        let pages: Vec<bool> = bytes.chunks(PAGE_BYTES as usize).map(is_zero).collect();
        let mut page = 0;
        for stretch in pages.chunk_by(|a, b| a == b) {
            let from = page * PAGE_BYTES as usize;
            page += stretch.len();
            let to = bytes.len().min(page * PAGE_BYTES as usize);
            let offset = file_offset + from as u64;
            if !stretch[0] {
                let sector = offset / SECTOR_BYTES;
                self.writer.append_data(sector, &bytes[from..to])?;
                continue;
            }
            self.zero_pages += stretch.len() as u64;
            self.zeroes(offset, stretch.len() as u64)?;
        }
        Ok(())
    }

    /// Zero pages need a record only where the stack below is not zero.
    fn zeroes(&mut self, file_offset: u64, pages: u64) -> Result<(), lsmt::WriteError> {
        for page in 0..pages {
            let offset = file_offset + page * PAGE_BYTES;
            if !self.below.reads_zero(offset, PAGE_BYTES) {
                let sectors = PAGE_BYTES / SECTOR_BYTES;
                self.writer.append_zeroed(offset / SECTOR_BYTES, sectors)?;
            }
        }
        Ok(())
    }
}
