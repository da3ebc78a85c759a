//! Stacks through their files: I/O, sealing, closing, repeated calls.

use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use nix::fcntl::{fallocate, FallocateFlags};
use nix::unistd::{lseek, Whence};
use serde_json::{json, Value};

use crate::rig::{content, open_rw, Daemon};
use crate::MIB;

fn read(file: &std::fs::File, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; length];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn a_disk_reads_what_was_written() {
    let daemon = Daemon::start();
    let disk = daemon.disk("disk", &[], Some(64 * MIB));
    assert_eq!(disk.metadata().unwrap().len(), 64 * MIB);
    assert_eq!(disk.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let bytes = content(1, 3 * MIB as usize + 777);
    disk.write_all_at(&bytes, 12_345).unwrap();
    disk.sync_all().unwrap();
    assert_eq!(read(&disk, 12_345, bytes.len()), bytes);
    assert_eq!(read(&disk, 0, 12_345), vec![0; 12_345]);

    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&disk, punch, MIB as i64, MIB as i64).unwrap();
    assert_eq!(read(&disk, MIB, MIB as usize), vec![0; MIB as usize]);
    assert_eq!(
        lseek(&disk, MIB as i64, Whence::SeekData).unwrap(),
        2 * MIB as i64
    );
    assert_eq!(lseek(&disk, 12_800, Whence::SeekHole).unwrap(), MIB as i64);
    let past_last = lseek(&disk, 40 * MIB as i64, Whence::SeekData);
    assert_eq!(past_last, Err(nix::errno::Errno::ENXIO));
    fallocate(&disk, FallocateFlags::FALLOC_FL_ZERO_RANGE, 12_345, 100).unwrap();
    assert_eq!(read(&disk, 12_345, 100), vec![0; 100]);
    assert_eq!(read(&disk, 12_445, 100), bytes[100..200]);

    // The size belongs to the stack.
    disk.set_len(64 * MIB).unwrap();
    assert!(disk.set_len(65 * MIB).is_err());
    assert!(disk.write_at(&[1], 64 * MIB).is_err());
    let stack = daemon.ok("GET", "/v1/stacks/disk", &Value::Null);
    assert_eq!(stack["open_handles"], 1);
    assert!(stack["upper_mapped_bytes"].as_u64().unwrap() > 2 * MIB);
}

#[test]
fn sealing_under_io_loses_nothing() {
    let daemon = Daemon::start();
    let disk = Arc::new(daemon.disk("disk", &[], Some(16 * MIB)));
    let stop = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..3_u64)
        .map(|worker| {
            let (disk, stop) = (disk.clone(), stop.clone());
            std::thread::spawn(move || {
                let mut round = 0_u32;
                while !stop.load(Ordering::Relaxed) || round < 50 {
                    round += 1;
                    let offset = worker * 4 * MIB + u64::from(round % 50) * 64 * 1024;
                    let bytes = content(round + worker as u32, 20_000);
                    disk.write_all_at(&bytes, offset).unwrap();
                    if round % 7 == 0 {
                        disk.sync_data().unwrap();
                    }
                    assert_eq!(read(&disk, offset, bytes.len()), bytes);
                }
                (0..50_u32)
                    .map(|slot| {
                        let last = round - (round - slot) % 50;
                        content(last + worker as u32, 20_000)
                    })
                    .collect::<Vec<_>>()
            })
        })
        .collect();
    for number in 0..15 {
        let fresh = daemon.upper(&format!("fresh-{number}"));
        let body = json!({ "upper": fresh, "sync": number % 3 == 0 });
        let sealed = daemon.ok("POST", "/v1/stacks/disk/seal", &body);
        assert_eq!(sealed["stack"]["upper"], fresh);
        assert_eq!(
            sealed["stack"]["lowers"].as_array().unwrap().len(),
            number + 1
        );
    }
    stop.store(true, Ordering::Relaxed);
    for (worker, handle) in workers.into_iter().enumerate() {
        for (slot, expected) in handle.join().unwrap().into_iter().enumerate() {
            let offset = worker as u64 * 4 * MIB + slot as u64 * 64 * 1024;
            assert_eq!(read(&disk, offset, expected.len()), expected);
        }
    }
    // The sealed layers alone, opened elsewhere, hold the same disk.
    let stack = daemon.ok("GET", "/v1/stacks/disk", &Value::Null);
    let body = json!({ "upper": daemon.upper("last"), "sync": true });
    let lowers = daemon.ok("POST", "/v1/stacks/disk/seal", &body)["stack"]["lowers"].clone();
    assert_eq!(
        lowers.as_array().unwrap().len(),
        stack["lowers"].as_array().unwrap().len() + 1
    );
    daemon.ok("PUT", "/v1/stacks/copy", &json!({ "lowers": lowers }));
    let copy = std::fs::read(daemon.file("copy")).unwrap();
    assert!(copy == read(&disk, 0, 16 * MIB as usize));
    let flat = daemon.path("flat");
    let body = json!({ "lowers": lowers, "output": flat, "sync": false });
    let commit = daemon.ok("POST", "/v1/commits", &body);
    assert_eq!(commit["sha256"].as_str().unwrap().len(), 64);
    daemon.ok("PUT", "/v1/stacks/flat", &json!({ "lowers": [flat] }));
    assert!(copy == std::fs::read(daemon.file("flat")).unwrap());
}

