//! Finds the anonymous pages of a private file mapping.
//!
//! Such a page has been written since the mapping was made: it is present or
//! swapped out and no longer belongs to the file. PAGEMAP_SCAN tells runs of
//! them at once; older kernels give one word for each page.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use nix::libc;

use super::maps::Mapping;
use crate::sys::{self, PageRegion};

/// Size of a page; the layer format and the VMMs we drive assume it.
pub const PAGE_BYTES: u64 = 4096;
/// Regions fetched by one call.
const REGIONS_PER_SCAN: usize = 4096;
/// Page words read by one call (512 KiB).
const WORDS_PER_READ: u64 = 65_536;
const WORD_BYTES: u64 = 8;
const WORD_IS_PRESENT: u64 = 1 << 63;
const WORD_IS_SWAPPED: u64 = 1 << 62;
const WORD_IS_FILE: u64 = 1 << 61;

/// A run of anonymous pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Address in the process.
    pub address: u64,
    /// Byte of the file the run stands for.
    pub file_offset: u64,
    /// Bytes in the run.
    pub length_bytes: u64,
}

impl Run {
    /// Whether `next` goes on where this one ends, in the process and in the file.
    pub fn is_followed_by(&self, next: &Run) -> bool {
        self.address + self.length_bytes == next.address
            && self.file_offset + self.length_bytes == next.file_offset
    }
}

/// Runs of one mapping, in order.
pub fn anonymous_runs(pid: i32, mapping: &Mapping, runs: &mut Vec<Run>) -> io::Result<()> {
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    match scan(&pagemap, mapping, runs) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
            read_words(&pagemap, mapping, runs)
        }
        result => result,
    }
}

fn push(runs: &mut Vec<Run>, mapping: &Mapping, start: u64, end: u64) {
    let run = Run {
        address: start,
        file_offset: start - mapping.start + mapping.file_offset,
        length_bytes: end - start,
    };
    match runs.last_mut() {
        Some(last) if last.is_followed_by(&run) => last.length_bytes += run.length_bytes,
        _ => runs.push(run),
    }
}

fn scan(pagemap: &File, mapping: &Mapping, runs: &mut Vec<Run>) -> io::Result<()> {
    let mut regions = vec![PageRegion::default(); REGIONS_PER_SCAN];
    let mut cursor = mapping.start;
    loop {
        let count = sys::scan_anonymous(pagemap, cursor, mapping.end, &mut regions)?;
        for region in &regions[..count] {
            push(runs, mapping, region.start, region.end);
        }
        // Only a full vector means that there may be more. The address the
        // kernel says it reached is not usable: seen on 6.18, it names the last
        // of its internal buffers that was full, before regions it returned.
        match regions[..count].last() {
            Some(last) if count == regions.len() => cursor = last.end,
            _ => return Ok(()),
        }
    }
}

fn read_words(pagemap: &File, mapping: &Mapping, runs: &mut Vec<Run>) -> io::Result<()> {
    let mut words = vec![0; (WORDS_PER_READ * WORD_BYTES) as usize];
    let mut cursor = mapping.start;
    while cursor < mapping.end {
        let pages = WORDS_PER_READ.min((mapping.end - cursor) / PAGE_BYTES);
        let bytes = &mut words[..(pages * WORD_BYTES) as usize];
        pagemap.read_exact_at(bytes, cursor / PAGE_BYTES * WORD_BYTES)?;
        for raw in bytes.chunks_exact(WORD_BYTES as usize) {
            let mut word = [0; WORD_BYTES as usize];
            word.copy_from_slice(raw);
            if is_anonymous(u64::from_ne_bytes(word)) {
                push(runs, mapping, cursor, cursor + PAGE_BYTES);
            }
            cursor += PAGE_BYTES;
        }
    }
    Ok(())
}

fn is_anonymous(word: u64) -> bool {
    word & (WORD_IS_PRESENT | WORD_IS_SWAPPED) != 0 && word & WORD_IS_FILE == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ways must agree on the memory of this very process.
    #[test]
    fn scan_and_words_agree() {
        let memory = vec![1_u8; 64 * PAGE_BYTES as usize];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE_BYTES);
        let mapping = Mapping {
            start,
            end: start + 60 * PAGE_BYTES,
            file_offset: 0,
        };
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let mut by_words = Vec::new();
        read_words(&pagemap, &mapping, &mut by_words).unwrap();
        let whole = Run {
            address: start,
            file_offset: 0,
            length_bytes: 60 * PAGE_BYTES,
        };
        assert_eq!(by_words, vec![whole]);
        let mut by_scan = Vec::new();
        match scan(&pagemap, &mapping, &mut by_scan) {
            Ok(()) => assert_eq!(by_scan, by_words),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOTTY)),
        }
        drop(memory);
    }

    /// More runs than one call returns, and more than the kernel's own buffer.
    #[test]
    fn many_runs_come_once_and_in_order() {
        let pages = 3 * REGIONS_PER_SCAN as u64;
        let mut memory = vec![0_u8; ((pages + 1) * PAGE_BYTES) as usize];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE_BYTES);
        let shift = start - memory.as_ptr() as u64;
        for page in (0..pages).step_by(2) {
            memory[(shift + page * PAGE_BYTES) as usize] = 1;
        }
        let mapping = Mapping {
            start,
            end: start + pages * PAGE_BYTES,
            file_offset: 0,
        };
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let mut by_words = Vec::new();
        read_words(&pagemap, &mapping, &mut by_words).unwrap();
        let mut by_scan = Vec::new();
        match scan(&pagemap, &mapping, &mut by_scan) {
            Ok(()) => assert_eq!(by_scan, by_words),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOTTY)),
        }
    }

    #[test]
    fn file_pages_and_holes_do_not_count() {
        assert!(is_anonymous(WORD_IS_PRESENT) && is_anonymous(WORD_IS_SWAPPED));
        assert!(!is_anonymous(WORD_IS_PRESENT | WORD_IS_FILE) && !is_anonymous(0));
    }
}
