//! Layers that stay in a registry.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use crate::registry::Registry;
use crate::rig::{blockd, content, wait_until, Daemon};
use crate::MIB;

/// For what is done in the background.
const WAIT: Duration = Duration::from_secs(10);

const SIZE: u64 = 16 * MIB;

/// A layer as images have it, in a registry, and its content.
fn published(daemon: &Daemon, seed: u32) -> (Registry, Vec<u8>) {
    let raw = daemon.path(&format!("raw{seed}"));
    let bytes = content(seed, SIZE as usize);
    std::fs::write(&raw, &bytes).unwrap();
    let plain = daemon.path(&format!("plain{seed}.lsmt"));
    daemon.ok(
        "POST",
        "/v1/imports",
        &json!({"source": raw, "output": plain}),
    );
    let packed = daemon.path(&format!("packed{seed}"));
    let (packed_text, plain_text) = (packed.to_str().unwrap(), plain.to_str().unwrap());
    let output = blockd(&[
        "commit",
        packed_text,
        plain_text,
        "--compression",
        "lz4",
        "--tar",
    ]);
    assert!(output.status.success(), "{output:?}");
    (Registry::start(std::fs::read(packed).unwrap()), bytes)
}

fn add(daemon: &Daemon, registry: &Registry, name: &str) -> PathBuf {
    let stub = daemon.path(name);
    let reply = daemon.ok("POST", "/v1/remotes", &registry.layer(&stub, Some("p")));
    assert_eq!(reply["virtual_size_bytes"], SIZE);
    stub
}