#[test]
fn repeated_calls_give_the_same_answer() {
    let daemon = Daemon::start();
    let open = json!({
        "lowers": [], "upper": daemon.upper("u"), "virtual_size_bytes": MIB, "cache": "direct",
    });
    let first = daemon.ok("PUT", "/v1/stacks/s", &open);
    assert_eq!(daemon.ok("PUT", "/v1/stacks/s", &open), first);
    open_rw(&daemon.file("s"))
        .write_all_at(&[5; 4096], 0)
        .unwrap();
    let seal = json!({ "upper": daemon.upper("v"), "sync": false });
    let sealed = daemon.ok("POST", "/v1/stacks/s/seal", &seal);
    assert_eq!(sealed["layer"]["mapped_bytes"], 4096);
    let again = daemon.ok("POST", "/v1/stacks/s/seal", &seal);
    assert_eq!(again["layer"], sealed["layer"]);
    assert_eq!(daemon.fails(409, "PUT", "/v1/stacks/s", &open), "conflict");
    let now = json!({
        "lowers": [daemon.path("u.data")], "upper": daemon.upper("v"), "cache": "direct",
    });
    daemon.ok("PUT", "/v1/stacks/s", &now);
    let twice = json!({ "lowers": [], "upper": daemon.upper("v"), "virtual_size_bytes": MIB });
    assert_eq!(daemon.fails(409, "PUT", "/v1/stacks/t", &twice), "busy");
    daemon.ok("POST", "/v1/stacks/s/flush", &Value::Null);
    daemon.ok("DELETE", "/v1/stacks/s", &Value::Null);
    assert_eq!(
        daemon.fails(404, "DELETE", "/v1/stacks/s", &Value::Null),
        "not_found"
    );
    // The files are free at once.
    daemon.ok("PUT", "/v1/stacks/s", &now);
    let import = json!({ "source": daemon.path("u.data"), "output": daemon.path("i") });
    let first = daemon.ok("POST", "/v1/imports", &import);
    assert_eq!(
        daemon.ok("POST", "/v1/imports", &import)["stored_bytes"],
        first["stored_bytes"]
    );
    assert_eq!(daemon.ok("GET", "/v1/info", &Value::Null)["protocol"], 1);
    let list = daemon.ok("GET", "/v1/stacks", &Value::Null);
    assert_eq!(list["stacks"].as_array().unwrap().len(), 1);
}

