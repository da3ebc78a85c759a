//! One cgroup per started process: how a whole tree is found and killed, also what double-forked.
//!
//! Without a writable cgroup2 hierarchy (tests, old kernels) a tree is found by walking /proc; that
//! misses only what detached from its parent and its session and was orphaned before the walk.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

use rustix::fs::{Mode, OFlags};
use rustix::process::{kill_process, Pid, Signal};

use crate::app::lock;
use crate::limits::KILL_PASSES;

/// Parent folder of the per-process cgroups.
pub struct CgroupRoot {
    path: PathBuf,
    /// Processes and threads of one group at most, where that is limited.
    tasks_max: Option<u64>,
    next: AtomicU64,
    /// Groups whose leader ended while others lived on; removed once they are empty.
    lingering: Mutex<Vec<PathBuf>>,
}

impl CgroupRoot {
    /// Prepares the parent folder. Fails where cgroup2 is absent, read-only or lacks `cgroup.kill`.
    pub fn create(path: &Path) -> io::Result<Self> {
        fs::create_dir_all(path)?;
        fs::metadata(path.join("cgroup.kill"))?;
        // Folders of an earlier run of the agent that are empty by now.
        for entry in fs::read_dir(path)?.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let _busy = fs::remove_dir(entry.path());
            }
        }
        let first = u64::from(std::process::id()) << 32;
        Ok(Self {
            path: path.to_owned(),
            tasks_max: None,
            next: AtomicU64::new(first),
            lingering: Mutex::new(Vec::new()),
        })
    }

    /// Sets the workload apart from the agent, which stays in the parent of this folder. For guests: it
    /// changes the parent's own settings.
    ///
    /// - CPU: all commands together are one competitor of the agent, and each command is one of the others,
    ///   however many processes it has.
    /// - Processes: one command may have at most 7/8 of what the kernel allows, all commands 15/16. A fork
    ///   bomb then fails by itself and leaves room for other commands and the agent's threads.
    ///
    /// Memory needs nothing here: the agent's own is never swapped or evicted, and the OOM killer
    /// spares it.
    pub fn set_apart(&mut self) -> io::Result<()> {
        let parent = self.path.parent().unwrap_or(Path::new("/"));
        fs::write(parent.join("cgroup.subtree_control"), "+cpu +pids")?;
        fs::write(self.path.join("cgroup.subtree_control"), "+cpu +pids")?;
        let number = |path: &str| -> io::Result<u64> {
            let text = fs::read_to_string(path)?;
            text.trim().parse().map_err(io::Error::other)
        };
        let limit =
            number("/proc/sys/kernel/threads-max")?.min(number("/proc/sys/kernel/pid_max")?);
        fs::write(self.path.join("pids.max"), (limit / 16 * 15).to_string())?;
        self.tasks_max = Some(limit / 8 * 7);
        Ok(())
    }

    /// Makes a group for one process.
    pub fn new_group(&self) -> io::Result<Cgroup> {
        lock(&self.lingering).retain(|path| {
            fs::remove_dir(path).is_err_and(|error| error.kind() != io::ErrorKind::NotFound)
        });
        let path = self
            .path
            .join(format!("p{}", self.next.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&path)?;
        if let Some(tasks_max) = self.tasks_max {
            fs::write(path.join("pids.max"), tasks_max.to_string())?;
        }
        let fd = rustix::fs::open(
            &path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(Cgroup { path, fd })
    }

    /// Removes a group whose leader is gone, now or when its last member is.
    pub fn release(&self, group: &Cgroup) {
        if fs::remove_dir(&group.path).is_err() {
            lock(&self.lingering).push(group.path.clone());
        }
    }
}

/// Group of one process.
pub struct Cgroup {
    path: PathBuf,
    fd: OwnedFd,
}

impl Cgroup {
    /// Descriptor for the spawn.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Kills every member; the kernel does it in one step, so a fork cannot escape.
    pub fn kill(&self) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, "cgroup.kill", flags, Mode::empty())?;
        rustix::io::write(&fd, b"1")?;
        Ok(())
    }
}

/// Kills a leader, its session and its descendants, without a cgroup.
///
/// All are stopped before the first is killed: one that saw another end would go on with its next
/// command, and a shell whose child was killed before itself would end as if by its own doing.
pub fn kill_by_walk(leader: u32) {
    let mut stopped = HashSet::new();
    for _ in 0..KILL_PASSES {
        let found = members(leader);
        let new: Vec<u32> = found.difference(&stopped).copied().collect();
        if new.is_empty() {
            break;
        }
        signal_each(&new, Signal::STOP);
        stopped.extend(new);
    }
    signal_each(&stopped, Signal::KILL);
}

fn signal_each<'a>(pids: impl IntoIterator<Item = &'a u32>, signal: Signal) {
    for pid in pids {
        if let Some(pid) = Pid::from_raw(*pid as i32) {
            let _gone = kill_process(pid, signal);
        }
    }
}

/// Living members of the tree: the session of the leader and all below it.
fn members(leader: u32) -> HashSet<u32> {
    let table: Vec<ProcessLine> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(ProcessLine::read)
        .filter(|line| line.alive)
        .collect();
    let mut tree: HashSet<u32> = table
        .iter()
        .filter(|line| line.pid == leader || line.session == leader)
        .map(|line| line.pid)
        .collect();
    tree.insert(leader);
    loop {
        let before = tree.len();
        let below: Vec<u32> = table
            .iter()
            .filter(|line| tree.contains(&line.parent))
            .map(|line| line.pid)
            .collect();
        tree.extend(below);
        if tree.len() == before {
            break;
        }
    }
    tree.retain(|pid| table.iter().any(|line| line.pid == *pid));
    tree
}

struct ProcessLine {
    pid: u32,
    parent: u32,
    session: u32,
    alive: bool,
}

impl ProcessLine {
    fn read(pid: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The command name may hold anything, so fields count from its closing parenthesis.
        let rest = &text[text.rfind(')')? + 1..];
        let mut fields = rest.split_whitespace();
        let alive = !matches!(fields.next()?, "Z" | "X" | "x");
        let parent = fields.next()?.parse().ok()?;
        let session = fields.nth(1)?.parse().ok()?;
        Some(Self {
            pid,
            parent,
            session,
            alive,
        })
    }
}
