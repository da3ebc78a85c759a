//! Table of live processes and of the lately ended ones, and the events of each.
//!
//! Invariant: a pid in the live table is ours and not yet collected, so it cannot be reused. A process
//! may end before its spawn is through and its entry made; its status waits in `unclaimed` meanwhile.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::process::{
    kill_process, waitid, Pid, Signal as OsSignal, WaitId, WaitIdOptions, WaitOptions, WaitStatus,
};
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::sync::{mpsc, watch};

use super::cgroup::{kill_by_walk, Cgroup, CgroupRoot};
use super::io::{InputKind, Stdin};
use super::messages::{
    EndEvent, ProcessConfig, ProcessEvent, ProcessInfo, ProcessSelector, Signal,
};
use crate::app::lock;
use crate::connect::{Code, ConnectError};
use crate::limits::{
    FINISHED_MAX, FINISHED_RETENTION, REAP_BATCH, SUBSCRIBERS_MAX, SUBSCRIBER_QUEUE_EVENTS,
    SUBSCRIBER_STALL,
};

/// One process started by a client.
pub struct Process {
    /// Process id, also its session and process group.
    pub pid: u32,
    /// What runs; emptied at its end, since arguments may be large and the status is kept for a while.
    pub config: Mutex<ProcessConfig>,
    /// Caller's name for it.
    pub tag: Option<String>,
    /// Its stdin or terminal.
    pub stdin: Stdin,
    /// Its cgroup, where there is one, while it runs.
    cgroup: Mutex<Option<Cgroup>>,
    /// Set once by the reaper.
    pub exit: watch::Sender<Option<EndEvent>>,
    hub: Mutex<Hub>,
}

#[derive(Default)]
struct Hub {
    subscribers: Vec<(u64, mpsc::Sender<ProcessEvent>)>,
    next_id: u64,
    /// Followers that were dropped for taking nothing and have not left yet.
    cut: Vec<u64>,
    end: Option<EndEvent>,
}

/// One client's place in the stream of events. Leaving is dropping it.
pub struct Subscription {
    /// The process followed.
    pub process: Arc<Process>,
    /// Its events; closed when the process has ended and all was sent.
    pub events: mpsc::Receiver<ProcessEvent>,
    id: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut hub = lock(&self.process.hub);
        hub.subscribers.retain(|(id, _)| *id != self.id);
        hub.cut.retain(|id| *id != self.id);
    }
}

impl Subscription {
    /// How the process ended; set once `events` is closed for that reason. None for a follower that was
    /// dropped: it missed output, and an end would say that it had all.
    pub fn end(&self) -> Option<EndEvent> {
        let hub = lock(&self.process.hub);
        hub.end.clone().filter(|_| !hub.cut.contains(&self.id))
    }
}

impl Process {
    /// A process just spawned.
    pub fn new(
        pid: u32,
        config: ProcessConfig,
        tag: Option<String>,
        stdin: Stdin,
        cgroup: Option<Cgroup>,
    ) -> Self {
        Self {
            pid,
            config: Mutex::new(config),
            tag,
            stdin,
            cgroup: Mutex::new(cgroup),
            exit: watch::Sender::new(None),
            hub: Mutex::default(),
        }
    }

    /// One that ended and left nothing but how.
    fn ended(record: &Ended) -> Self {
        let end = end_event(record.status);
        let stdin = Stdin::new(InputKind::Disabled, None);
        let config = ProcessConfig::default();
        let process = Self::new(record.pid, config, record.tag.clone(), stdin, None);
        process.exit.send_replace(Some(end.clone()));
        lock(&process.hub).end = Some(end);
        process
    }

    /// Follows the process from now on; there is no replay.
    pub fn subscribe(self: &Arc<Self>) -> Result<Subscription, ConnectError> {
        let mut hub = lock(&self.hub);
        if hub.subscribers.len() >= SUBSCRIBERS_MAX {
            return Err(ConnectError::new(
                Code::ResourceExhausted,
                format_args!(
                    "process {} already has {SUBSCRIBERS_MAX} followers; close one first",
                    self.pid
                ),
            ));
        }
        let (sender, events) = mpsc::channel(SUBSCRIBER_QUEUE_EVENTS);
        let id = hub.next_id;
        hub.next_id += 1;
        if hub.end.is_none() {
            hub.subscribers.push((id, sender));
        }
        Ok(Subscription {
            process: self.clone(),
            events,
            id,
        })
    }

