//! Table of live processes and of the lately ended ones, and the events of each.
//!
//! Invariant: spawn-and-register and wait-and-unregister each happen under the table's lock, so a pid
//! in the live table is always ours and never reused.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::process::{kill_process, Pid, Signal as OsSignal, WaitOptions, WaitStatus};
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::sync::{mpsc, watch};

use super::cgroup::{kill_by_walk, Cgroup, CgroupRoot};
use super::io::Stdin;
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
    /// What runs.
    pub config: ProcessConfig,
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
        lock(&self.process.hub)
            .subscribers
            .retain(|(id, _)| *id != self.id);
    }
}

impl Subscription {
    /// How the process ended; set once `events` is closed for that reason.
    pub fn end(&self) -> Option<EndEvent> {
        lock(&self.process.hub).end.clone()
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
            config,
            tag,
            stdin,
            cgroup: Mutex::new(cgroup),
            exit: watch::Sender::new(None),
            hub: Mutex::default(),
        }
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
    ended: VecDeque<(Instant, Arc<Process>)>,
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
            .is_some_and(|(at, _)| at.elapsed() > FINISHED_RETENTION)
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

    /// Runs `spawn` and registers its process before its exit can be collected.
    pub fn register<E>(
        &self,
        spawn: impl FnOnce() -> Result<Process, E>,
    ) -> Result<Arc<Process>, E> {
        let mut tables = lock(&self.tables);
        let process = Arc::new(spawn()?);
        tables.live.insert(process.pid, process.clone());
        Ok(process)
    }

    /// Running processes, by pid.
    pub fn list(&self) -> Vec<ProcessInfo> {
        let tables = lock(&self.tables);
        let mut all: Vec<_> = tables
            .live
            .values()
            .map(|process| ProcessInfo {
                config: process.config.clone(),
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
        let matches = |process: &Process| match (selector.pid, selector.tag.as_deref()) {
            (Some(pid), _) => process.pid == pid,
            (None, tag) => tag.is_some() && process.tag.as_deref() == tag,
        };
        let newest_first = tables.ended.iter().rev();
        newest_first
            .map(|(_, process)| process)
            .find(|process| matches(process))
            .cloned()
            .ok_or_else(|| not_found(selector))
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
            Signal::Term => {
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
            let Some(process) = tables.live.remove(&(pid.as_raw_nonzero().get() as u32)) else {
                continue;
            };
            process.exit.send_replace(Some(end_event(status)));
            if let (Some(root), Some(group)) = (&self.cgroups, lock(&process.cgroup).take()) {
                root.release(&group);
            }
            tables.ended.push_back((Instant::now(), process));
            tables.forget_old();
        }
        true
    }
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
