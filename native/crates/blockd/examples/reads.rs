//! How many 4 KiB reads a second a file or device answers, so many at a time: as a VMM with
//! asynchronous I/O asks for them. For `tests/lab/figures.py`.
//!
//! `reads PATH DEPTH COUNT`: reads past the page cache, each block once in an order that
//! jumps, over and over until `COUNT` reads are done. Prints reads per second.
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

const BLOCK_BYTES: u32 = 4096;
/// A prime beside which no number of blocks of a test has a factor.
const STRIDE: u64 = 7919;

struct Reader {
    file: File,
    ring: IoUring,
    buffers: *mut u8,
    blocks: u64,
    asked: u64,
}

impl Reader {
    fn open(path: &str, depth: u32) -> io::Result<Reader> {
        let mut options = File::options();
        let mut file = options.read(true).custom_flags(libc::O_DIRECT).open(path)?;
        let blocks = file.seek(SeekFrom::End(0))? / u64::from(BLOCK_BYTES);
        let size = (BLOCK_BYTES * depth) as usize;
        let layout =
            Layout::from_size_align(size, BLOCK_BYTES as usize).map_err(io::Error::other)?;
        // SAFETY: the size is not zero: a ring has at least one entry. Never freed.
        let buffers = unsafe { alloc(layout) };
        if buffers.is_null() {
            handle_alloc_error(layout);
        }
        let ring = IoUring::new(depth)?;
        Ok(Reader {
            file,
            ring,
            buffers,
            blocks,
            asked: 0,
        })
    }

    fn ask(&mut self, slot: u64) -> io::Result<()> {
        let block = self.asked * STRIDE % self.blocks;
        self.asked += 1;
        // SAFETY: `slot` is below the depth, for which there are buffers.
        let place = unsafe { self.buffers.add((slot * u64::from(BLOCK_BYTES)) as usize) };
        let entry = opcode::Read::new(Fd(self.file.as_raw_fd()), place, BLOCK_BYTES)
            .offset(block * u64::from(BLOCK_BYTES))
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
                if u32::try_from(result) != Ok(BLOCK_BYTES) {
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
    let [path, depth, count] = words.as_slice() else {
        return Err("usage: reads PATH DEPTH COUNT".into());
    };
    let (depth, count) = (depth.parse::<u32>()?, count.parse::<u64>()?);
    let mut reader = Reader::open(path, depth)?;
    let began = Instant::now();
    reader.run(u64::from(depth), count)?;
    println!("{:.0}", count as f64 / began.elapsed().as_secs_f64());
    Ok(())
}
