//! Serves the requests of one device.
//!
//! One thread takes them from the kernel and does at once what takes only a copy; what a
//! sealed layer has in the page cache it has the kernel itself copy, with no call for each
//! request. What may take long (flushes, discards, anything on a stack that may wait for a registry) goes to
//! a crew, so that it holds up neither the other requests nor the other devices. A change
//! that finds no room on the host's disk is kept, and done again until there is some: an
//! error would lose what the kernel's page cache has told a program is written.
//! Invariant: every request is answered once, with what became of it; the thread ends when
//! the kernel has said of each slot that it is closed, and not before.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lsmt::StackError;
use nix::libc;
use nix::sys::eventfd::EventFd;
use parking_lot::Mutex;

use super::abi::{operation, Descriptor};
use super::sys::{Event, Loan, Queue};
use crate::api::error::{io_cause, is_storage_full};
use crate::crew::Crew;
use crate::stacks::Entry;

/// A device that nobody uses for this long gives its buffers back.
const IDLE_TIME: Duration = Duration::from_secs(1);
/// Reads that are done by calls after one that the page cache could not answer: they have
/// the system read ahead.
const READS_AHEAD: u32 = 32;

/// How often changes that found no room are done again.
const ROOM_INTERVAL: Duration = Duration::from_millis(250);

/// A request that was taken from the kernel and is not answered yet.
struct Task {
    descriptor: Descriptor,
    loan: Loan,
    /// Whether it has found no room before.
    has_waited: bool,
}

/// Where others and the thread of a device meet.
pub struct Mailbox {
    answers: Mutex<Vec<(Task, i32)>>,
    bell: EventFd,
    /// Requests that wait for room.
    waiting: AtomicUsize,
    is_ending: AtomicBool,
}

impl Mailbox {
    /// An empty one.
    pub fn new() -> io::Result<Mailbox> {
        Ok(Mailbox {
            answers: Mutex::default(),
            bell: EventFd::new()?,
            waiting: AtomicUsize::new(0),
            is_ending: AtomicBool::new(false),
        })
    }

    /// Whether changes of the device wait for room on the host's disk.
    pub fn waits_for_room(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// From now on a change that finds no room fails, also what waits now: the device goes.
    pub fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.ring();
    }

    fn ring(&self) {
        // It fails only when 2^64 answers have not been taken.
        let _ = self.bell.write(1);
    }
}

/// What serves a device.
pub struct Server {
    entry: Arc<Entry>,
    crew: Arc<Crew>,
    queue: Queue,
    mailbox: Arc<Mailbox>,
    open_slots: u16,
    /// Requests that the crew has.
    away: usize,
    /// Changes that found no room, in the order of their coming.
    kept: Vec<Task>,
    /// When they were last done again.
    tried_at: Instant,
    /// Reads that are done by calls from now on.
    by_call: u32,
}

impl Server {
    /// Gives every slot of `queue` to the kernel.
    pub fn new(
        entry: Arc<Entry>,
        crew: Arc<Crew>,
        mailbox: Arc<Mailbox>,
        queue: Queue,
        depth: u16,
    ) -> io::Result<Server> {
        let mut server = Server {
            entry,
            crew,
            queue,
            mailbox,
            open_slots: depth,
            away: 0,
            kept: Vec::new(),
            tried_at: Instant::now(),
            by_call: 0,
        };
        server.queue.listen(server.mailbox.bell.as_fd())?;
        server.queue.fetch_all()?;
        Ok(server)
    }