#[test]
fn a_busy_stack_closes_only_by_force() {
    let daemon = Daemon::start();
    let disk = daemon.disk("disk", &[], Some(MIB));
    disk.write_all_at(&[7; 512], 0).unwrap();
    assert_eq!(
        daemon.fails(409, "DELETE", "/v1/stacks/disk", &Value::Null),
        "busy"
    );
    assert_eq!(
        daemon.fails(409, "POST", "/v1/shutdown", &json!({})),
        "busy"
    );
    daemon.ok("DELETE", "/v1/stacks/disk?force=true", &Value::Null);
    assert!(disk.read_at(&mut [0; 512], 0).is_err());
    assert!(disk.write_at(&[1; 512], 0).is_err());
    // What was written before the force is there.
    let disk = daemon.disk("disk", &[], Some(MIB));
    assert_eq!(read(&disk, 0, 512), [7; 512]);
}

/// E01: nothing of the former content is left in the page cache.
#[test]
fn a_read_only_stack_refuses_writes_and_a_reused_name_shows_new_content() {
    let daemon = Daemon::start();
    let mut inodes = Vec::new();
    for seed in 0..3 {
        let raw = daemon.path("raw");
        std::fs::write(&raw, content(seed, MIB as usize)).unwrap();
        let layer = daemon.path(&format!("layer-{seed}"));
        daemon.ok(
            "POST",
            "/v1/imports",
            &json!({ "source": raw, "output": layer }),
        );
        daemon.ok(
            "PUT",
            "/v1/stacks/same",
            &json!({ "lowers": [layer], "cache": "page" }),
        );
        let file = open_rw(&daemon.file("same"));
        inodes.push(file.metadata().unwrap().ino());
        assert!(read(&file, 0, MIB as usize) == content(seed, MIB as usize));
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o440);
        let refused = file.write_at(&[1; 512], 0).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
        drop(file);
        daemon.ok("DELETE", "/v1/stacks/same", &Value::Null);
        assert!(!daemon.file("same").exists());
    }
    inodes.dedup();
    assert_eq!(inodes.len(), 3, "an inode number is never used again");
}

#[test]
fn all_zero_stacks_and_owners() {
    let daemon = Daemon::start();
    let body = json!({
        "lowers": [], "upper": null, "virtual_size_bytes": 4 * MIB, "cache": "page",
        "owner": { "uid": 1234, "gid": 4321 },
    });
    daemon.ok("PUT", "/v1/stacks/zero", &body);
    let file = std::fs::File::open(daemon.file("zero")).unwrap();
    assert_eq!(read(&file, 0, 4 * MIB as usize), vec![0; 4 * MIB as usize]);
    let metadata = file.metadata().unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (1234, 4321));
    assert!(
        std::fs::write(daemon.file("other"), "x").is_err(),
        "the folder is not writable"
    );
}

#[test]
fn pages_of_zeros_are_recorded_and_hide_what_is_below() {
    let daemon = Daemon::start();
    let (raw, ones) = (daemon.path("raw"), daemon.path("ones"));
    std::fs::write(&raw, vec![1; MIB as usize]).unwrap();
    daemon.ok(
        "POST",
        "/v1/imports",
        &json!({ "source": raw, "output": ones }),
    );
    let upper = json!({ "data": daemon.path("zeros.lsmt"), "index": daemon.path("zeros.index") });
    let body = json!({
        "lowers": [], "upper": upper, "virtual_size_bytes": MIB, "cache": "direct", "records_zeros": true,
    });
    daemon.ok("PUT", "/v1/stacks/capture", &body);
    let mut content = vec![0; MIB as usize];
    content[8192..12288].fill(7);
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(daemon.file("capture"))
        .unwrap();
    file.write_all_at(&content, 0).unwrap();
    file.sync_all().unwrap();
    let fresh = json!({ "upper": { "data": daemon.path("u.lsmt"), "index": daemon.path("u.index") }, "sync": false });
    daemon.ok("POST", "/v1/stacks/capture/seal", &fresh);
    let sealed = daemon.path("zeros.lsmt");
    assert!(std::fs::metadata(&sealed).unwrap().len() < 64 << 10);
    let both = json!({ "lowers": [ones, sealed], "upper": null, "cache": "page" });
    daemon.ok("PUT", "/v1/stacks/both", &both);
    let file = std::fs::File::open(daemon.file("both")).unwrap();
    assert_eq!(read(&file, 0, MIB as usize), content);
}

