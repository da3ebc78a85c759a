//! Rings, mappings and buffers of ublk devices, behind safe calls.
//!
//! The kernel writes a slot's buffer only between the moment it is given the slot and the
//! moment it tells of a request, and reads it only while it takes an answer; in between
//! the slot's [`Loan`] is the only way to the bytes. An answer may have the kernel fill the
//! buffer from a file first: that is done, or has failed, when the entries were sent, since
//! such a read never waits.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{cqueue, opcode, squeue, IoUring};
use lsmt::InPlace;
use nix::libc;

use super::abi::{control_payload, slot_command, slot_payload, Descriptor, DESCRIPTOR_BYTES};

/// Most slots of a queue in the kernel's interface: decides where descriptors are mapped.
const MAX_DEPTH: usize = 4096;
const PAGE_BYTES: usize = 4096;
/// `PR_SET_IO_FLUSHER` of include/uapi/linux/prctl.h.
const PR_SET_IO_FLUSHER: i32 = 57;
/// User data of the wake-up entry; slots use their number.
const WAKE_UP: u64 = u64::MAX;
/// Bit of the user data of reads, beside their slot. They are told of only when they fail,
/// and then of the answer that was to follow nothing is.
const FILL: u64 = 1 << 32;

/// One command to the control device. `buffer` is read or written by the kernel.
///
/// `TimedOut` when there is no answer by the deadline: the command goes on.
pub fn control(
    device: &File,
    command: u32,
    number: u32,
    data: u64,
    buffer: &mut [u8],
    deadline: Duration,
) -> io::Result<()> {
    let mut ring = IoUring::<squeue::Entry128, cqueue::Entry>::builder().build(2)?;
    // Not `buffer` itself: the kernel may write to it after a deadline.
    let copy: &'static mut [u8] = Box::leak(buffer.to_vec().into_boxed_slice());
    let place = copy.as_mut_ptr();
    let length = copy.len();
    let payload = control_payload(number, place as u64, length as u16, data);
    let entry = opcode::UringCmd80::new(Fd(device.as_raw_fd()), command)
        .cmd(payload)
        .build();
    // SAFETY: the file is open until the answer or, after a deadline, until the kernel's
    // own reference to it ends; the buffer is leaked, so it is there for ever unless it is
    // taken back below, after the answer.
    unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    let timeout = Timespec::from(deadline);
    let arguments = SubmitArgs::new().timespec(&timeout);
    let result = loop {
        match ring.submitter().submit_with_args(1, &arguments) {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        }
        if let Some(answer) = ring.completion().next() {
            break answer.result();
        }
    };
    // SAFETY: `place` and `length` are those of the box leaked above, and the kernel has
    // answered, so nobody else has it.
    let copy = unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(place, length)) };
    if result < 0 {
        return Err(io::Error::from_raw_os_error(-result));
    }
    buffer.copy_from_slice(&copy);
    Ok(())
}

/// Lets this thread write back memory without waiting for itself: it is a part of the way
/// by which memory is freed.
pub fn mark_io_flusher() -> io::Result<()> {
    // SAFETY: takes numbers only.
    let result = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Writes what the kernel caches of a block device to it, and waits for that; asks for no
/// flush, which only costs where the writes themselves are meant.
pub fn write_back(device: &File) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: takes numbers and a descriptor that is open for the length of the call.
    if unsafe { libc::sync_file_range(device.as_raw_fd(), 0, 0, flags) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Memory mapped for as long as the value lives.
struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is plain memory; who may touch which part of it, and when, is the users' care.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(
        bytes: usize,
        protection: i32,
        flags: i32,
        file: i32,
        offset: i64,
    ) -> io::Result<Mapping> {
        // SAFETY: a new mapping at a place of the kernel's choice touches nothing that exists.
        let address =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, file, offset) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { address, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing refers to it any more.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.bytes) };
    }
}

/// The buffers of all slots of a queue.
struct Buffers {
    memory: Mapping,
    each_bytes: usize,
    lent: Vec<AtomicBool>,
}

/// The buffer of one slot while its request is worked on.
pub struct Loan {
    buffers: Arc<Buffers>,
    /// Whose buffer it is.
    pub slot: u16,
}

