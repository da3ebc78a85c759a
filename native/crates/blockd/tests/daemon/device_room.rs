//! What a device does while there is no room on the host's disk: its writes wait, and
//! nothing that its page cache took is lost.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{json, Value};

use crate::devices::{self, direct, start};
use crate::rig::{content, wait_until, Daemon, SmallFs};
use crate::MIB;

const WAIT: Duration = Duration::from_secs(60);
const WRITTEN_BYTES: u64 = 12 * MIB;

/// A device whose upper is on a file system that holds a part of what is written to it.
fn open(daemon: &Daemon) -> (SmallFs, PathBuf) {
    let small = SmallFs::mount(daemon.path("small"), 4 * MIB);
    let upper = json!({ "data": small.0.join("data"), "index": small.0.join("index") });
    let body = json!({
        "upper": upper,
        "upper_layout": "hybrid",
        "virtual_size_bytes": 64 * MIB,
        "export": "ublk",
    });
    let stack = daemon.ok("PUT", "/v1/stacks/disk", &body);
    let path = PathBuf::from(stack["path"].as_str().unwrap());
    (small, path)
}

/// Writes through the page cache and has that written out.
fn write(path: &Path) -> JoinHandle<io::Result<()>> {
    let path = path.to_owned();
    std::thread::spawn(move || {
        let disk = OpenOptions::new().write(true).open(path)?;
        disk.write_all_at(&content(1, WRITTEN_BYTES as usize), 0)?;
        disk.sync_all()
    })
}

fn waits(daemon: &Daemon) -> bool {
    let stack = daemon.ok("GET", "/v1/stacks/disk", &Value::Null);
    stack["waits_for_room"].as_bool().unwrap()
}

fn seal(daemon: &Daemon) -> Value {
    json!({ "upper": daemon.upper("fresh"), "sync": true })
}

fn nothing_is_lost(kill: bool) {
    let Some(mut daemon) = start() else { return };
    let (small, path) = open(&daemon);
    let writer = write(&path);
    wait_until(WAIT, "no write waits", || waits(&daemon));
    if kill {
        daemon.kill();
        daemon.spawn();
        wait_until(WAIT, "no write waits after a kill", || waits(&daemon));
    }
    let code = daemon.fails(507, "POST", "/v1/stacks/disk/seal", &seal(&daemon));
    assert_eq!(code, "storage_full");
    let other = devices::open(&daemon, "other", &[], Some(16 * MIB));
    write(&other).join().unwrap().unwrap();
    assert!(waits(&daemon) && !writer.is_finished());
    small.resize(64 * MIB);
    wait_until(WAIT, "writes still wait", || writer.is_finished());
    writer.join().unwrap().unwrap();
    assert!(!waits(&daemon));
    daemon.ok("POST", "/v1/stacks/disk/seal", &seal(&daemon));
    let disk = direct(&path);
    let mut found = Vec::new();
    for place in 0..WRITTEN_BYTES / MIB {
        found.append(&mut read_direct(&disk, place * MIB));
    }
    assert!(found == content(1, WRITTEN_BYTES as usize));
}

fn read_direct(disk: &File, offset: u64) -> Vec<u8> {
    let mut room = vec![0; 2 * MIB as usize];
    let start = room.as_ptr().align_offset(4096);
    let bytes = &mut room[start..start + MIB as usize];
    disk.read_exact_at(bytes, offset).unwrap();
    bytes.to_vec()
}

#[test]
fn what_a_device_was_given_waits_for_room_and_is_not_lost() {
    nothing_is_lost(false);
}

#[test]
fn what_waits_for_room_outlives_a_killed_daemon() {
    nothing_is_lost(true);
}

#[test]
fn a_device_may_be_removed_while_it_waits_for_room() {
    let Some(daemon) = start() else { return };
    let (_small, path) = open(&daemon);
    let writer = write(&path);
    wait_until(WAIT, "no write waits", || waits(&daemon));
    daemon.ok("DELETE", "/v1/stacks/disk?force=true", &Value::Null);
    wait_until(WAIT, "the writer hangs", || writer.is_finished());
    assert!(
        writer.join().unwrap().is_err(),
        "nobody said that writes were lost"
    );
    assert!(!path.exists());
}
