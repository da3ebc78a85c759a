//! `inspect`, `cat`, `fsck` and `version`, on files of a running daemon.

use std::os::unix::fs::FileExt;

use serde_json::{json, Value};

use crate::rig::{blockd, content, Daemon};
use crate::MIB;

#[test]
fn offline_tools_agree_with_the_daemon() {
    let daemon = Daemon::start();
    let disk = daemon.disk("u", &[], Some(2 * MIB));
    disk.write_all_at(&content(1, 100_000), 5000).unwrap();
    let seal = json!({ "upper": daemon.upper("v"), "sync": false });
    daemon.ok("POST", "/v1/stacks/u/seal", &seal);
    disk.write_all_at(&content(2, 5000), 50_000).unwrap();
    disk.sync_all().unwrap();
    let mut expected = vec![0; 2 * MIB as usize];
    disk.read_exact_at(&mut expected, 0).unwrap();

    let config = daemon.path("config.v1.json");
    // Relative paths count from the config's folder.
    let text = json!({
        "lowers": [{ "file": "u.data" }],
        "upper": { "index": "v.index", "data": "v.data" },
    });
    std::fs::write(&config, text.to_string()).unwrap();
    let before = std::fs::read(daemon.path("v.index")).unwrap();
    let cat = blockd(&["cat", config.to_str().unwrap()]);
    assert!(cat.status.success() && cat.stdout == expected);
    assert_eq!(std::fs::read(daemon.path("v.index")).unwrap(), before);
    assert!(blockd(&["fsck", config.to_str().unwrap()]).status.success());

    let inspect = |name: &str| -> Value {
        let output = blockd(&["inspect", daemon.path(name).to_str().unwrap()]);
        assert!(output.status.success());
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let layer = inspect("u.data");
    assert_eq!(layer["kind"], "sealed layer");
    assert_eq!(layer["trailer"]["virtual_size_bytes"], 2 * MIB);
    assert!(layer["mapped_bytes"].as_u64().unwrap() >= 100_000);
    assert_eq!(inspect("v.data")["kind"], "upper data");
    let index = inspect("v.index");
    assert_eq!(
        (&index["kind"], &index["entries"]),
        (&json!("upper index"), &json!(1))
    );
    assert_eq!(index["header"]["parent_uuid"], layer["trailer"]["uuid"]);
}

#[test]
fn fsck_reports_damage_with_exit_code_one() {
    let daemon = Daemon::start();
    let disk = daemon.disk("u", &[], Some(2 * MIB));
    disk.write_all_at(&content(1, 100_000), 0).unwrap();
    disk.sync_all().unwrap();
    drop(disk);
    daemon.ok("DELETE", "/v1/stacks/u", &Value::Null);
    let config = daemon.path("config.v1.json");
    let text = json!({ "lowers": [], "upper": daemon.upper("u") });
    std::fs::write(&config, text.to_string()).unwrap();
    let fsck = |path: &std::path::Path| {
        let output = blockd(&["fsck", path.to_str().unwrap()]);
        (
            output.status.code(),
            String::from_utf8(output.stdout).unwrap(),
        )
    };
    assert_eq!(fsck(&config), (Some(0), String::new()));
    let mut index = std::fs::read(daemon.path("u.index")).unwrap();
    index.extend_from_slice(&[1; 5]);
    std::fs::write(daemon.path("u.index"), &index).unwrap();
    let (code, text) = fsck(&config);
    assert!(code == Some(1) && text.contains("last 5 bytes"), "{text}");
    let (code, text) = fsck(&daemon.path("u.data"));
    assert!(code == Some(1) && text.contains("trailer"), "{text}");
    assert_eq!(fsck(&daemon.path("absent.json")).0, Some(1));
}

#[test]
fn version_names_the_program() {
    let output = blockd(&["version"]);
    let expected = format!("blockd {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}
