//! How many reads a second a file or device answers, so many under way at any time: as a
//! VMM with asynchronous I/O asks for them. For `tests/bench/blocks.py` and `tests/lab/figures.py`.
//!
//! `reads random PATH DEPTH COUNT`: 4 KiB each, past the page cache, each block once in an
//! order that jumps. `reads sequential PATH DEPTH COUNT`: 512 KiB each, in order, from the
//! page cache where the file has one. Over and over until `COUNT` reads are done. Prints
//! reads per second.
#![allow(
    unsafe_code,
    reason = "the kernel is given pointers; this is a test program"
)]

use std::alloc::{alloc, handle_alloc_error, Layout};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use io_uring::types::Fd;
use io_uring::{opcode, IoUring};
use nix::libc;

/// Buffers begin where a page does.
const ALIGN_BYTES: usize = 4096;
/// A prime beside which no number of blocks of a test has a factor.
const STRIDE: u64 = 7919;

/// What is read, and in which order.
#[derive(Clone, Copy)]
struct Kind {
    bytes: u32,
    /// From one read to the next, in reads.
    stride: u64,
    flags: i32,
}

const RANDOM: Kind = Kind {
    bytes: 4096,
    stride: STRIDE,
    flags: libc::O_DIRECT,
};
const SEQUENTIAL: Kind = Kind {
    bytes: 512 << 10,
    stride: 1,
    flags: 0,
};

struct Reader {
    kind: Kind,
    file: File,
    ring: IoUring,
    buffers: *mut u8,
    blocks: u64,
    asked: u64,
}

impl Reader {
    fn open(kind: Kind, path: &str, depth: u32) -> io::Result<Reader> {
        let mut options = File::options();
        let mut file = options.read(true).custom_flags(kind.flags).open(path)?;
        let blocks = file.seek(SeekFrom::End(0))? / u64::from(kind.bytes);
        let size = (kind.bytes * depth) as usize;
        let layout = Layout::from_size_align(size, ALIGN_BYTES).map_err(io::Error::other)?;
        // SAFETY: the size is not zero: a ring has at least one entry. Never freed.
        let buffers = unsafe { alloc(layout) };
        if buffers.is_null() {
            handle_alloc_error(layout);
        }
        let ring = IoUring::new(depth)?;
        Ok(Reader {
            kind,
            file,
            ring,
            buffers,
            blocks,
            asked: 0,
        })
    }

    fn ask(&mut self, slot: u64) -> io::Result<()> {
        let bytes = self.kind.bytes;
        let block = self.asked * self.kind.stride % self.blocks;
        self.asked += 1;
        // SAFETY: `slot` is below the depth, for which there are buffers.
        let place = unsafe { self.buffers.add((slot * u64::from(bytes)) as usize) };
        let entry = opcode::Read::new(Fd(self.file.as_raw_fd()), place, bytes)
            .offset(block * u64::from(bytes))
            .build()
            .user_data(slot);
        // SAFETY: file and buffers outlive the ring's use of them.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)
    }

    fn run(&mut self, depth: u64, count: u64) -> io::Result<()> {
        for slot in 0..depth.min(count) {
            self.ask(slot)?;
        }
        let mut done = 0;
        let mut answered = Vec::new();
        while done < count {
            self.ring.submit_and_wait(1)?;
            answered.extend(self.ring.completion().map(|a| (a.user_data(), a.result())));
            for (slot, result) in answered.drain(..) {
                if u32::try_from(result) != Ok(self.kind.bytes) {
                    return Err(io::Error::other(format!("a read gave {result}")));
                }
                done += 1;
                if self.asked < count {
                    self.ask(slot)?;
                }
            }
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [kind, path, depth, count] = words.as_slice() else {
        return Err("usage: reads random|sequential PATH DEPTH COUNT".into());
    };
    let kind = match kind.as_str() {
        "random" => RANDOM,
        "sequential" => SEQUENTIAL,
        other => return Err(format!("{other}: neither random nor sequential").into()),
    };
    let (depth, count) = (depth.parse::<u32>()?, count.parse::<u64>()?);
    let mut reader = Reader::open(kind, path, depth)?;
    let began = Instant::now();
    reader.run(u64::from(depth), count)?;
    println!("{:.0}", count as f64 / began.elapsed().as_secs_f64());
    Ok(())
}
