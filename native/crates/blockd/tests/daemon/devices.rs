//! Stacks as ublk devices. Needs `/dev/ublk-control`, which `make lab` has everywhere;
//! where it is missing, each test says that it is skipped.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use crate::rig::{content, Daemon};
use crate::MIB;

const BLOCK_BYTES: usize = 4096;
/// How long a device may stand still over a kill and a start.
const RECOVERY_WAIT: Duration = Duration::from_secs(60);

pub fn start() -> Option<Daemon> {
    if !Path::new("/dev/ublk-control").exists() {
        eprintln!("skipped: no /dev/ublk-control (modprobe ublk_drv); `make lab` has it");
        return None;
    }
    Some(Daemon::start())
}

/// Opens a device and returns its path.
pub fn open(daemon: &Daemon, id: &str, lowers: &[PathBuf], size_bytes: Option<u64>) -> PathBuf {
    let body = json!({
        "lowers": lowers,
        "upper": daemon.upper(id),
        "upper_layout": "hybrid",
        "virtual_size_bytes": size_bytes,
        "export": "ublk",
    });
    let stack = daemon.ok("PUT", &format!("/v1/stacks/{id}"), &body);
    assert_eq!(stack["export"], "ublk");
    PathBuf::from(stack["path"].as_str().unwrap())
}

/// Past the page cache, so that every call is a request.
pub fn direct(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .custom_flags(nix::libc::O_DIRECT);
    options.open(path).unwrap()
}

#[repr(align(4096))]
struct Aligned([u8; 16 * BLOCK_BYTES]);

fn write(file: &File, seed: u32, offset: u64) -> io::Result<()> {
    let mut bytes = Box::new(Aligned([0; 16 * BLOCK_BYTES]));
    bytes.0.copy_from_slice(&content(seed, 16 * BLOCK_BYTES));
    file.write_all_at(&bytes.0, offset)
}

fn read(file: &File, offset: u64) -> Vec<u8> {
    let mut bytes = Box::new(Aligned([0; 16 * BLOCK_BYTES]));
    file.read_exact_at(&mut bytes.0, offset).unwrap();
    bytes.0.to_vec()
}

fn expected(seed: u32) -> Vec<u8> {
    content(seed, 16 * BLOCK_BYTES)
}

nix::ioctl_write_ptr_bad!(block_discard, nix::request_code_none!(0x12, 119), [u64; 2]);

fn discard(file: &File, offset: u64, length: u64) {
    let range = [offset, length];
    // SAFETY: the kernel reads the two numbers, which live as long as the call.
    unsafe { block_discard(file.as_raw_fd(), &range) }.unwrap();
}

#[test]
fn a_device_reads_back_what_was_written_and_discarded() {
    let Some(daemon) = start() else { return };
    let path = open(&daemon, "disk", &[], Some(64 * MIB));
    let disk = direct(&path);
    for seed in 0..32 {
        write(&disk, seed, u64::from(seed) * 2 * MIB).unwrap();
    }
    disk.sync_all().unwrap();
    discard(&disk, 2 * MIB, 32 * MIB);
    for seed in 0..32 {
        let found = read(&disk, u64::from(seed) * 2 * MIB);
        if (1..17).contains(&seed) {
            assert!(found.iter().all(|byte| *byte == 0), "{seed}");
        } else {
            assert!(found == expected(seed), "{seed}");
        }
    }
    assert!(!daemon.file("disk").exists(), "it is a device, and no file");
    let size = std::fs::read_to_string(sys_file(&path, "size")).unwrap();
    assert_eq!(size.trim().parse::<u64>().unwrap() * 512, 64 * MIB);
    let cache = std::fs::read_to_string(sys_file(&path, "queue/write_cache")).unwrap();
    let fua = std::fs::read_to_string(sys_file(&path, "queue/fua")).unwrap();
    assert_eq!((cache.trim(), fua.trim()), ("write back", "1"));
}

