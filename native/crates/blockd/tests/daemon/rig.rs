//! A real daemon with a real FUSE mount in a temporary folder.
//!
//! Needs root and `/dev/fuse`; without them a test fails and says so. Whatever
//! happens, dropping the guard ends the daemon and removes its mount.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::{Duration, Instant};

use nix::mount::{umount2, MntFlags};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use serde_json::{json, Value};
use tempfile::TempDir;

/// How long the daemon may take to start or to stop.
const WAIT: Duration = Duration::from_secs(20);

/// The program under test. Another place of it can be named, for a run on another machine.
fn program() -> PathBuf {
    let named = std::env::var_os("BLOCKD_PROGRAM");
    named.map_or_else(
        || PathBuf::from(env!("CARGO_BIN_EXE_blockd")),
        PathBuf::from,
    )
}

/// Waits until something is so; fails, saying `what`, when it is not within the limit.
pub fn wait_until(limit: Duration, what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + limit;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a `blockd` subcommand to its end.
pub fn blockd(arguments: &[&str]) -> Output {
    Command::new(program()).args(arguments).output().unwrap()
}

pub struct Daemon {
    pub folder: TempDir,
    child: Option<Child>,
}

impl Daemon {
    pub fn start() -> Daemon {
        assert!(
            nix::unistd::geteuid().is_root(),
            "this test needs root (FUSE mount)"
        );
        assert!(
            Path::new("/dev/fuse").exists(),
            "this test needs /dev/fuse (modprobe fuse)"
        );
        let mut daemon = Daemon {
            folder: tempfile::tempdir().unwrap(),
            child: None,
        };
        daemon.spawn();
        daemon
    }

    /// Starts the daemon (again) and waits until it answers.
    pub fn spawn(&mut self) {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path("log"))
            .unwrap();
        let child = Command::new(program())
            .args(["serve", "--verbose", "--socket"])
            .arg(self.path("socket"))
            .arg("--mount")
            .arg(self.mount())
            .arg("--remote-cache")
            .arg(self.path("remote"))
            .args(["--trace-s", "1"])
            .arg("--ublk-state")
            .arg(self.path("ublk"))
            .stderr(log)
            .spawn()
            .unwrap();
        self.child = Some(child);
        let deadline = Instant::now() + WAIT;
        while UnixStream::connect(self.path("socket")).is_err() {
            assert!(
                Instant::now() < deadline,
                "blockd did not start: {}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn mount(&self) -> PathBuf {
        self.path("mount")
    }

    pub fn file(&self, id: &str) -> PathBuf {
        self.mount().join(id)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub fn pid(&self) -> i32 {
        self.child.as_ref().unwrap().id() as i32
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Waits for the daemon to end by itself.
    pub fn wait(&mut self) -> ExitStatus {
        let mut child = self.child.take().unwrap();
        let deadline = Instant::now() + WAIT;
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status;
            }
            if Instant::now() > deadline {
                child.kill().unwrap();
                panic!("blockd did not stop: {}", self.log());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the daemon without any warning.
    pub fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        self.wait();
    }

    /// One request; a body of `null` sends none.
    pub fn call(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        call(&self.path("socket"), method, path, body)
    }

    /// One request that must succeed.
    pub fn ok(&self, method: &str, path: &str, body: &Value) -> Value {
        let (status, reply) = self.call(method, path, body);
        assert!(
            (200..300).contains(&status),
            "{method} {path}: {status} {reply}"
        );
        reply
    }

    /// One request that must fail; returns its code.
    pub fn fails(&self, status: u16, method: &str, path: &str, body: &Value) -> String {
        let (got, reply) = self.call(method, path, body);
        assert_eq!(got, status, "{method} {path}: {reply}");
        assert_ne!(reply["message"].as_str().unwrap(), "");
        assert_ne!(reply["hint"].as_str().unwrap(), "");
        reply["code"].as_str().unwrap().to_owned()
    }

    /// The two files of an upper, as JSON.
    pub fn upper(&self, name: &str) -> Value {
        json!({
            "data": self.path(&format!("{name}.data")),
            "index": self.path(&format!("{name}.index")),
        })
    }

    /// Opens a writable disk and its file.
    pub fn disk(&self, id: &str, lowers: &[PathBuf], size_bytes: Option<u64>) -> File {
        let body = json!({
            "lowers": lowers,
            "upper": self.upper(id),
            "virtual_size_bytes": size_bytes,
        });
        self.ok("PUT", &format!("/v1/stacks/{id}"), &body);
        open_rw(&self.file(id))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Devices outlive a kill.
            let deadline = Instant::now() + WAIT;
            let _ = kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM);
            while child.try_wait().is_ok_and(|ended| ended.is_none()) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        // Once more than a daemon mounts, should one have mounted over another.
        while umount2(&self.mount(), MntFlags::MNT_DETACH).is_ok() {}
        if std::thread::panicking() {
            eprintln!("blockd log:\n{}", self.log());
        }
    }
}

pub fn open_rw(path: &Path) -> File {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub fn call(socket: &Path, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    // In one piece: an answer that needs no body ends the connection, and what comes
    // after that would reset it, with the answer unread.
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: blockd\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let value = if body.is_empty() {
        Value::Null
    } else {
        serde_json::from_str(body).unwrap()
    };
    (status, value)
}

/// Repeatable bytes without long runs of equal ones.
pub fn content(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let bytes = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    bytes.take(length).collect()
}

/// A small file system that fills up, unmounted when dropped.
pub struct SmallFs(pub PathBuf);

impl SmallFs {
    pub fn mount(path: PathBuf, size_bytes: u64) -> SmallFs {
        std::fs::create_dir_all(&path).unwrap();
        let options = format!("size={size_bytes}");
        let flags = nix::mount::MsFlags::empty();
        let none = None::<&str>;
        nix::mount::mount(none, &path, Some("tmpfs"), flags, Some(options.as_str())).unwrap();
        SmallFs(path)
    }

    pub fn resize(&self, size_bytes: u64) {
        let options = format!("size={size_bytes}");
        let flags = nix::mount::MsFlags::MS_REMOUNT;
        let none = None::<&str>;
        nix::mount::mount(none, &self.0, none, flags, Some(options.as_str())).unwrap();
    }

    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for SmallFs {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}
