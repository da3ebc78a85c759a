use proptest::prelude::*;

use super::*;

fn record(path: &str, type_flag: u8, size: u64) -> Vec<u8> {
    let mut record = vec![0; RECORD_BYTES];
    record[..path.len()].copy_from_slice(path.as_bytes());
    record[100..107].copy_from_slice(b"0000644");
    record[108..115].copy_from_slice(b"0000000");
    record[116..123].copy_from_slice(b"0000000");
    record[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    record[136..147].copy_from_slice(b"00000000001");
    record[156] = type_flag;
    record[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut record);
    record
}

fn seal(record: &mut [u8]) {
    record[148..156].fill(b' ');
    let sum: u32 = record.iter().map(|byte| u32::from(*byte)).sum();
    record[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
}

fn padded(content: &[u8]) -> Vec<u8> {
    let mut content = content.to_vec();
    content.resize(content.len().next_multiple_of(RECORD_BYTES), 0);
    content
}

fn pax(records: &[(&str, &str)]) -> Vec<u8> {
    let mut content = String::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (1..=4)
            .map(|digits| rest + digits)
            .find(|length| length.to_string().len() + rest == *length);
        content.push_str(&format!("{} {key}={value}\n", length.unwrap()));
    }
    [
        record("pax", b'x', content.len() as u64),
        padded(content.as_bytes()),
    ]
    .concat()
}

fn content_of(archive: &mut Archive<&[u8]>, size: usize) -> Vec<u8> {
    let mut found = vec![0; size];
    let mut buffer = [0; 100];
    while let Some((offset, count)) = archive.read_content(&mut buffer).unwrap() {
        found[offset as usize..offset as usize + count].copy_from_slice(&buffer[..count]);
    }
    found
}

#[test]
fn pax_records_are_stronger_than_the_header() {
    let bytes = [
        pax(&[
            ("path", "a/long/name"),
            ("mtime", "-1.25"),
            ("uid", "4294967294"),
            ("SCHILY.xattr.user.x", "v=1"),
        ]),
        record("short", b'0', 3),
        padded(b"abc"),
        record("next", b'5', 0),
    ]
    .concat();
    let mut archive = Archive::new(bytes.as_slice());
    let first = archive.next_member().unwrap().unwrap();
    assert_eq!(
        (first.path.as_slice(), first.uid),
        (b"a/long/name".as_slice(), 4_294_967_294)
    );
    assert_eq!((first.mtime_s, first.mtime_ns), (-2, 750_000_000));
    assert_eq!(first.xattrs, [(b"user.x".to_vec(), b"v=1".to_vec())]);
    assert_eq!(content_of(&mut archive, 3), b"abc");
    let second = archive.next_member().unwrap().unwrap();
    assert_eq!(
        (second.path.as_slice(), second.kind, second.uid),
        (b"next".as_slice(), MemberKind::Directory, 0)
    );
    assert!(archive.next_member().unwrap().is_none());
}

#[test]
fn sparse_files_of_every_format_read_the_same() {
    let wanted = [&[0; 512][..], &[7; 4], &[0; 508]].concat();
    let map = padded(b"1\n512\n4\n");
    let of_1_0 = [
        pax(&[
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.name", "s"),
            ("GNU.sparse.realsize", "1024"),
        ]),
        record("x", b'0', 516),
        map,
        padded(&[7; 4]),
    ];
    let of_0_1 = [
        pax(&[
            ("GNU.sparse.map", "512,4"),
            ("GNU.sparse.size", "1024"),
            ("GNU.sparse.name", "s"),
        ]),
        record("x", b'0', 4),
        padded(&[7; 4]),
    ];
    let of_0_0 = [
        pax(&[
            ("GNU.sparse.size", "1024"),
            ("GNU.sparse.offset", "512"),
            ("GNU.sparse.numbytes", "4"),
        ]),
        record("s", b'0', 4),
        padded(&[7; 4]),
    ];
    let mut old = record("s", b'S', 4);
    old[386..397].copy_from_slice(b"00000001000");
    old[398..409].copy_from_slice(b"00000000004");
    old[483..494].copy_from_slice(b"00000002000");
    seal(&mut old);
    let of_old = [old, padded(&[7; 4])];
    for bytes in [
        of_1_0.concat(),
        of_0_1.concat(),
        of_0_0.concat(),
        of_old.concat(),
    ] {
        let mut archive = Archive::new(bytes.as_slice());
        let member = archive.next_member().unwrap().unwrap();
        assert_eq!(
            (member.path.as_slice(), member.size_bytes),
            (b"s".as_slice(), 1024)
        );
        assert_eq!(content_of(&mut archive, 1024), wanted);
        assert!(archive.next_member().unwrap().is_none());
    }
}

#[test]
fn what_contradicts_itself_is_refused() {
    let mut wrong_sum = record("a", b'0', 0);
    wrong_sum[0] = b'b';
    let cases = [
        wrong_sum,
        record("a", b'0', 3),
        record("a", b'?', 0),
        record("a", b'x', 2 << 20),
        [pax(&[("size", "x")]), record("a", b'0', 0)].concat(),
        [record("p", b'x', 9), padded(b"9 path=a\0")].concat(),
        [
            pax(&[("GNU.sparse.map", "0,9"), ("GNU.sparse.size", "4")]),
            record("s", b'0', 9),
            padded(&[1; 9]),
        ]
        .concat(),
        [
            pax(&[("GNU.sparse.map", "0,9"), ("GNU.sparse.size", "9")]),
            record("s", b'0', 4),
            padded(&[1; 4]),
        ]
        .concat(),
    ];
    for bytes in cases {
        let mut archive = Archive::new(bytes.as_slice());
        let outcome = archive.next_member().and_then(|_| archive.next_member());
        assert!(
            matches!(outcome, Err(TarError::Malformed(_))),
            "{outcome:?}"
        );
    }
}

#[test]
fn numbers_are_octal_or_binary() {
    use super::header::number;
    assert_eq!(number(b"0000644\0"), Some(0o644));
    assert_eq!(number(b" 644 \0  "), Some(0o644));
    assert_eq!(number(b"\0\0\0\0"), Some(0));
    assert_eq!(number(b"99"), None);
    assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 1, 0]), Some(256));
    assert_eq!(number(&[0xff; 12]), Some(-1));
    assert_eq!(number(&[0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), None);
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..4096), flags in proptest::collection::vec(0usize..8, 8)) {
        for (record, flag) in bytes.chunks_exact_mut(RECORD_BYTES).zip(flags) {
            if flag > 0 {
                record[156] = b"0xgLKS7"[flag - 1];
                record[124..136].copy_from_slice(b"00000000100\0");
                seal(record);
            }
        }
        let mut archive = Archive::new(bytes.as_slice());
        let mut buffer = [0; 64];
        while let Ok(Some(_)) = archive.next_member() {
            while let Ok(Some(_)) = archive.read_content(&mut buffer) {}
        }
    }
}

