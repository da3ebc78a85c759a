//! PID 1: from the kernel's hand-over to a running guest, and its end.
//!
//! Invariant: every step either works or names itself on the console before the machine is switched
//! off, so a guest that cannot start is seen by the host and never hangs.

pub mod modules;
pub mod mounts;
pub mod network;
pub mod settings;

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit, Signal};
use rustix::system::RebootCommand;

use self::settings::{BootSettings, ExitAction};
use crate::identity;
use crate::limits::SHUTDOWN_GRACE;
use crate::process::spawn::DEFAULT_PATH;

/// A boot step that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {cause}")]
pub struct BootError {
    /// What was tried.
    pub step: String,
    /// Why it did not work.
    pub cause: String,
}

impl BootError {
    /// Builds an error. The number Rust adds to a system error says nothing its text does not.
    pub fn new(step: impl Into<String>, cause: impl ToString) -> Self {
        let mut cause = cause.to_string();
        if let Some(end) = cause.find(" (os error") {
            cause.truncate(end);
        }
        Self {
            step: step.into(),
            cause,
        }
    }
}

/// Gives a failed system call the name of its step.
pub trait Step<T> {
    /// Names the step.
    fn step(self, name: impl Into<String>) -> Result<T, BootError>;
}

impl<T, E: ToString> Step<T> for Result<T, E> {
    fn step(self, name: impl Into<String>) -> Result<T, BootError> {
        self.map_err(|error| BootError::new(name, error))
    }
}

/// Brings the guest up. Returns what the kernel's command line said.
pub fn boot() -> Result<BootSettings, BootError> {
    mounts::mount_early()?;
    open_standard_streams();
    let text = std::fs::read_to_string("/proc/cmdline").step("read /proc/cmdline")?;
    let settings = BootSettings::parse(&text)?;
    modules::load_listed(Path::new("/modules"))?;
    mounts::enter_root(&settings)?;
    network::configure(&settings)?;
    identity::set_hostname(&settings.hostname).step("set the hostname")?;
    protect_self();
    raise_limits();
    // Commands get their PATH from ours (contract section 3.4).
    std::env::set_var("PATH", DEFAULT_PATH);
    rustix::process::chdir("/").step("chdir /")?;
    Ok(settings)
}

/// Without a console in the initramfs the kernel starts us with no descriptors at all; the first three
/// files opened later would then be taken for standard streams.
fn open_standard_streams() {
    for path in ["/dev/console", "/dev/null", "/dev/null"] {
        let Ok(fd) = rustix::fs::open(
            path,
            OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        ) else {
            continue;
        };
        use std::os::fd::{AsRawFd, IntoRawFd};
        if fd.as_raw_fd() > 2 {
            break;
        }
        // Descriptors 0 to 2 stay open for the life of the program.
        let _kept = fd.into_raw_fd();
    }
}

/// The workload may use up CPU and memory without taking the agent down.
fn protect_self() {
    let set = std::fs::write("/proc/self/oom_score_adj", "-1000")
        .and_then(|()| Ok(rustix::process::setpriority_process(None, -10)?));
    if let Err(error) = set {
        say(&format!("protect the agent: {error}"));
    }
}

/// Descriptors and watched folders: what servers and build tools in containers are used to.
fn raise_limits() {
    // The kernel sizes it by the guest's memory, too small for a source tree; watches cost memory only when made.
    let watches = std::fs::write("/proc/sys/fs/inotify/max_user_watches", "524288");
    if let Err(error) = watches {
        say(&format!("raise the limit on watched folders: {error}"));
    }
    // Not more as the usual limit: some programs close every descriptor up to it one by one.
    const OPEN_FILES: u64 = 65_536;
    const OPEN_FILES_MAX: u64 = 1_048_576;
    let limit = Rlimit {
        current: Some(OPEN_FILES),
        maximum: Some(OPEN_FILES_MAX),
    };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, limit) {
        say(&format!("raise the limit on open files: {error}"));
    }
}

/// One line on the console.
pub fn say(text: &str) {
    let line = format!("envd: {text}\n");
    for path in ["/dev/console", "/dev/kmsg"] {
        if let Ok(fd) = rustix::fs::open(
            path,
            OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        ) {
            if rustix::io::write(fd.as_fd(), line.as_bytes()).is_ok() {
                return;
            }
        }
    }
}

/// Ends the machine after a failed boot.
pub fn fail(error: &BootError, action: ExitAction) -> ! {
    say(&error.to_string());
    power_off(action)
}

/// Orderly end: processes get SIGTERM and a moment, then the root is made read-only.
pub async fn shut_down(action: ExitAction) -> ! {
    signal_all(Signal::TERM);
    tokio::time::sleep(SHUTDOWN_GRACE).await;
    signal_all(Signal::KILL);
    rustix::fs::sync();
    if let Err(error) = rustix::mount::mount_remount("/", rustix::mount::MountFlags::RDONLY, "") {
        say(&format!("remount / read-only: {error}"));
    }
    power_off(action)
}

fn signal_all(signal: Signal) {
    // Everything but ourselves; there is nobody else to hear about a failure.
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in entries
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| *pid > 1)
    {
        if let Some(pid) = rustix::process::Pid::from_raw(pid) {
            let _gone = rustix::process::kill_process(pid, signal);
        }
    }
}

fn power_off(action: ExitAction) -> ! {
    rustix::fs::sync();
    let command = match action {
        ExitAction::PowerOff => RebootCommand::PowerOff,
        ExitAction::Reboot => RebootCommand::Restart,
    };
    if let Err(error) = rustix::system::reboot(command) {
        say(&format!("power off: {error}"));
    }
    // Leaving PID 1 makes the kernel panic, which a host also sees.
    std::thread::sleep(Duration::from_secs(1));
    std::process::exit(1)
}