#[test]
fn bad_requests_name_the_cause() {
    let daemon = Daemon::start();
    let invalid = |path: &str, body: Value| {
        assert_eq!(daemon.fails(400, "PUT", path, &body), "invalid_input");
    };
    invalid("/v1/stacks/UPPER", json!({ "virtual_size_bytes": 512 }));
    invalid("/v1/stacks/..", json!({ "virtual_size_bytes": 512 }));
    invalid("/v1/stacks/a", json!({}));
    invalid("/v1/stacks/a", json!({ "virtual_size_bytes": 513 }));
    invalid("/v1/stacks/a", json!({ "lowers": ["relative"] }));
    invalid("/v1/stacks/a", json!({ "lowers": ["/absent"] }));
    invalid("/v1/stacks/a", json!({ "unknown": 1 }));
    let page = json!({ "upper": daemon.upper("u"), "virtual_size_bytes": 512, "cache": "page" });
    invalid("/v1/stacks/a", page);
    let garbage = daemon.path("garbage");
    std::fs::write(&garbage, vec![1; 10_000]).unwrap();
    let body = json!({ "lowers": [garbage] });
    assert_eq!(daemon.fails(500, "PUT", "/v1/stacks/a", &body), "corrupt");
    assert_eq!(
        daemon.fails(404, "GET", "/v1/absent", &Value::Null),
        "not_found"
    );
    assert_eq!(
        daemon.fails(404, "POST", "/v1/stacks/a/flush", &Value::Null),
        "not_found"
    );
    let too_big = Value::String("x".repeat(9 << 20));
    assert_eq!(
        daemon.fails(400, "PUT", "/v1/stacks/a", &too_big),
        "invalid_input"
    );
    let none = json!({ "lowers": [], "output": daemon.path("out") });
    assert_eq!(
        daemon.fails(400, "POST", "/v1/commits", &none),
        "invalid_input"
    );
    assert!(!daemon.path("out").exists() && !daemon.path("u.data").exists());
}

#[test]
fn layers_are_replaced_under_io_and_lose_nothing() {
    let daemon = Daemon::start();
    let disk = Arc::new(daemon.disk("disk", &[], Some(16 * MIB)));
    let mut lowers = vec![];
    for round in 0..6_u64 {
        let bytes = content(round as u32, 300_000);
        disk.write_all_at(&bytes, round * MIB).unwrap();
        disk.write_all_at(&bytes, 8 * MIB).unwrap();
        let upper = daemon.upper(&format!("next{round}"));
        let sealed = daemon.ok("POST", "/v1/stacks/disk/seal", &json!({ "upper": upper }));
        lowers = sealed["stack"]["lowers"].as_array().unwrap().clone();
    }
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (disk, stop) = (disk.clone(), stop.clone());
        std::thread::spawn(move || {
            let mut round = 0_u32;
            while !stop.load(Ordering::Relaxed) || round < 50 {
                round += 1;
                let bytes = content(round, 70_000);
                disk.write_all_at(&bytes, 12 * MIB + 77).unwrap();
                assert_eq!(read(&disk, 12 * MIB + 77, 70_000), bytes);
                assert_eq!(read(&disk, 3 * MIB, 300_000), content(3, 300_000));
            }
        })
    };
    let merged = daemon.path("merged.lsmt");
    let run = &lowers[1..4];
    daemon.ok(
        "POST",
        "/v1/commits",
        &json!({ "lowers": run, "output": merged }),
    );
    let request = json!({ "lowers": run, "replacement": merged });
    for _ in 0..2 {
        let stack = daemon.ok("POST", "/v1/stacks/disk/replace", &request);
        let expected = [&lowers[..1], &[json!(merged)], &lowers[4..]].concat();
        assert_eq!(stack["lowers"], json!(expected));
    }
    for path in run {
        std::fs::remove_file(path.as_str().unwrap()).unwrap();
    }
    let upper = daemon.upper("last");
    daemon.ok("POST", "/v1/stacks/disk/seal", &json!({ "upper": upper }));
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    for round in 0..6_u64 {
        assert_eq!(
            read(&disk, round * MIB, 300_000),
            content(round as u32, 300_000)
        );
    }
    assert_eq!(read(&disk, 8 * MIB, 300_000), content(5, 300_000));
}

