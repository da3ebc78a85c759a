//! Stacks as block devices (`/dev/ublkbN`), by the kernel's ublk driver.
//!
//! A device outlives this process: when the process is killed the kernel holds the I/O
//! back, and the next process takes the device over with the same stack ([`recover`],
//! in `devices.rs` of the registry). So a device exists exactly as long as its record does:
//! the record is written after the device is made and before it is started, and removed
//! after the device. What has no record is removed at the next start.

mod abi;
mod control;
pub mod record;
mod server;
mod sys;
pub mod users;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{mpsc, Arc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use crate::crew::Crew;
use crate::stacks::Entry;
use abi::Parameters;
pub use control::Unavailable;
use control::{block_path, Control};
use record::Records;
use server::{Mailbox, Server};
use sys::Queue;

/// Requests of a device at the same time.
const DEPTH: u16 = 64;
/// Largest read or write.
const MAX_IO_BYTES: u32 = 256 << 10;
/// Largest discard.
const MAX_DISCARD_BYTES: u32 = 1 << 30;
/// Requests of all devices together that take long, at the same time.
const MAX_LONG: usize = 64;
/// How long a thread may take to begin, or to end after its device is stopped.
const THREAD_WAIT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Between two looks whether a device that is being written back waits for room.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

struct Device {
    number: u32,
    mailbox: Arc<Mailbox>,
    /// `None` for one whose thread has ended.
    thread: Option<JoinHandle<()>>,
}

/// The ublk devices of this process.
pub struct Devices {
    control: Control,
    /// What devices stand for, and where their journals are.
    pub records: Records,
    tag: u64,
    crew: Arc<Crew>,
    table: Mutex<HashMap<String, Device>>,
}

impl Devices {
    /// Looks whether the kernel has what it takes; records are kept below `state`.
    pub fn open(state: &Path) -> Result<Devices, Unavailable> {
        let control = Control::open()?;
        let in_folder = |error| Unavailable::Folder(state.to_owned(), error);
        let records = Records::open(state).map_err(in_folder)?;
        let place = state.canonicalize().map_err(in_folder)?;
        let digest = Sha256::digest(place.as_os_str().as_encoded_bytes());
        let mut tag = [0; 8];
        tag.copy_from_slice(&digest[..8]);
        Ok(Devices {
            control,
            records,
            tag: u64::from_le_bytes(tag),
            crew: Arc::new(Crew::new("ublk-long", MAX_LONG)),
            table: Mutex::default(),
        })
    }

    /// The block device of a stack.
    pub fn path(&self, id: &str) -> Option<PathBuf> {
        Some(block_path(self.table.lock().get(id)?.number))
    }

    /// Whether changes of a stack's device wait for room on the host's disk.
    pub fn waits_for_room(&self, id: &str) -> bool {
        let table = self.table.lock();
        table.get(id).is_some_and(|d| d.mailbox.waits_for_room())
    }

    /// Makes a device and has `record` note its number; then serves it. Nothing is left
    /// of it after a failure.
    pub fn attach(
        &self,
        entry: &Arc<Entry>,
        record: impl FnOnce(u32) -> io::Result<()>,
    ) -> io::Result<()> {
        let number = self.control.add(DEPTH, MAX_IO_BYTES, self.tag)?.number;
        let started = record(number).and_then(|()| {
            let parameters = Parameters {
                size_bytes: entry.stack.virtual_size_bytes(),
                is_writable: entry.is_writable(),
                max_io_bytes: MAX_IO_BYTES,
                max_discard_bytes: MAX_DISCARD_BYTES,
            };
            self.control.set_parameters(number, &parameters)?;
            self.serve(entry, number, |control| control.start(number))
        });
        if let Err(error) = started {
            self.discard(number);
            return Err(error);
        }
        Ok(())
    }

    /// Serves a device that a killed process left; `false` when it had not got as far as
    /// to be started.
    pub fn take_over(&self, entry: &Arc<Entry>, number: u32) -> io::Result<bool> {
        if self.control.info(number)?.owner_tag != self.tag
            || !self.control.begin_recovery(number)?
        {
            return Ok(false);
        }
        self.serve(entry, number, |control| control.end_recovery(number))?;
        Ok(true)
    }

