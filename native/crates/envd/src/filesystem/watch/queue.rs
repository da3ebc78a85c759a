//! The kernel's queue of one inotify descriptor, and the records read from it but not yet handled.
//!
//! Invariants: records are handed out in the order the kernel made them, and at most
//! [`WATCH_QUEUE_EVENTS_MAX`] wait here; more is an overflow, reported as the kernel reports its own.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use crate::limits::{WATCH_QUEUE_EVENTS_MAX, WATCH_READ_BYTES};

/// What is asked of the kernel for every folder.
const INTEREST: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR)
    // Writes to a file that has no name any more concern nobody.
    .union(WatchFlags::EXCL_UNLINK);

/// Number the kernel gives a watched folder; one per folder and descriptor, not used again.
pub type WatchId = i32;

/// One record of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Folder it is about.
    pub watch: WatchId,
    /// What happened.
    pub flags: ReadFlags,
    /// Same for both halves of a move.
    pub cookie: u32,
    /// Name in the folder; None for the folder itself.
    pub name: Option<OsString>,
}

impl Record {
    /// Whether a name came into being by it.
    pub fn appears(&self) -> bool {
        self.flags
            .intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO)
    }

    /// Whether it is about a folder in the folder.
    pub fn is_folder(&self) -> bool {
        self.flags.contains(ReadFlags::ISDIR)
    }
}

/// One inotify descriptor.
pub struct Queue {
    fd: OwnedFd,
    pending: VecDeque<Record>,
    /// Folders that come into being by pending records, counted.
    upcoming: HashMap<(WatchId, OsString), u32>,
    overflowed: bool,
}

impl Queue {
    /// An empty queue.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            fd: inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?,
            pending: VecDeque::new(),
            upcoming: HashMap::new(),
            overflowed: false,
        })
    }

    /// A second descriptor of the same queue, to wait on.
    pub fn waker(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Watches a folder; the same folder again gives the same number. Links are followed on request.
    pub fn watch(&self, path: &Path, follow: bool) -> io::Result<WatchId> {
        let flags = if follow {
            INTEREST
        } else {
            INTEREST | WatchFlags::DONT_FOLLOW
        };
        Ok(inotify::add_watch(&self.fd, path, flags)?)
    }

    /// Watches a folder no longer.
    pub fn unwatch(&self, watch: WatchId) {
        // The kernel may have dropped it already, with the folder.
        let _gone = inotify::remove_watch(&self.fd, watch);
    }

    /// The next record, or None when there is nothing to read now.
    pub fn next(&mut self) -> io::Result<Option<Record>> {
        if self.pending.is_empty() && !self.read()? {
            return Ok(None);
        }
        let Some(record) = self.pending.pop_front() else {
            return Ok(None);
        };
        if let Some(key) = upcoming_key(&record) {
            if let Some(count) = self.upcoming.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    self.upcoming.remove(&key);
                }
            }
        }
        Ok(Some(record))
    }

    /// Reads what the kernel has queued by now; it becomes pending.
    pub fn read_queued(&mut self) -> io::Result<()> {
        let mut left_bytes = rustix::io::ioctl_fionread(&self.fd)?;
        // A read stops short of the buffer's end by less than one record, so each takes at least half.
        while left_bytes > 0 && self.read()? {
            left_bytes = left_bytes.saturating_sub(WATCH_READ_BYTES as u64 / 2);
        }
        Ok(())
    }

    /// The place after the last pending record, for [`Self::since`].
    pub fn mark(&self) -> usize {
        self.pending.len()
    }

    /// Pending records after a mark. Marks hold until the next call of [`Self::next`].
    pub fn since(&self, mark: usize) -> impl Iterator<Item = &Record> {
        self.pending.iter().skip(mark)
    }

    /// Whether a pending record is about a folder that comes into being under this name.
    pub fn is_upcoming(&self, watch: WatchId, name: &OsStr) -> bool {
        !self.upcoming.is_empty() && self.upcoming.contains_key(&(watch, name.to_owned()))
    }

    /// One read. False when the kernel has nothing.
    fn read(&mut self) -> io::Result<bool> {
        let mut buffer = [MaybeUninit::uninit(); WATCH_READ_BYTES];
        let mut reader = Reader::new(&self.fd, &mut buffer);
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::WOULDBLOCK) => return Ok(false),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let record = Record {
                watch: event.wd(),
                flags: event.events(),
                cookie: event.cookie(),
                name: event
                    .file_name()
                    .map(|name| OsStr::from_bytes(name.to_bytes()).to_owned()),
            };
            if self.pending.len() < WATCH_QUEUE_EVENTS_MAX {
                if let Some(key) = upcoming_key(&record) {
                    *self.upcoming.entry(key).or_default() += 1;
                }
                self.pending.push_back(record);
            } else if !self.overflowed {
                self.overflowed = true;
                self.pending.push_back(Record {
                    watch: -1,
                    flags: ReadFlags::QUEUE_OVERFLOW,
                    cookie: 0,
                    name: None,
                });
            }
            if reader.is_buffer_empty() {
                return Ok(true);
            }
        }
    }
}

fn upcoming_key(record: &Record) -> Option<(WatchId, OsString)> {
    if !record.is_folder() || !record.appears() {
        return None;
    }
    Some((record.watch, record.name.clone()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filesystem::watch::tests::Scratch;

    #[test]
    fn records_keep_their_order_and_folders_are_foreseen() {
        let folder = Scratch::new("queue");
        let mut queue = Queue::new().unwrap();
        let watch = queue.watch(&folder.path, true).unwrap();
        assert_eq!(queue.watch(&folder.path, false).unwrap(), watch);
        assert_eq!(queue.next().unwrap(), None);
        std::fs::write(folder.path.join("f"), "x").unwrap();
        std::fs::create_dir(folder.path.join("d")).unwrap();
        queue.read_queued().unwrap();
        let queued: Vec<_> = queue.since(0).cloned().collect();
        let names: Vec<_> = queued
            .iter()
            .map(|record| (record.name.clone().unwrap(), record.flags))
            .collect();
        assert_eq!(
            names,
            [
                ("f".into(), ReadFlags::CREATE),
                ("f".into(), ReadFlags::MODIFY),
                ("d".into(), ReadFlags::CREATE | ReadFlags::ISDIR),
            ]
        );
        assert!(queue.is_upcoming(watch, OsStr::new("d")));
        assert!(!queue.is_upcoming(watch, OsStr::new("f")));
        std::fs::remove_dir(folder.path.join("d")).unwrap();
        let mark = queue.mark();
        queue.read_queued().unwrap();
        assert_eq!(queue.since(mark).count(), 1);
        for record in queued {
            assert_eq!(queue.next().unwrap(), Some(record));
        }
        assert!(!queue.is_upcoming(watch, OsStr::new("d")));
        assert!(queue
            .next()
            .unwrap()
            .unwrap()
            .flags
            .contains(ReadFlags::DELETE));
    }
}