#[test]
fn what_is_not_in_a_stack_cannot_be_replaced() {
    let daemon = Daemon::start();
    let disk = daemon.disk("disk", &[], Some(4 * MIB));
    let mut lowers = vec![];
    for round in 0..3_u64 {
        disk.write_all_at(&content(round as u32, 5000), round * MIB)
            .unwrap();
        let upper = daemon.upper(&format!("next{round}"));
        let sealed = daemon.ok("POST", "/v1/stacks/disk/seal", &json!({ "upper": upper }));
        lowers = sealed["stack"]["lowers"].as_array().unwrap().clone();
    }
    let merged = daemon.path("merged.lsmt");
    daemon.ok(
        "POST",
        "/v1/commits",
        &json!({ "lowers": lowers[..2], "output": merged }),
    );
    let swapped = [lowers[1].clone(), lowers[0].clone()];
    for (run, replacement, status) in [
        (json!([]), json!(merged), 409),
        (json!([lowers[0], lowers[2]]), json!(merged), 409),
        (json!(swapped), json!(merged), 409),
        (json!(lowers[..2]), json!("relative"), 400),
    ] {
        let request = json!({ "lowers": run, "replacement": replacement });
        let (found, _) = daemon.call("POST", "/v1/stacks/disk/replace", &request);
        assert_eq!(found, status, "{request}");
    }
    let missing = json!({ "lowers": lowers[..2], "replacement": daemon.path("none.lsmt") });
    assert!(daemon.call("POST", "/v1/stacks/disk/replace", &missing).0 >= 400);
    let (status, _) = daemon.call(
        "POST",
        "/v1/stacks/none/replace",
        &json!({ "lowers": lowers, "replacement": merged }),
    );
    assert_eq!(status, 404);
    let stack = daemon.ok("GET", "/v1/stacks/disk", &Value::Null);
    assert_eq!(stack["lowers"], json!(lowers));
    for round in 0..3_u64 {
        assert_eq!(read(&disk, round * MIB, 5000), content(round as u32, 5000));
    }
}

#[test]
fn an_upper_keeps_the_layout_it_was_made_with() {
    let daemon = Daemon::start();
    for layout in ["append", "hybrid", "sparse"] {
        let body = json!({
            "upper": daemon.upper(layout), "upper_layout": layout, "virtual_size_bytes": MIB,
        });
        let path = format!("/v1/stacks/{layout}");
        let info = daemon.ok("PUT", &path, &body);
        assert_eq!(info["upper_layout"], layout);
        let disk = open_rw(&daemon.file(layout));
        for round in 0..3 {
            disk.write_all_at(&content(round, 100_000), 4096).unwrap();
        }
        disk.sync_all().unwrap();
        let used = |info: &Value| info["upper_data_bytes"].as_u64().unwrap();
        let grew = used(&daemon.ok("GET", &path, &Value::Null)) > used(&info) + 150_000;
        assert_eq!(grew, layout == "append");
        let mut expected = vec![0; MIB as usize];
        disk.read_exact_at(&mut expected, 0).unwrap();
        drop(disk);
        daemon.ok("DELETE", &path, &Value::Null);
        // Opened again without a word about it, and sealed.
        let body = json!({ "upper": daemon.upper(layout) });
        assert_eq!(daemon.ok("PUT", &path, &body)["upper_layout"], layout);
        let seal = json!({ "upper": daemon.upper(&format!("{layout}-2")), "sync": false });
        let sealed = daemon.ok("POST", &format!("{path}/seal"), &seal);
        assert_eq!(sealed["stack"]["upper_layout"], layout);
        assert!(
            std::fs::read(daemon.file(layout)).unwrap() == expected,
            "{layout}"
        );
    }
    let body = json!({ "upper": daemon.upper("x"), "upper_layout": "tree" });
    daemon.fails(400, "PUT", "/v1/stacks/x", &body);
}