impl Loan {
    /// The first bytes of the buffer; `None` when it is smaller.
    pub fn bytes(&mut self, length_bytes: u64) -> Option<&mut [u8]> {
        let length = usize::try_from(length_bytes).ok()?;
        if length > self.buffers.each_bytes {
            return None;
        }
        let start = usize::from(self.slot) * self.buffers.each_bytes;
        // SAFETY: inside the mapping; `lent` makes this the only loan of the slot, and the
        // kernel leaves the buffer alone until the slot is given back.
        Some(unsafe {
            std::slice::from_raw_parts_mut(self.buffers.memory.address.as_ptr().add(start), length)
        })
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.buffers.lent[usize::from(self.slot)].store(false, Ordering::Release);
    }
}

/// What a queue tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A slot has a request.
    Request(u16),
    /// The file could not give what a slot's request was to be answered with: it still
    /// waits for an answer.
    NotRead(u16),
    /// A slot will have none any more.
    Closed(u16),
    /// Somebody rang the bell.
    WakeUp,
}

/// The only queue of a device. Belongs to the thread that made it.
pub struct Queue {
    ring: IoUring,
    device: File,
    descriptors: Mapping,
    buffers: Arc<Buffers>,
    depth: u16,
    /// Whose files are named in entries that are not sent yet.
    unsent: Vec<InPlace>,
}