    /// Hands an event to every follower and waits until each has room for it: this wait is what makes
    /// a fast writer run at the pace of its reader. Without followers the event is dropped; a follower
    /// that takes nothing for [`SUBSCRIBER_STALL`] is dropped when there are others.
    pub async fn publish(&self, event: ProcessEvent) {
        let targets = lock(&self.hub).subscribers.clone();
        for (id, sender) in targets {
            let mut event = event.clone();
            while let Err(SendTimeoutError::Timeout(unsent)) =
                sender.send_timeout(event, SUBSCRIBER_STALL).await
            {
                let mut hub = lock(&self.hub);
                if hub.subscribers.len() > 1 {
                    hub.subscribers.retain(|(other, _)| *other != id);
                    hub.cut.push(id);
                    break;
                }
                event = unsent;
            }
            // A closed queue belongs to a client that left: its subscription removes itself.
        }
    }

    /// Closes the stream of events with the way the process ended.
    pub fn finish(&self, end: EndEvent) {
        let mut hub = lock(&self.hub);
        hub.end = Some(end);
        hub.subscribers.clear();
    }

    fn kill_tree(&self) {
        if lock(&self.cgroup)
            .as_ref()
            .is_some_and(|group| group.kill().is_ok())
        {
            return;
        }
        kill_by_walk(self.pid);
    }
}

/// All processes.
pub struct Registry {
    tables: Mutex<Tables>,
    /// Where per-process cgroups live.
    pub cgroups: Option<CgroupRoot>,
}

#[derive(Default)]
struct Tables {
    live: HashMap<u32, Arc<Process>>,
    ended: VecDeque<Ended>,
    /// Spawns under way.
    spawning: usize,
    /// Statuses collected meanwhile that belong to no live process.
    unclaimed: HashMap<u32, WaitStatus>,
}

/// A process that ended lately.
struct Ended {
    at: Instant,
    pid: u32,
    tag: Option<String>,
    status: WaitStatus,
    /// As long as its output is not through; what it takes is too much to keep for thousands.
    process: Option<Arc<Process>>,
}

impl Tables {
    fn live(&self, selector: &ProcessSelector) -> Option<&Arc<Process>> {
        match (selector.pid, selector.tag.as_deref()) {
            (Some(pid), _) => self.live.get(&pid),
            (None, Some(tag)) => self
                .live
                .values()
                .find(|process| process.tag.as_deref() == Some(tag)),
            (None, None) => None,
        }
    }

    fn forget_old(&mut self) {
        while self
            .ended
            .front()
            .is_some_and(|record| record.at.elapsed() > FINISHED_RETENTION)
            || self.ended.len() > FINISHED_MAX
        {
            self.ended.pop_front();
        }
    }
}

fn not_found(selector: &ProcessSelector) -> ConnectError {
    match (selector.pid, selector.tag.as_deref()) {
        (Some(pid), _) => ConnectError::new(
            Code::NotFound,
            format_args!("process with pid {pid} not found"),
        ),
        (None, Some(tag)) => ConnectError::new(
            Code::NotFound,
            format_args!("process with tag '{tag}' not found"),
        ),
        (None, None) => ConnectError::new(
            Code::InvalidArgument,
            "the request names no process; set process.pid or process.tag",
        ),
    }
}

impl Registry {
    /// An empty table.
    pub fn new(cgroups: Option<CgroupRoot>) -> Self {
        Self {
            tables: Mutex::default(),
            cgroups,
        }
    }

    /// Runs `spawn` and registers its process, also when it has ended by then.
    pub fn register<E>(
        &self,
        spawn: impl FnOnce() -> Result<Process, E>,
    ) -> Result<Arc<Process>, E> {
        lock(&self.tables).spawning += 1;
        let result = spawn().map(Arc::new);
        let mut tables = lock(&self.tables);
        tables.spawning -= 1;
        if let Ok(process) = &result {
            tables.live.insert(process.pid, process.clone());
            // A status of an earlier holder of the pid does not count: ours is still to be collected.
            let status = tables.unclaimed.remove(&process.pid);
            if let Some(status) = status.filter(|_| !is_child(process.pid)) {
                self.settle(&mut tables, process.pid, status);
            }
        }
        if tables.spawning == 0 {
            tables.unclaimed.clear();
        }
        result
    }

    /// Running processes, by pid.
    pub fn list(&self) -> Vec<ProcessInfo> {
        let tables = lock(&self.tables);
        let mut all: Vec<_> = tables
            .live
            .values()
            .map(|process| ProcessInfo {
                config: Some(lock(&process.config).clone()),
                pid: process.pid,
                tag: process.tag.clone(),
            })
            .collect();
        all.sort_by_key(|process| process.pid);
        all
    }

