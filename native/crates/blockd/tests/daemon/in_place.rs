//! Large reads, which the kernel answers out of the layers' files themselves.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use nix::fcntl::{fallocate, FallocateFlags};
use nix::libc;
use serde_json::{json, Value};

use crate::rig::{content, open_rw, Daemon, SmallFs};
use crate::MIB;

const LARGE: usize = 256 << 10;

/// A layer whose content is `bytes`, in the wrappers that `more` asks for.
fn layer(daemon: &Daemon, name: &str, bytes: &[u8], more: &Value) -> PathBuf {
    let (raw, plain) = (daemon.path("raw"), daemon.path(&format!("{name}-plain")));
    std::fs::write(&raw, bytes).unwrap();
    let import = json!({ "source": raw, "output": plain });
    daemon.ok("POST", "/v1/imports", &import);
    let output = daemon.path(name);
    let mut commit = json!({ "lowers": [plain], "output": output });
    let fields = commit.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    daemon.ok("POST", "/v1/commits", &commit);
    output
}

/// Sizes and places of all kinds: whole pages, odd ones, over the end of a piece, in
/// holes, over the end of the disk, and with something newer on top in a part of it.
#[test]
fn reads_of_any_size_show_the_same_bytes() {
    let daemon = Daemon::start();
    let mut expected = content(1, 8 * MIB as usize);
    expected[3 * MIB as usize..4 * MIB as usize].fill(0);
    let wrappers = [
        json!({}),
        json!({ "tar": true }),
        json!({ "compression": { "algorithm": "lz4" } }),
    ];
    for (number, more) in wrappers.iter().enumerate() {
        let mut expected = expected.clone();
        let below = layer(&daemon, &format!("layer-{number}"), &expected, more);
        let body = json!({
            "lowers": [below], "upper": daemon.upper(&format!("upper-{number}")),
            "virtual_size_bytes": 8 * MIB + 512 * 3, "cache": "direct",
        });
        let path = format!("/v1/stacks/disk-{number}");
        daemon.ok("PUT", &path, &body);
        let disk = open_rw(&daemon.file(&format!("disk-{number}")));
        expected.resize(8 * MIB as usize + 512 * 3, 0);
        for round in 0..2_u64 {
            for at in [0, 1, 511, 4096, MIB + 77, 3 * MIB - 4097, 5 * MIB] {
                for length in [1, 4096, 64 << 10, LARGE - 1, LARGE + 513, 4 << 20] {
                    let mut bytes = vec![0xee; length];
                    let count = disk.read_at(&mut bytes, at).unwrap();
                    let wanted = &expected[at as usize..expected.len().min(at as usize + length)];
                    assert!(
                        bytes[..count] == wanted[..count],
                        "{more} {round} {at} {length}"
                    );
                    assert!(count > 0 && (count == wanted.len() || count >= 1 << 20));
                }
            }
            let newer = content(7, 10_000);
            let place = MIB as usize + 12_345;
            disk.write_all_at(&newer, place as u64).unwrap();
            expected[place..place + newer.len()].copy_from_slice(&newer);
        }
    }
}

/// A layer's file that became shorter is an error of the read, not the daemon's end.
#[test]
fn a_file_cut_short_fails_the_read_and_nothing_else() {
    let daemon = Daemon::start();
    let bytes = content(2, 4 * MIB as usize);
    let body = json!({ "lowers": [layer(&daemon, "cut", &bytes, &json!({}))], "cache": "direct" });
    daemon.ok("PUT", "/v1/stacks/cut", &body);
    let disk = std::fs::File::open(daemon.file("cut")).unwrap();
    let mut buffer = vec![0; LARGE];
    disk.read_exact_at(&mut buffer, 3 * MIB).unwrap();
    let file = OpenOptions::new()
        .write(true)
        .open(daemon.path("cut"))
        .unwrap();
    file.set_len(2 * MIB).unwrap();
    for at in [2 * MIB - 65_536, 2 * MIB + 4096, 3 * MIB] {
        let error = disk.read_exact_at(&mut buffer, at).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{at}");
    }
    disk.read_exact_at(&mut buffer, MIB).unwrap();
    assert!(buffer == bytes[MIB as usize..MIB as usize + LARGE]);
}

/// A mapped read of a hole takes memory on a tmpfs, and there may be none.
#[test]
fn a_hole_in_a_file_on_a_full_tmpfs_is_read_as_zeros() {
    let daemon = Daemon::start();
    let small = SmallFs::mount(daemon.path("small"), 8 * MIB);
    let bytes = content(4, 4 * MIB as usize);
    let whole = layer(&daemon, "whole", &bytes, &json!({}));
    let holed = small.0.join("holed");
    std::fs::copy(&whole, &holed).unwrap();
    let file = OpenOptions::new().write(true).open(&holed).unwrap();
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let hole = MIB as libc::off_t;
    fallocate(&file, mode, hole, hole).unwrap();
    let filler = std::fs::write(small.0.join("filler"), vec![1; 16 * MIB as usize]);
    assert_eq!(filler.unwrap_err().kind(), io::ErrorKind::StorageFull);
    let body = json!({ "lowers": [holed], "cache": "direct" });
    daemon.ok("PUT", "/v1/stacks/holed", &body);
    let disk = std::fs::File::open(daemon.file("holed")).unwrap();
    let mut buffer = vec![0xee; LARGE];
    disk.read_exact_at(&mut buffer, MIB + MIB / 2).unwrap();
    assert!(buffer.iter().all(|&byte| byte == 0));
    disk.read_exact_at(&mut buffer, 3 * MIB).unwrap();
    assert!(buffer == bytes[3 * MIB as usize..3 * MIB as usize + LARGE]);
    drop(disk);
    daemon.ok("DELETE", "/v1/stacks/holed", &json!({}));
}

/// Pages that were shown from the page cache are not kept as the daemon's memory.
#[test]
fn reading_much_does_not_make_the_daemon_large() {
    let daemon = Daemon::start();
    let bytes = content(3, 160 * MIB as usize);
    let body = json!({ "lowers": [layer(&daemon, "much", &bytes, &json!({}))], "cache": "direct" });
    daemon.ok("PUT", "/v1/stacks/much", &body);
    let disk = std::fs::File::open(daemon.file("much")).unwrap();
    let before = resident_bytes(daemon.pid());
    let mut buffer = vec![0; 1 << 20];
    for round in 0..2 {
        for at in 0..160 {
            disk.read_exact_at(&mut buffer, at * MIB).unwrap();
            let grown = resident_bytes(daemon.pid()).saturating_sub(before);
            assert!(
                grown < 80 * MIB,
                "{grown} bytes more in round {round} at MiB {at}"
            );
        }
    }
}

fn resident_bytes(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        << 10
}
