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

/// Arguments as text; a failure's message, or what was printed.
fn run(arguments: &[&str]) -> Result<Value, String> {
    let output = blockd(arguments);
    if !output.status.success() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let text = output.stdout;
    Ok(serde_json::from_slice(&text).unwrap_or(Value::Null))
}

#[test]
fn a_committed_layer_of_any_kind_is_served_and_described() {
    let daemon = Daemon::start();
    let disk = daemon.disk("u", &[], Some(2 * MIB));
    let text = vec![b'a'; 300_000];
    disk.write_all_at(&text, 4096).unwrap();
    disk.write_all_at(&content(1, 100_000), 500_000).unwrap();
    disk.sync_all().unwrap();
    let mut expected = vec![0; 2 * MIB as usize];
    disk.read_exact_at(&mut expected, 0).unwrap();
    drop(disk);
    daemon.ok("DELETE", "/v1/stacks/u", &Value::Null);
    let path = |name: &str| daemon.path(name).to_str().unwrap().to_owned();
    let (data, index) = (path("u.data"), path("u.index"));
    let uuid = "6F0D2B4E-7F0B-4C19-9E7C-3B1F2A6D5C10";
    let cases: [(&str, &[&str], &[u64]); 4] = [
        ("plain", &[], &[]),
        ("lz4", &["--compression", "lz4"], &[4096]),
        (
            "zstd",
            &["--compression", "zstd", "--block-size-kib", "32", "--tar"],
            &[32_768],
        ),
        ("tar", &["--tar"], &[]),
    ];
    let mut smallest = u64::MAX;
    for (name, options, block_bytes) in cases {
        let output = path(name);
        let mut arguments = vec!["commit", &output, "--data", &data, "--index", &index];
        arguments.extend(["--uuid", uuid, "--tag", "from a test"]);
        arguments.extend(options);
        let written = run(&arguments).unwrap();
        let again = run(&arguments).unwrap();
        assert_eq!(again["sha256"], written["sha256"], "the same bytes again");
        let report = run(&["inspect", &output]).unwrap();
        assert_eq!(report["trailer"]["uuid"], uuid.to_lowercase());
        assert_eq!(report["trailer"]["user_tag"], "from a test");
        assert_eq!(report["size_bytes"], written["size_bytes"]);
        let blocks: Vec<u64> = report["zfile"]["block_bytes"]
            .as_u64()
            .into_iter()
            .collect();
        assert_eq!(blocks, block_bytes);
        let is_tar = options.contains(&"--tar");
        assert_eq!(report["tar_offset"].as_u64(), is_tar.then_some(1536));
        smallest = smallest.min(written["size_bytes"].as_u64().unwrap());
        assert!(run(&["fsck", &output]).is_ok());
        // The daemon serves it, and makes a layer of it again.
        let body = json!({ "lowers": [&output], "cache": "direct" });
        daemon.ok("PUT", &format!("/v1/stacks/{name}"), &body);
        assert!(
            std::fs::read(daemon.file(name)).unwrap() == expected,
            "{name}"
        );
        let again = path(&format!("{name}-again"));
        let body = json!({
            "lowers": [&output], "output": &again, "tar": true, "parent_uuid": uuid,
            "compression": { "algorithm": "zstd" },
        });
        daemon.ok("POST", "/v1/commits", &body);
        let report = run(&["inspect", &again]).unwrap();
        assert_eq!(report["zfile"]["algorithm"], "zstd");
        assert_eq!(report["trailer"]["parent_uuid"], uuid.to_lowercase());
    }
    assert!(smallest < 200_000, "compression does nothing: {smallest}");
}

#[test]
fn bad_commits_say_what_to_do_and_leave_nothing() {
    let daemon = Daemon::start();
    let path = |name: &str| daemon.path(name).to_str().unwrap().to_owned();
    let output = path("out");
    let cases: [(&[&str], &str); 6] = [
        (&["commit", &output], "nothing to commit"),
        (&["commit", &output, "/gone"], "/gone"),
        (
            &[
                "commit",
                &output,
                "/gone.json",
                "--data",
                "a",
                "--index",
                "b",
            ],
            "names its upper itself",
        ),
        (&["commit", &output, "--data", "a"], "--index"),
        (&["config", &output], "neither lowers nor an upper"),
        (&["config", &output, "/gone"], "/gone"),
    ];
    for (arguments, reason) in cases {
        let error = run(arguments).unwrap_err();
        assert!(error.contains(reason), "{arguments:?}: {error}");
        assert!(!daemon.path("out").exists());
    }
    drop(daemon.disk("u", &[], Some(MIB)));
    let seal = json!({ "upper": daemon.upper("v"), "sync": false });
    daemon.ok("POST", "/v1/stacks/u/seal", &seal);
    let layer = daemon.path("u.data");
    let commit = |extra: Value| {
        let mut body = json!({ "lowers": [layer], "output": output });
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        assert_eq!(
            daemon.fails(400, "POST", "/v1/commits", &body),
            "invalid_input"
        );
        assert!(!daemon.path("out").exists());
    };
    commit(json!({ "uuid": "seven" }));
    commit(json!({ "parent_uuid": "" }));
    commit(json!({ "compression": { "algorithm": "lz4", "block_bytes": 5000 } }));
    commit(json!({ "compression": { "algorithm": "gzip" } }));
}