    /// Starts the thread of a device, has every slot given to the kernel, and then lets
    /// the I/O begin.
    fn serve(
        &self,
        entry: &Arc<Entry>,
        number: u32,
        begin: impl FnOnce(&Control) -> io::Result<()>,
    ) -> io::Result<()> {
        let (ready, begun) = mpsc::channel();
        let mailbox = Arc::new(Mailbox::new()?);
        let parts = (entry.clone(), self.crew.clone(), mailbox.clone());
        let thread = std::thread::Builder::new().name(format!("ublk-{number}"));
        let thread = thread.spawn(move || run(parts, number, &ready))?;
        match begun.recv_timeout(THREAD_WAIT) {
            Ok(result) => result?,
            Err(_) => return Err(io::ErrorKind::TimedOut.into()),
        }
        begin(&self.control)?;
        let device = Device {
            number,
            mailbox,
            thread: Some(thread),
        };
        self.table.lock().insert(entry.id.clone(), device);
        Ok(())
    }

    /// Stops and removes the device of a stack; its users get errors from now on. No
    /// error when there is none. After a failure it can be tried again.
    pub fn detach(&self, id: &str) -> io::Result<()> {
        let Some(mut device) = self.table.lock().remove(id) else {
            return Ok(());
        };
        let result = self.end(&mut device);
        match &result {
            Ok(()) => self.records.remove(id)?,
            Err(_) => {
                self.table.lock().insert(id.to_owned(), device);
            }
        }
        result
    }

    fn end(&self, device: &mut Device) -> io::Result<()> {
        // The kernel waits for every answer before it stops a device.
        device.mailbox.end();
        ignore_missing(self.control.stop(device.number))?;
        if let Some(thread) = device.thread.take() {
            let end = Instant::now() + THREAD_WAIT;
            while !thread.is_finished() {
                if Instant::now() > end {
                    device.thread = Some(thread);
                    let message = "requests of the device do not end";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, message));
                }
                std::thread::sleep(POLL_INTERVAL);
            }
            // Its outcome is in the log.
            let _ = thread.join();
        }
        ignore_missing(self.control.delete(device.number))
    }

    /// Writes what the kernel caches of a stack's device, so that the stack has all that
    /// was written to the device before. `StorageFull` as soon as some of it waits for room:
    /// the kernel goes on with it when there is some.
    pub fn write_back(&self, id: &str) -> io::Result<()> {
        let Some((path, mailbox)) = self.table.lock().get(id).map(|device| {
            let mailbox = device.mailbox.clone();
            (block_path(device.number), mailbox)
        }) else {
            return Ok(());
        };
        if !mailbox.waits_for_room() {
            let device = std::fs::File::open(path)?;
            let (done, result) = mpsc::channel();
            // The call cannot be broken off; it ends when there is room, or with the device.
            // Nobody listens any more by then.
            std::thread::spawn(move || done.send(sys::write_back(&device)));
            loop {
                match result.recv_timeout(LOOK_INTERVAL) {
                    Ok(result) => return result,
                    Err(_) if mailbox.waits_for_room() => break,
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        return Err(io::Error::other("the thread that writes back has ended"));
                    }
                }
            }
        }
        Err(io::Error::from_raw_os_error(nix::libc::ENOSPC))
    }

    /// Removes a device that nobody serves.
    fn discard(&self, number: u32) {
        let removed = ignore_missing(self.control.stop(number))
            .and_then(|()| ignore_missing(self.control.delete(number)));
        if let Err(error) = removed {
            tracing::error!(number, %error, "cannot remove a ublk device");
        }
    }

    /// Removes the devices of killed processes that served from this folder, but for
    /// those in use by this process.
    pub fn discard_strays(&self) {
        let kept: Vec<u32> = self
            .table
            .lock()
            .values()
            .map(|device| device.number)
            .collect();
        for number in control::numbers() {
            let info = self.control.info(number);
            if !kept.contains(&number) && info.is_ok_and(|info| info.owner_tag == self.tag) {
                tracing::warn!(number, "removing a ublk device that no stack belongs to");
                self.discard(number);
            }
        }
    }
}

/// The thread of a device. Tells once how it began.
fn run(
    (entry, crew, mailbox): (Arc<Entry>, Arc<Crew>, Arc<Mailbox>),
    number: u32,
    ready: &mpsc::Sender<io::Result<()>>,
) {
    if let Err(error) = sys::mark_io_flusher() {
        tracing::warn!(%error, "cannot mark a thread as a part of freeing memory");
    }
    let id = entry.id.clone();
    let begun = control::open_server_side(number)
        .and_then(|file| Queue::new(file, DEPTH, MAX_IO_BYTES))
        .and_then(|queue| Server::new(entry, crew, mailbox, queue, DEPTH));
    let server = match begun {
        Ok(server) => server,
        Err(error) => {
            // Nobody listens when it took too long.
            let _ = ready.send(Err(error));
            return;
        }
    };
    // As above.
    let _ = ready.send(Ok(()));
    if let Err(error) = server.run() {
        tracing::error!(id, number, %error, "a ublk device is not served any more");
    }
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(nix::libc::ENODEV) => Ok(()),
        other => other,
    }
}
