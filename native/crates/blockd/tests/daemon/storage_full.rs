//! A full file system: clear errors, nothing left behind, nothing harmed.

use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

use serde_json::{json, Value};

use crate::rig::{content, open_rw, Daemon, SmallFs};
use crate::MIB;

#[test]
fn outputs_that_do_not_fit_leave_nothing() {
    let daemon = Daemon::start();
    let small = SmallFs::mount(daemon.path("small"), 2 * MIB);
    let raw = daemon.path("raw");
    std::fs::write(&raw, content(1, 8 * MIB as usize)).unwrap();
    let layer = daemon.path("layer");
    daemon.ok(
        "POST",
        "/v1/imports",
        &json!({ "source": raw, "output": layer }),
    );
    let output = small.0.join("out");
    let import = json!({ "source": raw, "output": output });
    assert_eq!(
        daemon.fails(507, "POST", "/v1/imports", &import),
        "storage_full"
    );
    let commit = json!({ "lowers": [layer], "output": output });
    assert_eq!(
        daemon.fails(507, "POST", "/v1/commits", &commit),
        "storage_full"
    );
    assert_eq!(small.names(), Vec::<String>::new());
}

#[test]
fn a_full_disk_fails_writes_and_seals_but_harms_nothing() {
    let daemon = Daemon::start();
    let small = SmallFs::mount(daemon.path("small"), 2 * MIB);
    let upper = json!({ "data": small.0.join("data"), "index": small.0.join("index") });
    let body = json!({ "upper": upper, "virtual_size_bytes": 64 * MIB });
    daemon.ok("PUT", "/v1/stacks/disk", &body);
    let disk = open_rw(&daemon.file("disk"));
    let kept = content(1, MIB as usize);
    disk.write_all_at(&kept, 0).unwrap();
    disk.sync_all().unwrap();
    let refused = disk
        .write_all_at(&content(2, 4 * MIB as usize), 8 * MIB)
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::StorageFull);
    // Take the last pages, so that not even the index of a seal fits.
    let filler = std::fs::File::create(small.0.join("filler")).unwrap();
    while filler
        .write_at(&[1; 4096], filler.metadata().unwrap().len())
        .is_ok()
    {}
    let seal = json!({ "upper": daemon.upper("fresh"), "sync": true });
    let code = daemon.fails(507, "POST", "/v1/stacks/disk/seal", &seal);
    assert_eq!(code, "storage_full");
    assert!(!daemon.path("fresh.data").exists());
    let mut bytes = vec![0; MIB as usize];
    disk.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == kept);

    std::fs::remove_file(small.0.join("filler")).unwrap();
    drop(filler);
    disk.write_all_at(&[9; 4096], 0).unwrap();
    disk.sync_all().unwrap();
    daemon.ok("POST", "/v1/stacks/disk/seal", &seal);
    disk.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes[..4096] == [9; 4096] && bytes[4096..] == kept[4096..]);
    drop(disk);
    daemon.ok("DELETE", "/v1/stacks/disk", &Value::Null);
}

/// What was written can be flushed, whatever there is no room for any more: a VMM waits for
/// room when a write fails, but takes a failed flush for a loss.
#[test]
fn a_flush_needs_no_room() {
    for (number, piece_bytes) in [512, 4096, 65_536, MIB].into_iter().enumerate() {
        let daemon = Daemon::start();
        let small = SmallFs::mount(daemon.path("small"), 3 * MIB);
        let upper = json!({ "data": small.0.join("data"), "index": small.0.join("index") });
        let body = json!({ "upper": upper, "virtual_size_bytes": 64 * MIB, "cache": "direct" });
        daemon.ok("PUT", "/v1/stacks/disk", &body);
        let disk = open_rw(&daemon.file("disk"));
        let bytes = content(number as u32, piece_bytes as usize);
        let place = |piece: u64| piece * piece_bytes * 2; // apart, so that each is a record
        let refused = (0..)
            .find_map(|piece| Some((piece, disk.write_at(&bytes, place(piece)).err()?)))
            .unwrap();
        let (pieces, error) = refused;
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        disk.sync_all().unwrap();
        assert!(pieces > 0);
        let mut found = vec![0; bytes.len()];
        for piece in 0..pieces {
            disk.read_exact_at(&mut found, place(piece)).unwrap();
            assert!(found == bytes, "{piece} of {piece_bytes} bytes");
        }
        drop(disk);
        daemon.ok("DELETE", "/v1/stacks/disk", &Value::Null);
    }
}