impl Queue {
    /// Maps the descriptors of `device` and makes buffers; no slot is given yet.
    pub fn new(device: File, depth: u16, max_io_bytes: u32) -> io::Result<Queue> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            // Requests arrive in `wait` and at no other time: see `trim`.
            .setup_defer_taskrun()
            .build(u32::from(depth) * 2)?;
        let descriptors_bytes =
            (usize::from(depth) * DESCRIPTOR_BYTES).next_multiple_of(PAGE_BYTES);
        let descriptors = Mapping::new(
            descriptors_bytes,
            libc::PROT_READ,
            libc::MAP_SHARED | libc::MAP_POPULATE,
            device.as_raw_fd(),
            0,
        )?;
        const { assert!((MAX_DEPTH * DESCRIPTOR_BYTES) % PAGE_BYTES == 0) };
        let each_bytes = max_io_bytes as usize;
        let memory = Mapping::new(
            each_bytes * usize::from(depth),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )?;
        let lent = (0..depth).map(|_| AtomicBool::new(false)).collect();
        let buffers = Arc::new(Buffers {
            memory,
            each_bytes,
            lent,
        });
        Ok(Queue {
            ring,
            device,
            descriptors,
            buffers,
            depth,
            unsent: Vec::new(),
        })
    }

    /// Gives every slot to the kernel.
    pub fn fetch_all(&mut self) -> io::Result<()> {
        for slot in 0..self.depth {
            self.push(slot_command::FETCH, slot, 0)?;
        }
        self.ring.submit()?;
        Ok(())
    }

    /// Answers a request with bytes done or a negative error number, and gives its slot
    /// back. Sent with the next wait.
    pub fn answer(&mut self, loan: Loan, result: i32) -> io::Result<()> {
        let slot = loan.slot;
        drop(loan);
        self.push(slot_command::COMMIT_AND_FETCH, slot, result)
    }

    /// Answers a request to read with bytes of a file, if the page cache has them all: the
    /// kernel takes them from there, at the next wait. If it has not, that tells of
    /// [`Event::NotRead`]. Gives the loan back when that can never be.
    pub fn answer_from(&mut self, found: InPlace, loan: Loan) -> io::Result<Option<Loan>> {
        let length = found.length_bytes();
        let (Ok(count), Ok(result)) = (u32::try_from(length), i32::try_from(length)) else {
            return Ok(Some(loan));
        };
        let (slot, is_inside) = (loan.slot, count as usize <= self.buffers.each_bytes);
        let (Some((file, offset)), true) = (found.file(), is_inside) else {
            return Ok(Some(loan));
        };
        let fill = opcode::Read::new(Fd(file.as_raw_fd()), self.buffer(slot), count)
            .offset(offset)
            .rw_flags(libc::RWF_NOWAIT)
            .build()
            .flags(squeue::Flags::IO_LINK | squeue::Flags::SKIP_SUCCESS)
            .user_data(FILL | u64::from(slot));
        let answer = self.command(slot_command::COMMIT_AND_FETCH, slot, result);
        drop(loan);
        self.push_entries(&[fill, answer])?;
        self.unsent.push(found);
        Ok(None)
    }

    fn push(&mut self, command: u32, slot: u16, result: i32) -> io::Result<()> {
        let entry = self.command(command, slot, result);
        self.push_entries(&[entry])
    }

    fn command(&self, command: u32, slot: u16, result: i32) -> squeue::Entry {
        opcode::UringCmd16::new(Fd(self.device.as_raw_fd()), command)
            .cmd(slot_payload(slot, result, self.buffer(slot) as u64))
            .build()
            .user_data(u64::from(slot))
    }

    fn buffer(&self, slot: u16) -> *mut u8 {
        let start = usize::from(slot) * self.buffers.each_bytes;
        // SAFETY: the slot is below the depth, so this is inside the mapping.
        unsafe { self.buffers.memory.address.as_ptr().add(start) }
    }

    /// All of them are sent together, as linked ones must be.
    fn push_entries(&mut self, entries: &[squeue::Entry]) -> io::Result<()> {
        // SAFETY: device and buffers live as long as the ring does, which is dropped first
        // (the order of the fields); the bell outlives the queue (see `listen`), and files
        // that are read are open until their entries are sent (`unsent`).
        while unsafe { self.ring.submission().push_multiple(entries) }.is_err() {
            self.ring.submit()?;
        }
        Ok(())
    }

    /// Tells of the bell, once. It must stay open as long as the queue.
    pub fn listen(&mut self, bell: BorrowedFd<'_>) -> io::Result<()> {
        let entry = opcode::PollAdd::new(Fd(bell.as_raw_fd()), libc::POLLIN as u32)
            .build()
            .user_data(WAKE_UP);
        self.push_entries(&[entry])
    }

    /// Sends what is prepared and waits for at least one event. Nothing within the time is
    /// no event; without a time it waits for ever.
    pub fn wait(&mut self, timeout: Option<Duration>, events: &mut Vec<Event>) -> io::Result<()> {
        let waited = match timeout {
            None => self.ring.submit_and_wait(1),
            Some(timeout) => {
                let timeout = Timespec::from(timeout);
                let arguments = SubmitArgs::new().timespec(&timeout);
                self.ring.submitter().submit_with_args(1, &arguments)
            }
        };
        match waited {
            Ok(_) => {}
            Err(error) if is_one_of(&error, &[libc::EINTR, libc::ETIME, libc::EBUSY]) => {}
            Err(error) => return Err(error),
        }
        if self.ring.submission().is_empty() {
            self.unsent.clear();
        }
        for answer in self.ring.completion() {
            events.push(match answer.user_data() {
                WAKE_UP => Event::WakeUp,
                fill if fill & FILL != 0 => Event::NotRead(fill as u16),
                slot if answer.result() == 0 => Event::Request(slot as u16),
                slot => Event::Closed(slot as u16),
            });
        }
        Ok(())
    }

    /// The request of a slot that was told of, and the slot's buffer; `None` when that is
    /// out on loan, which would be a fault of the kernel's.
    pub fn take(&self, slot: u16) -> Option<(Descriptor, Loan)> {
        let lent = self.buffers.lent.get(usize::from(slot))?;
        if lent.swap(true, Ordering::AcqRel) {
            return None;
        }
        let mut bytes = [0; DESCRIPTOR_BYTES];
        // SAFETY: inside the mapping, since `lent` has as many entries as there are slots;
        // the kernel does not change it while the slot's request is worked on.
        unsafe {
            let place = self.descriptors.address.as_ptr();
            let place = place.add(usize::from(slot) * DESCRIPTOR_BYTES);
            std::ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), DESCRIPTOR_BYTES);
        }
        let buffers = self.buffers.clone();
        Some((Descriptor::decode(&bytes), Loan { buffers, slot }))
    }

    /// Gives the memory of the buffers back to the system. Only while no request is worked
    /// on, and when the last `wait` told of none: what a buffer held is lost.
    pub fn trim(&self) {
        let mut lent = self.buffers.lent.iter();
        if !self.unsent.is_empty() || lent.any(|lent| lent.load(Ordering::Acquire)) {
            return;
        }
        let memory = &self.buffers.memory;
        // SAFETY: the pages stay mapped and read as zero; no loan refers to them. The kernel
        // fills buffers in the work it defers to `wait`, so none is filled and untold of.
        unsafe {
            libc::madvise(
                memory.address.as_ptr().cast(),
                memory.bytes,
                libc::MADV_DONTNEED,
            )
        };
    }
}

fn is_one_of(error: &io::Error, codes: &[i32]) -> bool {
    error
        .raw_os_error()
        .is_some_and(|code| codes.contains(&code))
}
