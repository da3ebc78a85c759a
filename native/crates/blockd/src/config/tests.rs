#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;

fn resolve(folder: &Path, text: &str) -> Result<Resolved, String> {
    let path = folder.join("config.v1.json");
    let config = ImageConfig::parse(&path, text.as_bytes()).map_err(|error| error.to_string())?;
    config.resolve(&path).map_err(|error| error.to_string())
}

#[test]
fn layers_are_found_by_file_and_in_folders_by_their_order_of_names() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for name in [
        "a/overlaybd.sealed",
        "a/overlaybd.commit",
        "b/.commit",
        "c/overlaybd.sealed",
    ] {
        std::fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
        std::fs::write(root.join(name), "").unwrap();
    }
    let digest = "ab".repeat(32);
    let text = format!(
        r#"{{"lowers": [{{"file": "/x/y"}}, {{"dir": "a", "digest": "sha256:{digest}", "size": 7}},
            {{"dir": "b"}}, {{"dir": "c"}}, {{"file": "z", "dir": "a"}}],
            "upper": {{}}, "resultFile": "r", "download": {{"enable": true}}}}"#
    );
    let found = resolve(root, &text).unwrap();
    let expected = [
        PathBuf::from("/x/y"),
        root.join("a/overlaybd.commit"),
        root.join("b/.commit"),
        root.join("c/overlaybd.sealed"),
        root.join("z"),
    ];
    assert_eq!(found.paths(), expected);
    assert_eq!(found.lowers[1].sha256, Some(digest));
    assert_eq!(found.lowers[1].size_bytes, Some(7));
    assert_eq!(
        (found.upper, found.result_file),
        (None, Some(root.join("r")))
    );
}

#[test]
fn an_acceleration_layer_is_no_data() {
    let text = r#"{"lowers": [{"file": "a"}, {"file": "trace"}], "accelerationLayer": true}"#;
    let found = resolve(Path::new("/f"), text).unwrap();
    assert_eq!(found.paths(), [PathBuf::from("/f/a")]);
}

#[test]
fn what_cannot_be_opened_is_refused_with_the_next_step() {
    let cases = [
        ("{", "EOF"),
        (r#"{"lowers": 3}"#, "invalid type"),
        ("{}", "neither lowers nor an upper"),
        (r#"{"lowers": [{}]}"#, "lower 0: it has neither"),
        (
            r#"{"lowers": [{"file": "a"}, {"dir": "gone"}]}"#,
            "lower 1: there is no layer in",
        ),
        (r#"{"upper": {"data": "d"}}"#, "only one of data and index"),
        (r#"{"upper": {"index": "i"}}"#, "only one of data and index"),
        (
            r#"{"lowers": [{"file": "a", "digest": "md5:1"}]}"#,
            "not a sha256 digest",
        ),
        (
            r#"{"lowers": [{"file": "a", "gzipIndex": "g"}]}"#,
            "TurboOCI",
        ),
        (
            r#"{"lowers": [{"file": "a", "targetFile": "g"}]}"#,
            "TurboOCI",
        ),
    ];
    for (text, reason) in cases {
        let error = resolve(Path::new("/f"), text).unwrap_err();
        assert!(error.contains(reason), "{text}: {error}");
    }
    let remote = format!(
        r#"{{"lowers": [{{"digest": "sha256:{}"}}]}}"#,
        "0".repeat(64)
    );
    let error = resolve(Path::new("/f"), &remote).unwrap_err();
    assert!(error.contains("registry only"), "{error}");
}

#[test]
fn a_layer_in_a_registry_goes_where_its_dir_says() {
    let digest = "AB".repeat(32);
    let text = |blobs: &str, size: u64| {
        format!(
            r#"{{"repoBlobUrl": "{blobs}",
                "lowers": [{{"dir": "d", "digest": "sha256:{digest}", "size": {size}}}]}}"#
        )
    };
    let folder = tempfile::tempdir().unwrap();
    let found = resolve(folder.path(), &text("https://r/v2/x/blobs", 7)).unwrap();
    let lower = &found.lowers[0];
    assert_eq!(lower.path, folder.path().join("d/overlaybd.commit"));
    lower.place_stub().unwrap();
    let stub = Stub::read(&lower.path).unwrap();
    assert_eq!(lower.remote.as_ref(), Some(&stub));
    assert_eq!(
        stub.address(),
        format!("https://r/v2/x/blobs/sha256:{}", digest.to_lowercase())
    );
    let again = resolve(folder.path(), &text("", 7)).unwrap();
    assert_eq!(
        (&again.lowers[0].path, &again.lowers[0].remote),
        (&lower.path, &None)
    );
    let elsewhere = Path::new("/f");
    for (blobs, size, reason) in [
        ("", 7, "repoBlobUrl"),
        ("ftp://r", 7, "no http or https"),
        ("https://r", 0, "no size of a layer"),
    ] {
        let error = resolve(elsewhere, &text(blobs, size)).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_written_config_reads_back_and_leaves_blanks_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.v1.json");
    let config = ImageConfig {
        lowers: vec![LowerConfig::of_file("a"), LowerConfig::of_file("b")],
        upper: UpperConfig {
            data: "d".to_owned(),
            index: "i".to_owned(),
        },
        result_file: "r".to_owned(),
        ..ImageConfig::default()
    };
    config.write(&path).unwrap();
    assert_eq!(ImageConfig::read(&path).unwrap(), config);
    let text: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let expected = serde_json::json!({
        "lowers": [{"file": "a"}, {"file": "b"}],
        "upper": {"data": "d", "index": "i"},
        "resultFile": "r",
    });
    assert_eq!(text, expected);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert!(config.write(Path::new("/gone/config.v1.json")).is_err());
}

#[test]
fn a_huge_config_is_not_read() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(MAX_CONFIG_BYTES + 1).unwrap();
    let error = ImageConfig::read(file.path()).unwrap_err().to_string();
    assert!(error.contains("larger than"), "{error}");
}

/// Seeded damage: any text either reads or is refused, and what reads resolves or
/// is refused.
#[test]
fn damaged_configs_never_panic() {
    let whole =
        br#"{"repoBlobUrl":"u","lowers":[{"file":"a","dir":"b","digest":"sha256:00","size":9},
        {"dir":"x"}],"upper":{"data":"d","index":"i"},"resultFile":"r","accelerationLayer":true}"#;
    let mut state = 1_u64;
    let mut random = move |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize % below
    };
    for _ in 0..20_000 {
        let mut text = whole.to_vec();
        for _ in 0..=random(4) {
            let at = random(text.len().max(1));
            if text.is_empty() {
                break;
            }
            match random(4) {
                0 => text[at] = random(256) as u8,
                1 => drop(text.remove(at)),
                2 => text.insert(at, b"{}[]\",:0-e\\"[random(11)]),
                _ => text.truncate(at.max(1)),
            }
        }
        let path = Path::new("/gone/config.v1.json");
        if let Ok(config) = ImageConfig::parse(path, &text) {
            let _ = config.resolve(path);
        }
    }
    let deep = "[".repeat(1 << 20);
    assert!(ImageConfig::parse(Path::new("deep"), deep.as_bytes()).is_err());
}
