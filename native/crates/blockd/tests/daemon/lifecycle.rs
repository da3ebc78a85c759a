//! Ends of the daemon: orderly, sudden, and what the next one finds.

use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::statfs::statfs;
use serde_json::{json, Value};

use crate::rig::{blockd, content, open_rw, Daemon};
use crate::MIB;

/// E16.
#[test]
fn a_killed_daemon_comes_back_to_the_last_flush() {
    let mut daemon = Daemon::start();
    let disk = daemon.disk("disk", &[], Some(8 * MIB));
    let flushed = content(1, MIB as usize);
    disk.write_all_at(&flushed, 0).unwrap();
    disk.sync_all().unwrap();
    disk.write_all_at(&content(2, 4096), 0).unwrap();
    disk.write_all_at(&content(3, 4096), 4 * MIB).unwrap();
    daemon.kill();
    assert!(disk.read_at(&mut [0; 512], 0).is_err(), "the mount is dead");
    drop(disk);
    assert_eq!(statfs(&daemon.mount()).err(), Some(Errno::ENOTCONN));
    daemon.spawn();
    let disk = daemon.disk("disk", &[], Some(8 * MIB));
    let mut bytes = vec![0; 8 * MIB as usize];
    disk.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes[..MIB as usize] == flushed);
    assert!(bytes[MIB as usize..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_killed_daemon_keeps_what_was_sealed() {
    let mut daemon = Daemon::start();
    let disk = daemon.disk("disk", &[], Some(8 * MIB));
    disk.write_all_at(&content(1, 70_000), 1000).unwrap();
    let body = json!({ "upper": daemon.upper("fresh"), "sync": true });
    let stack = daemon.ok("POST", "/v1/stacks/disk/seal", &body)["stack"].clone();
    daemon.kill();
    drop(disk);
    daemon.spawn();
    let body = json!({ "lowers": stack["lowers"], "upper": stack["upper"] });
    daemon.ok("PUT", "/v1/stacks/disk", &body);
    let disk = open_rw(&daemon.file("disk"));
    let mut bytes = vec![0; 70_000];
    disk.read_exact_at(&mut bytes, 1000).unwrap();
    assert_eq!(bytes, content(1, 70_000));
}

#[test]
fn sigterm_flushes_unmounts_and_leaves_no_socket() {
    let mut daemon = Daemon::start();
    let disk = daemon.disk("disk", &[], Some(MIB));
    disk.write_all_at(&content(1, 4096), 512).unwrap();
    // A close flushes too, so the file stays open across the signal.
    daemon.signal(Signal::SIGTERM);
    assert!(daemon.wait().success(), "{}", daemon.log());
    assert!(!daemon.path("socket").exists());
    assert_eq!(std::fs::read_dir(daemon.mount()).unwrap().count(), 0);
    drop(disk);
    daemon.spawn();
    let disk = daemon.disk("disk", &[], Some(MIB));
    let mut bytes = vec![0; 4096];
    disk.read_exact_at(&mut bytes, 512).unwrap();
    assert_eq!(bytes, content(1, 4096));
    drop(disk);
    daemon.ok("DELETE", "/v1/stacks/disk", &Value::Null);
    daemon.ok("POST", "/v1/shutdown", &json!({}));
    assert!(daemon.wait().success(), "{}", daemon.log());
}

#[test]
fn a_second_daemon_leaves_the_first_alone() {
    let daemon = Daemon::start();
    let text = |name: &str| daemon.path(name).to_str().unwrap().to_owned();
    for (socket, mount, reason) in [
        ("socket", "other", "another process serves"),
        ("other", "mount", "is in use"),
    ] {
        let output = blockd(&["serve", "--socket", &text(socket), "--mount", &text(mount)]);
        assert!(!output.status.success());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.contains(reason), "{message}");
    }
    daemon.ok("GET", "/v1/info", &Value::Null);
}