fn written(members: &[Member]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes);
    for member in members {
        writer.append(member).unwrap();
    }
    writer.finish().unwrap();
    bytes
}

fn member(kind: MemberKind, path: &[u8]) -> Member {
    Member {
        path: path.to_vec(),
        kind,
        link: Vec::new(),
        mode: 0o4755,
        uid: 1,
        gid: 2,
        mtime_s: 3,
        mtime_ns: 0,
        device: (0, 0),
        xattrs: Vec::new(),
        size_bytes: 0,
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read_as_it_was(
        path in proptest::collection::vec(1u8..=255, 1..300),
        link in proptest::collection::vec(1u8..=255, 1..300),
        ids in (0u64..1 << 32, 0u64..1 << 32),
        mtime in (-5_000_000_000i64..50_000_000_000, 0u32..1_000_000_000),
        xattrs in proptest::collection::btree_map("[a-z]{1,9}\\.[ -<>-~]{1,30}", proptest::collection::vec(any::<u8>(), 0..200), 0..4),
        device in (0u32..4096, 0u32..1 << 20),
        kind in 0usize..6,
    ) {
        let kinds = [MemberKind::HardLink, MemberKind::Symlink, MemberKind::Character, MemberKind::Block, MemberKind::Directory, MemberKind::Fifo];
        let kind = kinds[kind];
        let is_device = matches!(kind, MemberKind::Character | MemberKind::Block);
        let wanted = Member {
            uid: ids.0,
            gid: ids.1,
            mtime_s: mtime.0,
            mtime_ns: mtime.1,
            link,
            xattrs: xattrs.into_iter().map(|(name, value)| (name.into_bytes(), value)).collect(),
            device: if is_device { device } else { (0, 0) },
            ..member(kind, &path)
        };
        let bytes = written(&[wanted.clone(), member(MemberKind::Directory, b"after")]);
        let mut archive = Archive::new(bytes.as_slice());
        let found = archive.next_member().unwrap().unwrap();
        prop_assert_eq!(&found.path, &wanted.path);
        prop_assert_eq!(found.kind, wanted.kind);
        prop_assert_eq!(&found.link, &wanted.link);
        prop_assert_eq!((found.mode, found.uid, found.gid), (wanted.mode, wanted.uid, wanted.gid));
        prop_assert_eq!((found.mtime_s, found.mtime_ns), (wanted.mtime_s, wanted.mtime_ns));
        prop_assert_eq!(found.device, wanted.device);
        prop_assert_eq!(&found.xattrs, &wanted.xattrs);
        prop_assert_eq!(archive.next_member().unwrap().unwrap().path, b"after".to_vec());
        prop_assert!(archive.next_member().unwrap().is_none());
    }
}

#[test]
fn holes_are_not_written() {
    let path = std::env::temp_dir().join(format!("tarstream-{}", std::process::id()));
    let content: Vec<u8> = (0..100_000u32).map(|number| number as u8).collect();
    std::fs::write(&path, &content).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let _gone = std::fs::remove_file(&path);
    let maps: [&[(u64, u64)]; 4] = [
        &[(0, 100_000)],
        &[(10, 20), (50_000, 4096)],
        &[(99_999, 1)],
        &[],
    ];
    for map in maps {
        let parts: Vec<Part> = map
            .iter()
            .map(|(offset, length)| Part {
                offset: *offset,
                length: *length,
            })
            .collect();
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes);
        let wanted = Member {
            size_bytes: 100_000,
            ..member(MemberKind::File, &[b'n'; 120])
        };
        writer.append_file(&wanted, &parts, &file).unwrap();
        writer.finish().unwrap();
        assert!(map == [(0, 100_000)] || bytes.len() < 12_000, "{map:?}");
        let mut archive = Archive::new(bytes.as_slice());
        let found = archive.next_member().unwrap().unwrap();
        assert_eq!((&found.path, found.size_bytes), (&wanted.path, 100_000));
        let mut expected = vec![0; 100_000];
        for part in &parts {
            let range = part.offset as usize..(part.offset + part.length) as usize;
            expected[range.clone()].copy_from_slice(&content[range]);
        }
        assert!(content_of(&mut archive, 100_000) == expected, "{map:?}");
        assert!(archive.next_member().unwrap().is_none());
    }
}

#[test]
fn an_attribute_that_no_record_can_hold_is_refused() {
    let odd = Member {
        xattrs: vec![(b"user.a=b".to_vec(), Vec::new())],
        ..member(MemberKind::Directory, b"d")
    };
    assert!(Writer::new(Vec::new()).append(&odd).is_err());
}
