//! Turns the kernel's records into events, and keeps the watched folders in step with what happens.
//!
//! Runs on worker threads with the identity of the user. Invariants: events come in the order of the
//! records; a folder is reported before what it holds; a folder found by a record is watched before it
//! is listed, so that whatever is in it is either in the list or in the queue. What the queue reports
//! as new is left to the queue, so nothing is reported twice.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use rustix::fs::inotify::ReadFlags;

use super::messages::{EventKind, FilesystemEvent};
use super::mounts;
use super::queue::{Queue, Record, WatchId};
use super::tree::Tree;
use crate::connect::error::cause;
use crate::connect::{Code, ConnectError};
use crate::filesystem::entry::EntryInfo;
use crate::filesystem::paths::clean;
use crate::filesystem::service::failed;
use crate::limits::{
    LIST_ENTRIES_MAX, WATCHED_FOLDERS_MAX, WATCH_BATCH_EVENTS, WATCH_QUEUE_EVENTS_MAX,
};
use crate::users::{Accounts, Names};

/// Name of the watched folder in its own events.
const TOP_NAME: &str = ".";
/// The bits of a record in the order their events are sent (contract section 3.6).
const KINDS: [(ReadFlags, EventKind); 5] = [
    (
        ReadFlags::CREATE.union(ReadFlags::MOVED_TO),
        EventKind::Create,
    ),
    (
        ReadFlags::MOVED_FROM.union(ReadFlags::MOVE_SELF),
        EventKind::Rename,
    ),
    (ReadFlags::ATTRIB, EventKind::Chmod),
    (ReadFlags::MODIFY, EventKind::Write),
    (
        ReadFlags::DELETE.union(ReadFlags::DELETE_SELF),
        EventKind::Remove,
    ),
];

/// Why a watch ended before its time.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Failure {
    /// The kernel's queue or ours was full.
    #[error("changes came faster than they could be read and some are lost; list the folder and start a new watch, of fewer folders if it happens again")]
    Overflow,
    /// Events nobody collected.
    #[error("more than {WATCH_QUEUE_EVENTS_MAX} events, or too large ones, waited to be collected and further ones are lost; list the folder, start a new watch and collect more often")]
    Backlog,
    /// Our limit on folders.
    #[error("all watches together are limited to {WATCHED_FOLDERS_MAX} folders; stop another watch, or watch a smaller folder")]
    Folders,
    /// The kernel's limit on folders.
    #[error("the kernel's limit on watched folders is reached; stop another watch, watch a smaller folder, or raise fs.inotify.max_user_watches")]
    KernelFolders,
    /// The file system went away.
    #[error("the file system of the watched folder was unmounted; mount it and start a new watch")]
    Unmounted,
    /// Anything else.
    #[error("the watch failed: {0}")]
    System(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSPC) => Failure::KernelFolders,
            _ => Failure::System(cause(&error)),
        }
    }
}

impl Failure {
    /// The error the client gets.
    pub fn error(&self) -> ConnectError {
        let code = match self {
            Failure::Overflow | Failure::Backlog | Failure::Folders | Failure::KernelFolders => {
                Code::ResourceExhausted
            }
            Failure::Unmounted => Code::FailedPrecondition,
            Failure::System(_) => Code::Internal,
        };
        ConnectError::new(code, self)
    }
}

/// What to watch.
#[derive(Debug, Clone)]
pub struct Target {
    /// Absolute path of the folder.
    pub path: PathBuf,
    /// Also what is below.
    pub recursive: bool,
    /// Describe the files of events.
    pub include_entry: bool,
    /// Network file systems too.
    pub allow_network: bool,
}

/// How far a call of [`Tracker::advance`] came.
#[derive(Debug)]
pub enum Progress {
    /// There may be more records.
    More,
    /// Every record there was is handled.
    Idle,
    /// The watched folder is gone.
    Over,
    /// The watch cannot go on.
    Failed(Failure),
}

/// Folders charged to the limit shared by all watches.
struct Charge {
    used: Arc<AtomicUsize>,
    folders: usize,
}

impl Charge {
    fn add(&mut self) -> Result<(), Failure> {
        if self.used.fetch_add(1, Ordering::Relaxed) >= WATCHED_FOLDERS_MAX {
            self.used.fetch_sub(1, Ordering::Relaxed);
            return Err(Failure::Folders);
        }
        self.folders += 1;
        Ok(())
    }