fn read(file: &std::fs::File, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn a_stack_reads_what_it_needs_of_a_remote_layer() {
    let daemon = Daemon::start();
    let (registry, bytes) = published(&daemon, 1);
    let stub = add(&daemon, &registry, "remote.lsmt");
    assert!(std::fs::metadata(&stub).unwrap().len() < 1000);
    let disk = daemon.disk("a", std::slice::from_ref(&stub), None);
    for offset in [0, 5_000_000, 13_333_333, SIZE - 5000] {
        assert_eq!(read(&disk, offset, 5000), bytes[offset as usize..][..5000]);
    }
    disk.write_all_at(b"mine", 5_000_001).unwrap();
    let served = registry.served();
    assert!(
        served < registry.size_bytes / 10,
        "{served} of {}",
        registry.size_bytes
    );
    // A second stack, and one opened again, find it in the cache.
    let again = daemon.disk("b", &[stub], None);
    assert_eq!(read(&again, 5_000_000, 5000), bytes[5_000_000..][..5000]);
    assert_eq!(registry.served(), served);
    let figures = daemon.ok("GET", "/v1/remotes", &Value::Null);
    assert!(figures["layers"][0]["fetched_bytes"].as_u64().unwrap() <= served);
    assert_eq!(figures["layers"][0]["is_local"], false);
    assert_eq!(figures["cache"]["damaged_blocks"], 0);
    let used = &figures["cache"]["used_bytes"];
    let body = json!({"bytes": SIZE});
    let shrunk = daemon.ok("POST", "/v1/remotes/shrink", &body);
    assert_eq!(&shrunk["freed_bytes"], used);
    assert_eq!(read(&disk, 13_360_000, 5000), bytes[13_360_000..][..5000]);
    assert!(registry.served() > served);
}

#[test]
fn the_cache_outlives_the_daemon_and_the_login_does_not() {
    let mut daemon = Daemon::start();
    let (registry, bytes) = published(&daemon, 2);
    let stub = add(&daemon, &registry, "remote.lsmt");
    let disk = daemon.disk("a", std::slice::from_ref(&stub), None);
    read(&disk, 5_000_000, 5000);
    drop(disk);
    daemon.kill();
    daemon.spawn();
    let served = registry.served();
    let disk = daemon.disk("a", std::slice::from_ref(&stub), None);
    assert_eq!(read(&disk, 5_000_000, 5000), bytes[5_000_000..][..5000]);
    assert_eq!(registry.served(), served);
    let mut unread = [0; 10];
    assert!(disk.read_exact_at(&mut unread, 14_000_000).is_err());
    // Given again, it is of use at once.
    daemon.ok("POST", "/v1/remotes", &registry.layer(&stub, Some("p")));
    assert_eq!(read(&disk, 14_000_000, 10), bytes[14_000_000..][..10]);
}

#[test]
fn a_layer_that_cannot_be_read_is_refused_and_leaves_no_stub() {
    let daemon = Daemon::start();
    let (registry, _) = published(&daemon, 3);
    let stub = daemon.path("remote.lsmt");
    let add = |status: u16, change: &dyn Fn(&mut Value)| {
        let mut body = registry.layer(&stub, Some("p"));
        change(&mut body);
        let code = daemon.fails(status, "POST", "/v1/remotes", &body);
        assert!(!stub.exists(), "{code}");
        code
    };
    assert_eq!(add(403, &|body| body["login"] = Value::Null), "denied");
    assert_eq!(
        add(400, &|body| body["digest"] = json!("sha256:12")),
        "invalid_input"
    );
    assert_eq!(
        add(400, &|body| body["size_bytes"] = json!(1_u64 << 60)),
        "invalid_input"
    );
    assert_eq!(
        add(400, &|body| body["blobs_url"] = json!("file:///x")),
        "invalid_input"
    );
    assert_eq!(
        add(400, &|body| body["output"] = json!("x")),
        "invalid_input"
    );
    assert_eq!(
        add(500, &|body| body["size_bytes"] =
            json!(registry.size_bytes - 1)),
        "corrupt"
    );
    let (other, _) = (Registry::start(content(9, 100_000)), ());
    assert_eq!(
        daemon.fails(500, "POST", "/v1/remotes", &other.layer(&stub, Some("p"))),
        "corrupt"
    );
}

#[test]
fn a_registry_that_hangs_holds_up_only_what_needs_it() {
    let daemon = Daemon::start();
    let (registry, bytes) = published(&daemon, 4);
    let stub = add(&daemon, &registry, "remote.lsmt");
    let slow = daemon.disk("slow", &[stub], None);
    let local = daemon.disk("local", &[daemon.path("plain4.lsmt")], None);
    registry.is_stuck.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..20_u64)
            .map(|number| {
                let (slow, bytes) = (&slow, &bytes);
                scope.spawn(move || {
                    let offset = 6_000_000 + number * 500_000;
                    assert_eq!(read(slow, offset, 4096), bytes[offset as usize..][..4096]);
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        // A seal waits for the reads, and all else of that stack for the seal.
        let sealer = scope.spawn(|| {
            let seal = json!({"upper": daemon.upper("sealed"), "sync": false});
            daemon.ok("POST", "/v1/stacks/slow/seal", &seal)
        });
        std::thread::sleep(Duration::from_millis(100));
        let writers: Vec<_> = (0..20_u64)
            .map(|number| {
                let slow = &slow;
                scope.spawn(move || slow.write_all_at(b"mine", number * 4096).unwrap())
            })
            .collect();
        std::thread::sleep(Duration::from_millis(200));
        let started = Instant::now();
        assert_eq!(read(&local, 10_000_000, 4096), bytes[10_000_000..][..4096]);
        assert!(
            started.elapsed() < Duration::from_secs(2),
            "{:?}",
            started.elapsed()
        );
        registry.is_stuck.store(false, Ordering::SeqCst);
        readers
            .into_iter()
            .for_each(|reader| reader.join().unwrap());
        sealer.join().unwrap();
        writers
            .into_iter()
            .for_each(|writer| writer.join().unwrap());
    });
}

#[test]
fn what_a_first_stack_read_is_fetched_ahead_for_later_ones() {
    let mut daemon = Daemon::start();
    let (registry, bytes) = published(&daemon, 5);
    let stub = add(&daemon, &registry, "remote.lsmt");
    let disk = daemon.disk("a", std::slice::from_ref(&stub), None);
    for offset in [9_000_000, 2_000_000, 14_000_000] {
        read(&disk, offset, 5000);
    }
    let trace = daemon.path("remote.trace");
    wait_until(WAIT, "the trace is kept", || trace.exists());
    read(&disk, 5_000_000, 5000);
    drop(disk);
    daemon.kill();
    // As on a node that has the trace and no blocks.
    std::fs::remove_dir_all(daemon.path("remote")).unwrap();
    daemon.spawn();
    daemon.ok("POST", "/v1/remotes", &registry.layer(&stub, Some("p")));
    let disk = daemon.disk("b", &[stub], None);
    wait_until(WAIT, "it is fetched", || {
        daemon.log().contains("fetched ahead")
    });
    let served = registry.served();
    for offset in [9_000_000, 2_000_000, 14_000_000] {
        assert_eq!(read(&disk, offset, 5000), bytes[offset as usize..][..5000]);
    }
    assert_eq!(registry.served(), served);
    read(&disk, 5_000_000, 5000);
    assert!(
        registry.served() > served,
        "what came after the window was not recorded"
    );
}

#[test]
fn bytes_that_prove_wrong_are_asked_for_again() {
    let daemon = Daemon::start();
    let (registry, bytes) = published(&daemon, 7);
    let stub = add(&daemon, &registry, "remote.lsmt");
    let disk = daemon.disk("a", &[stub], None);
    registry.spoilt_replies.store(1, Ordering::SeqCst);
    // All of a window, so that the wrong byte is among what is read.
    assert_eq!(
        read(&disk, 5_000_000, 600_000),
        bytes[5_000_000..][..600_000]
    );
    assert_eq!(registry.spoilt_replies.load(Ordering::SeqCst), 0);
    let figures = daemon.ok("GET", "/v1/remotes", &Value::Null);
    assert_ne!(figures["cache"]["damaged_blocks"], 0);
    // A registry that sends nothing else is an error, and no wrong bytes.
    registry.spoilt_replies.store(u64::MAX, Ordering::SeqCst);
    let mut unread = vec![0; 600_000];
    assert!(disk.read_exact_at(&mut unread, 9_000_000).is_err());
}

#[test]
fn a_config_names_layers_in_a_registry() {
    let daemon = Daemon::start();
    let (registry, bytes) = published(&daemon, 6);
    // The login is known from another layer of the repository.
    add(&daemon, &registry, "other.lsmt");
    let config = daemon.path("config.v1.json");
    let lower = json!({"dir": "layer", "digest": registry.digest, "size": registry.size_bytes});
    let address = format!("http://{}/v2/x/blobs", registry.address);
    let text = json!({"repoBlobUrl": address, "lowers": [lower], "resultFile": "result"});
    std::fs::write(&config, text.to_string()).unwrap();
    let offline = blockd(&["cat", config.to_str().unwrap()]);
    assert!(!offline.status.success());
    assert!(String::from_utf8_lossy(&offline.stderr).contains("in a registry only"));
    daemon.ok("PUT", "/v1/stacks/c", &json!({"config": config}));
    let file = std::fs::File::open(daemon.file("c")).unwrap();
    assert_eq!(read(&file, 5_000_000, 5000), bytes[5_000_000..][..5000]);
    let result = std::fs::read_to_string(daemon.path("result")).unwrap();
    assert_eq!(result, "success");
    assert!(daemon.path("layer/overlaybd.commit").exists());
}