fn sys_file(device: &Path, name: &str) -> PathBuf {
    Path::new("/sys/block")
        .join(device.file_name().unwrap())
        .join(name)
}

#[test]
fn a_flush_is_durable_and_a_seal_takes_what_the_kernel_cached() {
    let Some(mut daemon) = start() else { return };
    let path = open(&daemon, "disk", &[], Some(8 * MIB));
    let disk = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    disk.write_all_at(&content(1, 3 * MIB as usize), MIB)
        .unwrap();
    let body = json!({ "upper": daemon.upper("second") });
    let sealed = daemon.ok("POST", "/v1/stacks/disk/seal", &body);
    let layer = PathBuf::from(sealed["layer"]["path"].as_str().unwrap());
    disk.write_all_at(&content(2, 4096), 0).unwrap();
    // The layer by itself has what was written before the seal, and nothing after.
    let body = json!({ "lowers": [layer], "export": "ublk" });
    let stack = daemon.ok("PUT", "/v1/stacks/layer", &body);
    let copy = std::fs::read(stack["path"].as_str().unwrap()).unwrap();
    assert!(copy[MIB as usize..4 * MIB as usize] == content(1, 3 * MIB as usize));
    assert!(copy[..MIB as usize].iter().all(|byte| *byte == 0));
    disk.sync_all().unwrap();
    daemon.kill();
    drop(disk);
    daemon.spawn();
    let stack = daemon.ok("GET", "/v1/stacks/disk", &Value::Null);
    assert_eq!(stack["lowers"], json!([layer]));
    let all = std::fs::read(&path).unwrap();
    assert!(all[..4096] == content(2, 4096));
    assert!(all[MIB as usize..4 * MIB as usize] == content(1, 3 * MIB as usize));
}

#[test]
fn a_device_without_an_upper_takes_no_writes() {
    let Some(daemon) = start() else { return };
    let path = open(&daemon, "disk", &[], Some(4 * MIB));
    write(&direct(&path), 1, 0).unwrap();
    let body = json!({ "upper": daemon.upper("second") });
    let sealed = daemon.ok("POST", "/v1/stacks/disk/seal", &body);
    let body = json!({ "lowers": [sealed["layer"]["path"]], "export": "auto" });
    let shared = daemon.ok("PUT", "/v1/stacks/shared", &body);
    let shared = Path::new(shared["path"].as_str().unwrap());
    assert_eq!(
        std::fs::read_to_string(sys_file(shared, "ro"))
            .unwrap()
            .trim(),
        "1"
    );
    // Root may open it for writing all the same.
    let writable = OpenOptions::new().write(true).open(shared);
    assert!(writable
        .and_then(|file| file.write_all_at(&[1; 512], 0))
        .is_err());
    assert!(std::fs::read(shared).unwrap()[..16 * BLOCK_BYTES] == expected(1));
}

/// Every write that was answered is there, flushed or not, and I/O under way goes on: its
/// process sees a delay and no error.
#[test]
fn killed_daemons_lose_no_write_and_fail_none() {
    let Some(mut daemon) = start() else { return };
    let path = open(&daemon, "disk", &[], Some(64 * MIB));
    let places = 512_u32;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let (stop, path) = (stop.clone(), path.clone());
        move || {
            let disk = direct(&path);
            let mut latest = vec![None; places as usize];
            let mut round = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                let place = round.wrapping_mul(7919) % places;
                write(&disk, round, u64::from(place) * 16 * BLOCK_BYTES as u64).unwrap();
                latest[place as usize] = Some(round);
                if round % 97 == 0 {
                    disk.sync_all().unwrap();
                }
                round += 1;
            }
            (latest, round)
        }
    });
    for kill in 0..4 {
        std::thread::sleep(Duration::from_millis(700));
        daemon.kill();
        if kill == 2 {
            // The kernel notices by itself, however late the next one comes.
            std::thread::sleep(Duration::from_secs(2));
        }
        daemon.spawn();
        assert!(daemon.log().contains("ublk device taken over"));
        let upper = daemon.upper(&format!("upper{kill}"));
        let body = json!({ "upper": upper });
        daemon.ok("POST", "/v1/stacks/disk/seal", &body);
    }
    std::thread::sleep(Duration::from_millis(500));
    stop.store(true, Ordering::Relaxed);
    let end = Instant::now() + RECOVERY_WAIT;
    while !writer.is_finished() {
        assert!(Instant::now() < end, "the writer hangs");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (latest, rounds) = writer.join().unwrap();
    assert!(rounds > 100, "only {rounds} writes");
    let disk = direct(&path);
    for (place, seed) in latest.iter().enumerate() {
        if let Some(seed) = seed {
            let found = read(&disk, place as u64 * 16 * BLOCK_BYTES as u64);
            assert!(found == expected(*seed), "place {place} of {rounds} writes");
        }
    }
}