    fn release(&mut self, folders: usize) {
        self.used.fetch_sub(folders, Ordering::Relaxed);
        self.folders -= folders;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.used.fetch_sub(self.folders, Ordering::Relaxed);
    }
}

/// What came of trying to watch a folder.
enum Armed {
    /// It is gone, no folder, not for this user, or not of use.
    Skipped,
    /// It was watched all along.
    Known(WatchId),
    /// It is watched now.
    New(WatchId),
}

/// One name found in a folder.
struct Found {
    name: OsString,
    is_folder: bool,
    has_content: bool,
}

/// What the queue says about a name in a folder just watched.
struct Queued {
    /// Its first record makes it, so it was not there before.
    appears: bool,
    is_written: bool,
}

/// One watch. Dropping it closes its descriptor.
pub struct Tracker {
    target: Target,
    queue: Queue,
    tree: Tree,
    charge: Charge,
    events: Vec<FilesystemEvent>,
    names: Option<Names>,
}

impl Tracker {
    /// Watches a folder; when this returns, every later change is caught.
    pub fn open(target: Target, used_folders: Arc<AtomicUsize>) -> Result<Self, ConnectError> {
        let path = &target.path;
        let about = |error: io::Error| failed(path, &error);
        let info = fs::metadata(path).map_err(about)?;
        if !info.is_dir() {
            return Err(ConnectError::new(
                Code::InvalidArgument,
                format_args!(
                    "path '{}' is not a directory; watch the directory it is in",
                    path.display()
                ),
            ));
        }
        if let Some(kind) = mounts::network_kind(path).map_err(about)? {
            if !target.allow_network {
                return Err(ConnectError::new(
                    Code::InvalidArgument,
                    format_args!("cannot watch '{}': it is on a network file system ({kind}), which may not report changes; set allowNetworkMounts to watch it all the same", path.display()),
                ));
            }
        }
        let mut charge = Charge {
            used: used_folders,
            folders: 0,
        };
        charge.add().map_err(|failure| failure.error())?;
        let queue = Queue::new().map_err(|error| match error.raw_os_error() {
            Some(libc::EMFILE) => ConnectError::new(Code::ResourceExhausted, "the kernel's limit on watchers is reached; stop another watch, or raise fs.inotify.max_user_instances"),
            _ => about(error),
        })?;
        let top = queue
            .watch(path, true)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::ENOSPC) => Failure::KernelFolders.error(),
                _ => about(error),
            })?;
        let mut tracker = Self {
            tree: Tree::new(top, info.dev()),
            target,
            queue,
            charge,
            events: Vec::new(),
            names: None,
        };
        if tracker.target.recursive {
            tracker
                .watch_all_below()
                .map_err(|failure| failure.error())?;
        }
        Ok(tracker)
    }

    /// A descriptor that is readable when [`Self::advance`] has something to do.
    pub fn waker(&self) -> io::Result<OwnedFd> {
        self.queue.waker()
    }

    /// Handles records until there are none, or about [`WATCH_BATCH_EVENTS`] events are ready.
    pub fn advance(&mut self) -> (Vec<FilesystemEvent>, Progress) {
        // Accounts made since the last batch count.
        self.names = None;
        let progress = loop {
            if self.events.len() >= WATCH_BATCH_EVENTS {
                break Progress::More;
            }
            match self.queue.next() {
                Ok(None) => break Progress::Idle,
                Ok(Some(record)) => match self.handle(&record) {
                    Ok(true) => {}
                    Ok(false) => break Progress::Over,
                    Err(failure) => break Progress::Failed(failure),
                },
                Err(error) => break Progress::Failed(error.into()),
            }
        };
        (std::mem::take(&mut self.events), progress)
    }

    /// Handles one record. False when it is the last one.
    fn handle(&mut self, record: &Record) -> Result<bool, Failure> {
        if record.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return Err(Failure::Overflow);
        }
        if !self.tree.contains(record.watch) {
            return Ok(true);
        }
        let is_top = record.watch == self.tree.top();
        if record.flags.contains(ReadFlags::UNMOUNT) && is_top {
            return Err(Failure::Unmounted);
        }
        if record.flags.contains(ReadFlags::IGNORED) {
            self.forget(record.watch);
            return Ok(!is_top);
        }
        match &record.name {
            Some(name) => {
                let Some(path) = self.tree.relative(record.watch) else {
                    return Ok(true);
                };
                self.emit_all(record, &path.join(name));
                if self.target.recursive && record.is_folder() {
                    self.follow(record, name)?;
                }
                Ok(true)
            }
            None if is_top => {
                self.emit_all(record, Path::new(TOP_NAME));
                let ends = ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF;
                Ok(!record.flags.intersects(ends))
            }
            None => {
                // What happens to a folder below is reported by the one it is in. But this record comes
                // after both halves of a move: without the second one, it went out of the tree.
                if record.flags.contains(ReadFlags::MOVE_SELF)
                    && self.tree.abandon_move(record.watch)
                {
                    self.drop_below(record.watch);
                }
                Ok(true)
            }
        }
    }

    /// Keeps the watched folders in step with a record about a folder.
    fn follow(&mut self, record: &Record, name: &OsStr) -> Result<(), Failure> {
        let parent = record.watch;
        let flags = record.flags;
        if flags.contains(ReadFlags::MOVED_FROM) {
            self.tree.start_move(parent, name, record.cookie);
        } else if flags.contains(ReadFlags::DELETE) {
            if let Some(child) = self.tree.child(parent, name) {
                self.drop_below(child);
            }
        } else if record.appears() {
            match self.tree.finish_move(record.cookie) {
                Some(moved) => {
                    if !self.tree.place(moved, parent, name) {
                        self.drop_below(moved);
                    }
                }
                None => self.adopt(parent, name)?,
            }
        } else if flags.contains(ReadFlags::ATTRIB) && self.tree.child(parent, name).is_none() {
            // It may have become readable.
            self.adopt(parent, name)?;
        }
        Ok(())
    }

    /// Watches a folder that came into the tree, and reports what it holds.
    fn adopt(&mut self, parent: WatchId, name: &OsStr) -> Result<(), Failure> {
        let mut left = vec![(parent, name.to_owned())];
        while let Some((parent, name)) = left.pop() {
            let mark = self.queue.mark();
            let armed = self.arm(parent, &name)?;
            self.queue.read_queued()?;
            let is_replaced = self.queue.is_upcoming(parent, &name);
            match armed {
                // A later record makes a folder of this name, and that is the one found here.
                Armed::New(watch) if is_replaced => self.drop_below(watch),
                Armed::New(watch) => {
                    let folders = self.report_contents(watch, mark)?;
                    left.extend(folders.into_iter().rev().map(|name| (watch, name)));
                }
                Armed::Known(watch) if !is_replaced => {
                    self.tree.place(watch, parent, &name);
                }
                Armed::Known(_) | Armed::Skipped => {}
            }
        }
        Ok(())
    }

    /// Reports what a folder held when its watch began, and returns the folders among it. Records since
    /// the watch began are those since `mark`.
    fn report_contents(&mut self, watch: WatchId, mark: usize) -> Result<Vec<OsString>, Failure> {
        let Some(relative) = self.tree.relative(watch) else {
            return Ok(Vec::new());
        };
        let mut found = list(&self.target.path.join(&relative))?;
        self.queue.read_queued()?;
        let queued = self.queued_since(mark, watch);
        // The queue tells of something that was there and is gone from the list already.
        let listed: HashSet<_> = found.iter().map(|found| found.name.clone()).collect();
        let gone = queued
            .iter()
            .filter(|(name, state)| !state.appears && !listed.contains(*name));
        found.extend(gone.map(|(name, _)| Found {
            name: name.clone(),
            is_folder: false,
            has_content: false,
        }));
        found.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        let mut folders = Vec::new();
        for Found {
            name,
            is_folder,
            has_content,
        } in found
        {
            let state = queued.get(&name);
            if state.is_some_and(|state| state.appears) {
                continue;
            }
            if self.events.len() >= WATCH_QUEUE_EVENTS_MAX {
                return Err(Failure::Overflow);
            }
            let path = relative.join(&name);
            self.emit(EventKind::Create, &path);
            if has_content && !state.is_some_and(|state| state.is_written) {
                self.emit(EventKind::Write, &path);
            }
            if is_folder {
                folders.push(name);
            }
        }
        Ok(folders)
    }

    fn queued_since(&self, mark: usize, watch: WatchId) -> HashMap<OsString, Queued> {
        let mut queued: HashMap<OsString, Queued> = HashMap::new();
        for record in self.queue.since(mark) {
            let (true, Some(name)) = (record.watch == watch, &record.name) else {
                continue;
            };
            let state = queued.entry(name.clone()).or_insert_with(|| Queued {
                appears: record.appears(),
                is_written: false,
            });
            state.is_written |= record.flags.contains(ReadFlags::MODIFY);
        }
        queued
    }

    /// Watches all folders below the top, without events.
    fn watch_all_below(&mut self) -> Result<(), Failure> {
        let mut left = vec![self.tree.top()];
        while let Some(parent) = left.pop() {
            let Some(relative) = self.tree.relative(parent) else {
                continue;
            };
            for found in list(&self.target.path.join(relative))? {
                if !found.is_folder {
                    continue;
                }
                if let Armed::New(watch) = self.arm(parent, &found.name)? {
                    left.push(watch);
                }
            }
        }
        Ok(())
    }

    /// Asks the kernel to watch a folder below.
    fn arm(&mut self, parent: WatchId, name: &OsStr) -> Result<Armed, Failure> {
        let Some(relative) = self.tree.relative(parent) else {
            return Ok(Armed::Skipped);
        };
        let path = self.target.path.join(relative).join(name);
        let Ok(info) = fs::symlink_metadata(&path) else {
            return Ok(Armed::Skipped);
        };
        let crosses = self.tree.device(parent) != Some(info.dev());
        if !info.is_dir()
            || crosses && !mounts::is_of_use(&path, self.target.allow_network).unwrap_or(false)
        {
            return Ok(Armed::Skipped);
        }
        let watch = match self.queue.watch(&path, false) {
            Ok(watch) => watch,
            Err(error) => {
                return match error.raw_os_error() {
                    // It went away, or the user may not look into it.
                    Some(
                        libc::ENOENT
                        | libc::ENOTDIR
                        | libc::ELOOP
                        | libc::EACCES
                        | libc::EPERM
                        | libc::ENAMETOOLONG,
                    ) => Ok(Armed::Skipped),
                    _ => Err(error.into()),
                };
            }
        };
        if self.tree.contains(watch) {
            return Ok(Armed::Known(watch));
        }
        if let Err(failure) = self.charge.add() {
            self.queue.unwatch(watch);
            return Err(failure);
        }
        self.tree.insert(parent, name, watch, info.dev());
        Ok(Armed::New(watch))
    }

    /// Watches a folder and those below it no longer.
    fn drop_below(&mut self, watch: WatchId) {
        for watch in self.forget(watch) {
            self.queue.unwatch(watch);
        }
    }

    fn forget(&mut self, watch: WatchId) -> Vec<WatchId> {
        let removed = self.tree.remove(watch);
        self.charge.release(removed.len());
        removed
    }

    fn emit_all(&mut self, record: &Record, path: &Path) {
        for (flags, kind) in KINDS {
            if record.flags.intersects(flags) {
                self.emit(kind, path);
            }
        }
    }

    fn emit(&mut self, kind: EventKind, path: &Path) {
        let entry = if self.target.include_entry {
            let names = self.names.get_or_insert_with(|| Accounts::load().names());
            // By text, so that "." is the folder itself.
            let whole = clean(&self.target.path.join(path));
            EntryInfo::read(&whole, names).ok().map(Box::new)
        } else {
            None
        };
        self.events.push(FilesystemEvent {
            name: path.to_string_lossy().into_owned(),
            kind: kind.into(),
            entry,
        });
    }
}

/// What is in a folder. One that went away or that the user may not read holds nothing.
fn list(folder: &Path) -> Result<Vec<Found>, Failure> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(folder) else {
        return Ok(found);
    };
    for entry in entries.map_while(Result::ok) {
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        if found.len() >= LIST_ENTRIES_MAX {
            return Err(Failure::Overflow);
        }
        found.push(Found {
            name: entry.file_name(),
            is_folder: kind.is_dir(),
            has_content: kind.is_file() && entry.metadata().is_ok_and(|info| info.len() > 0),
        });
    }
    Ok(found)
}