    /// A running process.
    pub fn find_live(&self, selector: &ProcessSelector) -> Result<Arc<Process>, ConnectError> {
        lock(&self.tables)
            .live(selector)
            .cloned()
            .ok_or_else(|| not_found(selector))
    }

    /// A running process, or one that ended less than [`FINISHED_RETENTION`] ago.
    pub fn find_any(&self, selector: &ProcessSelector) -> Result<Arc<Process>, ConnectError> {
        let mut tables = lock(&self.tables);
        tables.forget_old();
        if let Some(process) = tables.live(selector) {
            return Ok(process.clone());
        }
        let matches = |record: &&Ended| match (selector.pid, selector.tag.as_deref()) {
            (Some(pid), _) => record.pid == pid,
            (None, tag) => tag.is_some() && record.tag.as_deref() == tag,
        };
        let mut newest_first = tables.ended.iter().rev();
        let record = newest_first
            .find(matches)
            .ok_or_else(|| not_found(selector))?;
        Ok(match &record.process {
            Some(process) => process.clone(),
            None => Arc::new(Process::ended(record)),
        })
    }

    /// Says that all output of an ended process is through.
    pub fn retire(&self, process: &Process) {
        let mut tables = lock(&self.tables);
        let mut newest_first = tables.ended.iter_mut().rev();
        let is_its = |record: &&mut Ended| {
            let kept = record.process.as_deref();
            kept.is_some_and(|kept| std::ptr::eq(kept, process))
        };
        if let Some(record) = newest_first.find(is_its) {
            record.process = None;
        }
    }

    /// Sends a signal to a running process and returns it.
    ///
    /// The rule: SIGTERM goes to the process alone, which may pass it on or clean up. SIGKILL takes the
    /// whole tree: everything the process started, also in other sessions, since a killed shell cannot
    /// take its children along. A deadline that passes does the same as SIGKILL. A process that ends
    /// by itself leaves its background children running.
    pub fn signal(
        &self,
        selector: &ProcessSelector,
        signal: Signal,
    ) -> Result<Arc<Process>, ConnectError> {
        let tables = lock(&self.tables);
        let process = tables.live(selector).ok_or_else(|| not_found(selector))?;
        match signal {
            Signal::Kill => process.kill_tree(),
            Signal::Term | Signal::Unspecified => {
                let pid = Pid::from_raw(process.pid as i32).ok_or_else(|| not_found(selector))?;
                kill_process(pid, OsSignal::TERM).map_err(|error| {
                    ConnectError::from_io(
                        format_args!("cannot signal process {}", process.pid),
                        &error.into(),
                    )
                })?;
            }
        }
        Ok(process.clone())
    }

    /// Collects exit statuses, of our processes and of orphans alike. True when there may be more.
    pub fn reap(&self) -> bool {
        let mut tables = lock(&self.tables);
        for _ in 0..REAP_BATCH {
            let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) else {
                return false;
            };
            let pid = pid.as_raw_nonzero().get() as u32;
            if !self.settle(&mut tables, pid, status) && tables.spawning > 0 {
                tables.unclaimed.insert(pid, status);
            }
        }
        true
    }

    /// Records the end of a live process. False when the pid is none of ours.
    fn settle(&self, tables: &mut Tables, pid: u32, status: WaitStatus) -> bool {
        let Some(process) = tables.live.remove(&pid) else {
            return false;
        };
        *lock(&process.config) = ProcessConfig::default();
        process.exit.send_replace(Some(end_event(status)));
        if let (Some(root), Some(group)) = (&self.cgroups, lock(&process.cgroup).take()) {
            root.release(&group);
        }
        tables.ended.push_back(Ended {
            at: Instant::now(),
            pid,
            tag: process.tag.clone(),
            status,
            process: Some(process),
        });
        tables.forget_old();
        true
    }
}

/// Whether a pid is a child of ours whose status was not collected yet.
fn is_child(pid: u32) -> bool {
    let Some(pid) = Pid::from_raw(pid as i32) else {
        return false;
    };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(pid), options).is_ok()
}

/// The contract's words for a wait status.
fn end_event(status: WaitStatus) -> EndEvent {
    if let Some(signal) = status.terminating_signal() {
        let mut text = format!("signal: {}", signal_name(signal));
        // Bit 7 of a wait status is the core dump flag.
        if status.as_raw() & 0x80 != 0 {
            text.push_str(" (core dumped)");
        }
        return EndEvent {
            exit_code: -1,
            exited: false,
            status: text.clone(),
            error: Some(text),
        };
    }
    let code = status.exit_status().unwrap_or(-1);
    let text = format!("exit status {code}");
    EndEvent {
        exit_code: code,
        exited: true,
        error: (code != 0).then(|| text.clone()),
        status: text,
    }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}