#[test]
fn a_close_waits_for_users_and_is_bounded() {
    let Some(daemon) = start() else { return };
    let path = open(&daemon, "disk", &[], Some(4 * MIB));
    let mut user = std::process::Command::new("sleep")
        .arg("60")
        .stdin(File::open(&path).unwrap())
        .spawn()
        .unwrap();
    assert_eq!(
        daemon.fails(409, "DELETE", "/v1/stacks/disk", &Value::Null),
        "busy"
    );
    assert_eq!(
        daemon.fails(409, "POST", "/v1/shutdown", &json!({})),
        "busy"
    );
    let begun = Instant::now();
    daemon.ok("DELETE", "/v1/stacks/disk?force=true", &Value::Null);
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    user.kill().unwrap();
    user.wait().unwrap();
    assert!(!path.exists());
    // Nothing is left that would keep it from being opened again.
    let again = open(&daemon, "disk", &[], Some(4 * MIB));
    write(&direct(&again), 1, 0).unwrap();
    daemon.ok("DELETE", "/v1/stacks/disk", &Value::Null);
}

#[test]
fn more_devices_than_the_kernel_allows_at_first() {
    let Some(mut daemon) = start() else { return };
    let count = 70;
    let paths: Vec<_> = (0..count)
        .map(|n| open(&daemon, &format!("disk{n}"), &[], Some(MIB)))
        .collect();
    for (n, path) in paths.iter().enumerate() {
        write(&direct(path), n as u32, 0).unwrap();
    }
    daemon.kill();
    daemon.spawn();
    for (n, path) in paths.iter().enumerate() {
        assert!(read(&direct(path), 0) == expected(n as u32), "{n}");
    }
    daemon.ok("POST", "/v1/shutdown", &json!({}));
    assert!(daemon.wait().success(), "{}", daemon.log());
    assert!(paths.iter().all(|path| !path.exists()), "a device is left");
}

#[test]
fn a_device_without_a_record_is_removed_and_one_without_files_too() {
    let Some(mut daemon) = start() else { return };
    let lost = open(&daemon, "lost", &[], Some(MIB));
    let gone = open(&daemon, "gone", &[], Some(MIB));
    let kept = open(&daemon, "kept", &[], Some(MIB));
    daemon.kill();
    let boot = std::fs::read_dir(daemon.path("ublk"))
        .unwrap()
        .next()
        .unwrap();
    std::fs::remove_file(boot.unwrap().path().join("lost.json")).unwrap();
    std::fs::remove_file(daemon.path("gone.data")).unwrap();
    std::fs::write(daemon.path("gone.index"), [1; 9000]).unwrap();
    daemon.spawn();
    assert!(!lost.exists() && !gone.exists() && kept.exists());
    assert!(daemon.log().contains("cannot take over a ublk device"));
    assert_eq!(
        daemon.ok("GET", "/v1/stacks", &Value::Null)["stacks"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
}