#[test]
fn a_config_is_written_opened_and_told_the_outcome() {
    let daemon = Daemon::start();
    let disk = daemon.disk("u", &[], Some(MIB));
    disk.write_all_at(&content(1, 100_000), 0).unwrap();
    let seal = json!({ "upper": daemon.upper("v"), "sync": false });
    daemon.ok("POST", "/v1/stacks/u/seal", &seal);
    disk.write_all_at(&content(2, 5000), 50_000).unwrap();
    disk.sync_all().unwrap();
    let mut expected = vec![0; MIB as usize];
    disk.read_exact_at(&mut expected, 0).unwrap();
    drop(disk);
    daemon.ok("DELETE", "/v1/stacks/u", &Value::Null);
    let config = daemon.path("config.v1.json");
    let shown = config.to_str().unwrap();
    let made = [
        "config",
        shown,
        "u.data",
        "--data",
        "v.data",
        "--index",
        "v.index",
        "--result-file",
        "r",
    ];
    // Paths count from the config's folder.
    run(&made).unwrap();
    assert!(run(&["fsck", "--parents", shown]).is_ok());
    let result = || std::fs::read_to_string(daemon.path("r")).unwrap();
    let info = daemon.ok("PUT", "/v1/stacks/c", &json!({ "config": config }));
    assert_eq!(info["lowers"], json!([daemon.path("u.data")]));
    assert_eq!(result(), "success");
    assert!(std::fs::read(daemon.file("c")).unwrap() == expected);
    // Opened again it is confirmed; with layers besides it is refused.
    daemon.ok("PUT", "/v1/stacks/c", &json!({ "config": config }));
    let both = json!({ "config": config, "lowers": ["/x"] });
    daemon.fails(400, "PUT", "/v1/stacks/c", &both);
    let code = daemon.fails(409, "PUT", "/v1/stacks/d", &json!({ "config": config }));
    assert_eq!(code, "busy");
    assert!(result().starts_with("failed:upper"), "{}", result());
    daemon.ok("DELETE", "/v1/stacks/c", &Value::Null);
    // All of the config as one layer.
    let flat = daemon.path("flat");
    let flat = flat.to_str().unwrap();
    run(&["commit", flat, shown, "--compression", "lz4"]).unwrap();
    let body = json!({ "lowers": [flat] });
    daemon.ok("PUT", "/v1/stacks/f", &body);
    assert!(std::fs::read(daemon.file("f")).unwrap() == expected);
    let wrong = json!({ "lowers": [{ "file": "flat", "digest": format!("sha256:{:064}", 1) }] });
    std::fs::write(&config, wrong.to_string()).unwrap();
    let output = blockd(&["fsck", shown]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("the config states sha256:000"), "{text}");
    let chain = json!({ "lowers": [{ "file": "flat" }, { "file": "flat" }] });
    std::fs::write(&config, chain.to_string()).unwrap();
    assert!(run(&["fsck", shown]).is_ok());
    let output = blockd(&["fsck", "--parents", shown]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("made for a parent"), "{text}");
}

#[test]
fn damage_inside_a_compressed_layer_is_an_error_and_found() {
    let daemon = Daemon::start();
    let disk = daemon.disk("u", &[], Some(MIB));
    disk.write_all_at(&content(1, 100_000), 0).unwrap();
    disk.sync_all().unwrap();
    drop(disk);
    daemon.ok("DELETE", "/v1/stacks/u", &Value::Null);
    let path = |name: &str| daemon.path(name).to_str().unwrap().to_owned();
    let (data, index, layer) = (path("u.data"), path("u.index"), path("layer"));
    let upper = ["--data", &data, "--index", &index, "--compression", "lz4"];
    let mut arguments = vec!["commit", &layer];
    arguments.extend(upper);
    run(&arguments).unwrap();
    let mut bytes = std::fs::read(&layer).unwrap();
    bytes[50_000] ^= 1;
    std::fs::write(&layer, &bytes).unwrap();
    let body = json!({ "lowers": [&layer], "cache": "direct" });
    daemon.ok("PUT", "/v1/stacks/l", &body);
    let error = std::fs::read(daemon.file("l")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
    let text = String::from_utf8(blockd(&["fsck", &layer]).stdout).unwrap();
    assert!(text.contains("checksum"), "{text}");
    bytes[40] ^= 1;
    std::fs::write(&layer, &bytes).unwrap();
    let code = daemon.fails(500, "PUT", "/v1/stacks/m", &json!({ "lowers": [&layer] }));
    assert_eq!(code, "corrupt");
}

#[test]
fn version_names_the_program() {
    let output = blockd(&["version"]);
    let expected = format!("blockd {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}