    /// Serves until the device is stopped.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = Vec::new();
        let mut is_trimmed = true;
        while self.open_slots > 0 || self.away > 0 {
            let timeout = match self.kept.is_empty() {
                true => (!is_trimmed).then_some(IDLE_TIME),
                false => Some(ROOM_INTERVAL),
            };
            self.queue.wait(timeout, &mut events)?;
            if events.is_empty() && timeout.is_some() && self.kept.is_empty() {
                self.queue.trim();
                is_trimmed = true;
            }
            if !self.kept.is_empty() && self.tried_at.elapsed() >= ROOM_INTERVAL {
                self.try_again()?;
            }
            for event in events.drain(..) {
                match event {
                    Event::Request(slot) => {
                        is_trimmed = false;
                        self.request(slot)?;
                    }
                    Event::NotRead(slot) => {
                        self.by_call = READS_AHEAD;
                        self.request(slot)?;
                    }
                    Event::Closed(_) => self.open_slots = self.open_slots.saturating_sub(1),
                    Event::WakeUp => self.deliver()?,
                }
            }
        }
        Ok(())
    }

    fn request(&mut self, slot: u16) -> io::Result<()> {
        let Some((descriptor, mut loan)) = self.queue.take(slot) else {
            let message = format!("slot {slot} has a request before its last one was answered");
            return Err(io::Error::other(message));
        };
        let is_long = takes_long(&self.entry, &descriptor);
        if !is_long {
            let Some(back) = self.answer_in_place(&descriptor, loan)? else {
                return Ok(());
            };
            loan = back;
        }
        let task = Task {
            descriptor,
            loan,
            has_waited: false,
        };
        self.work(task, is_long)
    }

    /// Does a task at once, or has the crew do it.
    fn work(&mut self, mut task: Task, is_long: bool) -> io::Result<()> {
        if !is_long {
            let result = perform(&self.entry, &mut task);
            return self.finish(task, result);
        }
        self.away += 1;
        let (entry, mailbox) = (self.entry.clone(), self.mailbox.clone());
        self.crew.run(move || {
            let result = perform(&entry, &mut task);
            entry.stack.settle();
            drop(entry);
            mailbox.answers.lock().push((task, result));
            mailbox.ring();
        });
        Ok(())
    }

    /// Answers a task that was done, or keeps it while there is no room for it.
    fn finish(&mut self, mut task: Task, result: i32) -> io::Result<()> {
        let waiting = &self.mailbox.waiting;
        let is_ending = self.mailbox.is_ending.load(Ordering::Acquire);
        // A flush that failed must not be done again: the second one would know of no loss.
        let may_wait = task.descriptor.operation != operation::FLUSH && !is_ending;
        if result == -libc::ENOSPC && may_wait {
            if !task.has_waited && waiting.fetch_add(1, Ordering::AcqRel) == 0 {
                tracing::warn!(id = self.entry.id, "no room: changes of a device wait");
            }
            if self.kept.is_empty() {
                self.tried_at = Instant::now();
            }
            task.has_waited = true;
            self.kept.push(task);
            return Ok(());
        }
        if result == -libc::ENOSPC {
            tracing::error!(id = self.entry.id, "no room: a request of a device failed");
        }
        if task.has_waited && waiting.fetch_sub(1, Ordering::AcqRel) == 1 {
            tracing::info!(id = self.entry.id, "no change of a device waits for room");
        }
        self.queue.answer(task.loan, result)
    }

    /// Does what is kept again, in its order, up to the first that still finds no room.
    fn try_again(&mut self) -> io::Result<()> {
        self.tried_at = Instant::now();
        let mut left = std::mem::take(&mut self.kept).into_iter();
        while self.kept.is_empty() {
            let Some(task) = left.next() else { break };
            let is_long = takes_long(&self.entry, &task.descriptor);
            self.work(task, is_long)?;
        }
        self.kept.extend(left);
        Ok(())
    }

    /// Has the kernel answer a read from its page cache, if all of it is in a layer as it
    /// is; else gives the loan back.
    fn answer_in_place(&mut self, request: &Descriptor, loan: Loan) -> io::Result<Option<Loan>> {
        if request.operation != operation::READ {
            return Ok(Some(loan));
        }
        if self.by_call > 0 {
            self.by_call -= 1;
            return Ok(Some(loan));
        }
        let (length, offset) = (request.length_bytes, request.offset_bytes);
        match self.entry.stack.in_place(length, offset) {
            // The disk may end inside a sector: the rest is not in the layer.
            Some(found) if found.length_bytes() == length => self.queue.answer_from(found, loan),
            _ => Ok(Some(loan)),
        }
    }

    fn deliver(&mut self) -> io::Result<()> {
        self.mailbox.bell.read()?;
        let answers = std::mem::take(&mut *self.mailbox.answers.lock());
        for (task, result) in answers {
            self.away -= 1;
            self.finish(task, result)?;
        }
        if self.mailbox.is_ending.load(Ordering::Acquire) {
            self.try_again()?;
        }
        self.queue.listen(self.mailbox.bell.as_fd())
    }
}

fn takes_long(entry: &Entry, request: &Descriptor) -> bool {
    let is_copy = matches!(request.operation, operation::READ | operation::WRITE);
    !is_copy || request.is_fua || entry.stack.may_wait()
}

/// Does a request; bytes done, or a negative error number.
fn perform(entry: &Entry, task: &mut Task) -> i32 {
    match transfer(entry, &task.descriptor, &mut task.loan) {
        Ok(bytes) => i32::try_from(bytes).unwrap_or(i32::MAX),
        Err(error) => {
            let code = error_number(&error);
            if code != libc::EROFS && code != libc::ENOSPC {
                let (id, operation) = (&entry.id, task.descriptor.operation);
                tracing::error!(id, operation, %error, "request failed");
            }
            -code
        }
    }
}

fn transfer(entry: &Entry, request: &Descriptor, loan: &mut Loan) -> Result<u64, StackError> {
    let (offset, length) = (request.offset_bytes, request.length_bytes);
    let too_large = || StackError::OutOfRange {
        offset_bytes: offset,
        length_bytes: length,
        virtual_size_bytes: entry.stack.virtual_size_bytes(),
    };
    match request.operation {
        operation::READ => {
            let buffer = loan.bytes(length).ok_or_else(too_large)?;
            let count = entry.stack.read_at(buffer, offset)?;
            // The disk may end inside a sector.
            buffer[count..].fill(0);
        }
        operation::WRITE => {
            let bytes = loan.bytes(length).ok_or_else(too_large)?;
            entry.stack.write_at(bytes, offset)?;
        }
        operation::DISCARD | operation::WRITE_ZEROES => entry.stack.discard(offset, length)?,
        operation::FLUSH => {
            entry.stack.flush()?;
            return Ok(0);
        }
        _ => return Err(too_large()),
    }
    if request.is_fua {
        entry.stack.flush()?;
    }
    Ok(length)
}

fn error_number(error: &StackError) -> i32 {
    match error {
        StackError::ReadOnly => libc::EROFS,
        StackError::OutOfRange { .. } => libc::EINVAL,
        _ if io_cause(error).is_some_and(is_storage_full) => libc::ENOSPC,
        _ => libc::EIO,
    }
}
