//! A registry that misbehaves, on loopback, and what reading from it must come to.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lsmt::{Blob, Elsewhere};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use crate::cache::{hex, Cache};
use crate::download::DownloadOptions;
use crate::http::{Http, HttpOptions};
use crate::logins::{Login, Logins};
use crate::remotes::{RemoteOptions, Remotes};
use crate::source::Source;
use crate::{RemoteError, Stub};

const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, Clone)]
struct Asked {
    path: String,
    headers: HashMap<String, String>,
}

impl Asked {
    fn range(&self) -> (usize, usize) {
        let text = self.headers["range"].strip_prefix("bytes=").unwrap();
        let (start, end) = text.split_once('-').unwrap();
        (start.parse().unwrap(), end.parse::<usize>().unwrap() + 1)
    }
}

type Answer = dyn Fn(&Asked, usize) -> Vec<u8> + Send + Sync;

/// A server whose answers are raw bytes; each connection takes one request.
struct Server {
    address: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    fn start(answer: impl Fn(&Asked, usize) -> Vec<u8> + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let (answer, seen): (Arc<Answer>, _) = (Arc::new(answer), asked.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, seen) = (answer.clone(), seen.clone());
                std::thread::spawn(move || serve(stream.unwrap(), &*answer, &seen));
            }
        });
        Server { address, asked }
    }

    fn stub(&self, content: &[u8]) -> Stub {
        Stub {
            blobs_url: format!("http://{}/v2/x/blobs", self.address),
            digest: format!("sha256:{}", hex(&Sha256::digest(content))),
            size_bytes: content.len() as u64,
            check_certificate: true,
        }
    }

    fn count(&self) -> usize {
        self.asked.lock().len()
    }
}

fn serve(mut stream: TcpStream, answer: &Answer, seen: &Mutex<Vec<Asked>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let Some(Ok(first)) = lines.next() else {
        return;
    };
    let mut headers = HashMap::new();
    for line in lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
    {
        let (name, value) = line.split_once(':').unwrap();
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let path = first.split(' ').nth(1).unwrap().to_owned();
    let request = Asked { path, headers };
    let number = {
        let mut seen = seen.lock();
        seen.push(request.clone());
        seen.len() - 1
    };
    // The client may have gone away, which is its right.
    let _ = stream.write_all(&answer(&request, number));
}

fn reply(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("HTTP/1.1 {status} X\r\nconnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "content-length") {
        text.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    let mut bytes = format!("{text}\r\n").into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// A right answer.
fn part(asked: &Asked, content: &[u8]) -> Vec<u8> {
    let (start, end) = asked.range();
    let range = format!("bytes {start}-{}/{}", end - 1, content.len());
    reply(206, &[("content-range", &range)], &content[start..end])
}

fn content(length: usize) -> Vec<u8> {
    let mut state = 7_u32;
    let bytes = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    bytes.take(length).collect()
}

fn http() -> Arc<Http> {
    Arc::new(Http::new(HttpOptions {
        connections: 4,
        certs_dir: None,
    }))
}

fn source(stub: Stub, login: Option<(&str, &str)>) -> Source {
    let logins = Logins::default();
    if let Some((username, password)) = login {
        let (username, password) = (username.to_owned(), password.to_owned());
        logins.give(&stub.blobs_url, Login { username, password });
    }
    Source::new(http(), Arc::new(logins), stub)
}

fn remotes(folder: &std::path::Path, cache_bytes: u64) -> Remotes {
    downloading(folder, cache_bytes, 0)
}

fn downloading(folder: &std::path::Path, cache_bytes: u64, bytes_per_s: u64) -> Remotes {
    Remotes::new(RemoteOptions {
        cache_folder: folder.to_owned(),
        cache_bytes,
        reserve_bytes: 0,
        docker_configs: Vec::new(),
        http: HttpOptions {
            connections: 4,
            certs_dir: None,
        },
        download: DownloadOptions {
            bytes_per_s,
            delay: Duration::from_millis(10),
        },
    })
    .unwrap()
}

#[test]
fn passing_faults_are_tried_again() {
    let data = content(100_000);
    let faults: Vec<(&str, Box<Answer>)> = vec![
        ("reset", Box::new(|_, _| Vec::new())),
        ("500", Box::new(|_, _| reply(500, &[], b"no"))),
        (
            "503",
            Box::new(|_, _| reply(503, &[("retry-after", "0")], b"")),
        ),
        (
            "429",
            Box::new(|_, _| reply(429, &[("retry-after", "0")], b"")),
        ),
        (
            "half a head",
            Box::new(|_, _| b"HTTP/1.1 206 X\r\ncontent-le".to_vec()),
        ),
        ("garbage", Box::new(|_, _| b"SSH-2.0-x\r\n\r\n".to_vec())),
        (
            "short body",
            Box::new(|asked: &Asked, _| {
                let (start, end) = asked.range();
                let range = format!("bytes {start}-{}/100000", end - 1);
                let length = (end - start).to_string();
                reply(
                    206,
                    &[("content-range", &range), ("content-length", &length)],
                    b"abc",
                )
            }),
        ),
    ];
    for (name, fault) in faults {
        let right = data.clone();
        let server = Server::start(move |asked, number| match number {
            0 | 1 => fault(asked, number),
            _ => part(asked, &right),
        });
        let bytes = source(server.stub(&data), None).read(5_000..70_000, Duration::from_secs(20));
        assert_eq!(bytes.expect(name), data[5_000..70_000], "{name}");
        assert_eq!(server.count(), 3, "{name}");
    }
}

#[test]
fn wrong_answers_are_refused_at_once() {
    let data = content(100_000);
    let wrong: Vec<(&str, Box<Answer>)> = vec![
        (
            "another range",
            Box::new(|_, _| reply(206, &[("content-range", "bytes 0-9/100000")], &[0; 10])),
        ),
        (
            "another size",
            Box::new(|_, _| reply(206, &[("content-range", "bytes 10-19/99999")], &[0; 10])),
        ),
        ("no range", Box::new(|_, _| reply(206, &[], &[0; 10]))),
        (
            "too much",
            Box::new(|_, _| reply(206, &[("content-range", "bytes 10-19/100000")], &[0; 11])),
        ),
        (
            "compressed",
            Box::new(|_, _| {
                reply(
                    206,
                    &[
                        ("content-range", "bytes 10-19/100000"),
                        ("content-encoding", "gzip"),
                    ],
                    &[0; 10],
                )
            }),
        ),
        (
            "416",
            Box::new(|_, _| reply(416, &[("content-range", "bytes */5")], b"")),
        ),
        (
            "whole of another size",
            Box::new(|_, _| reply(200, &[], &[0; 77])),
        ),
        ("418", Box::new(|_, _| reply(418, &[], b""))),
        ("redirect to nowhere", Box::new(|_, _| reply(307, &[], b""))),
        (
            "redirect to a file",
            Box::new(|_, _| reply(307, &[("location", "file:///etc/passwd")], b"")),
        ),
        (
            "redirect loop",
            Box::new(|_, _| reply(302, &[("location", "/loop")], b"")),
        ),
    ];
    for (name, answer) in wrong {
        let server = Server::start(answer);
        let error = source(server.stub(&data), None)
            .read(10..20, PATIENCE)
            .unwrap_err();
        assert!(
            matches!(error, RemoteError::Wrong { .. }),
            "{name}: {error}"
        );
        assert!(server.count() <= 8, "{name}");
    }
    for (status, denied) in [(404, false), (410, false), (403, true), (401, true)] {
        let server = Server::start(move |_, _| reply(status, &[], b""));
        let error = source(server.stub(&data), None)
            .read(10..20, PATIENCE)
            .unwrap_err();
        assert_eq!(
            matches!(error, RemoteError::Denied { .. }),
            denied,
            "{error}"
        );
        assert_eq!(
            matches!(error, RemoteError::Missing { .. }),
            !denied,
            "{error}"
        );
        assert_eq!(server.count(), 1, "{status}");
    }
}

#[test]
fn a_server_without_ranges_is_read_all_the_same() {
    let data = content(300_000);
    let whole = data.clone();
    let server = Server::start(move |_, _| reply(200, &[], &whole));
    let source = source(server.stub(&data), None);
    for range in [0..10_u64, 123_456..234_567, 299_999..300_000, 0..300_000] {
        let (from, to) = (range.start as usize, range.end as usize);
        assert_eq!(source.read(range, PATIENCE).unwrap(), data[from..to]);
    }
}

#[test]
fn patience_ends_and_says_what_was_met() {
    let server = Server::start(|_, _| reply(503, &[], b""));
    let started = Instant::now();
    let error = source(server.stub(b"abc"), None)
        .read(0..3, Duration::from_millis(700))
        .unwrap_err();
    assert!(
        matches!(error, RemoteError::Unavailable { tries: 2.., .. }),
        "{error}"
    );
    assert!(error.to_string().contains("503"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(3));
    // A pause beyond our patience is not slept through.
    let server = Server::start(|_, _| reply(429, &[("retry-after", "3600")], b""));
    let started = Instant::now();
    assert!(source(server.stub(b"abc"), None)
        .read(0..3, PATIENCE)
        .is_err());
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[test]
fn tokens_are_fetched_used_and_renewed() {
    let data = content(1000);
    let right = data.clone();
    let tokens = Arc::new(AtomicUsize::new(0));
    let made = tokens.clone();
    let address: Arc<Mutex<String>> = Arc::default();
    let own = address.clone();
    // Each token is good for two reads.
    let uses = AtomicUsize::new(0);
    let server = Server::start(move |asked, _| {
        if asked
            .path
            .starts_with("/token?service=a%20b&scope=repository:x:pull")
        {
            assert_eq!(asked.headers["authorization"], "Basic dTpwOnE=");
            let number = made.fetch_add(1, Ordering::SeqCst);
            uses.store(0, Ordering::SeqCst);
            return reply(
                200,
                &[],
                format!(r#"{{"token": "t{number}", "expires_in": 300}}"#).as_bytes(),
            );
        }
        let current = format!("Bearer t{}", made.load(Ordering::SeqCst).wrapping_sub(1));
        let is_good = asked.headers.get("authorization") == Some(&current);
        if is_good && uses.fetch_add(1, Ordering::SeqCst) < 2 {
            return part(asked, &right);
        }
        let challenge = format!(
            r#"Bearer realm="http://{}/token",service="a b",scope="repository:x:pull""#,
            own.lock()
        );
        reply(401, &[("www-authenticate", &challenge)], b"")
    });
    *address.lock() = server.address.clone();
    let source = source(server.stub(&data), Some(("u", "p:q")));
    for _ in 0..5 {
        assert_eq!(source.read(0..1000, PATIENCE).unwrap(), data);
    }
    assert_eq!(tokens.load(Ordering::SeqCst), 3);
}

#[test]
fn a_secret_goes_to_the_registry_alone() {
    let data = content(1000);
    let (right, seen_by_store) = (data.clone(), Arc::new(AtomicUsize::new(0)));
    let uses = seen_by_store.clone();
    // A signed address is good for one read.
    let store = Server::start(move |asked, _| {
        assert!(!asked.headers.contains_key("authorization"), "{asked:?}");
        match uses.fetch_add(1, Ordering::SeqCst) {
            1 => reply(403, &[], b"expired"),
            _ => part(asked, &right),
        }
    });
    let target = store.address.clone();
    let registry = Server::start(move |asked, _| match asked.headers.get("authorization") {
        Some(value) if value == "Basic dTpw" => reply(
            307,
            &[("location", &format!("http://{target}/signed"))],
            b"",
        ),
        _ => reply(401, &[("www-authenticate", "Basic realm=x")], b""),
    });
    let with_login = source(registry.stub(&data), Some(("u", "p")));
    for _ in 0..3 {
        assert_eq!(with_login.read(0..1000, PATIENCE).unwrap(), data);
    }
    // 401, 307; then straight to the store, which refuses; 307 again; then straight.
    assert_eq!(registry.count(), 3);
    assert_eq!(store.count(), 4);
    let error = source(registry.stub(&data), None)
        .read(0..9, PATIENCE)
        .unwrap_err();
    assert!(matches!(error, RemoteError::Denied { .. }), "{error}");
}

#[test]
fn many_readers_of_a_block_ask_once() {
    let data = content(1_000_000);
    let right = data.clone();
    let server = Server::start(move |asked, _| {
        std::thread::sleep(Duration::from_millis(100));
        part(asked, &right)
    });
    let folder = tempfile::tempdir().unwrap();
    for limit in [0, 1 << 30] {
        let remotes = remotes(&folder.path().join(limit.to_string()), limit);
        let blob = remotes.blob(&server.stub(&data)).unwrap().0;
        let before = server.count();
        std::thread::scope(|scope| {
            for reader in 0..16 {
                let (blob, data) = (&blob, &data);
                scope.spawn(move || {
                    let mut bytes = vec![0; 1000];
                    blob.read_exact_at(&mut bytes, 300_000 + reader).unwrap();
                    assert_eq!(bytes, data[300_000 + reader as usize..][..1000]);
                });
            }
        });
        assert_eq!(server.count() - before, 1, "limit {limit}");
    }
}

#[test]
fn reads_are_right_at_every_place_cached_or_not() {
    let data = content(1_300_001);
    let right = data.clone();
    let server = Server::start(move |asked, _| part(asked, &right));
    let folder = tempfile::tempdir().unwrap();
    // The second cache holds three blocks only, so that reading evicts all the time.
    for (name, limit) in [("large", 1 << 30), ("small", 3 << 16), ("none", 0)] {
        let remotes = remotes(&folder.path().join(name), limit);
        let blob = remotes.blob(&server.stub(&data)).unwrap().0;
        let mut state = 3_usize;
        for _ in 0..60 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let start = (state >> 20) % data.len();
            let length = ((state >> 40) % 600_000).min(data.len() - start);
            let mut bytes = vec![0; length];
            blob.read_exact_at(&mut bytes, start as u64).unwrap();
            assert!(
                bytes == data[start..start + length],
                "{name}: {length} bytes at {start}"
            );
        }
        assert!(remotes.cache().stats().used_bytes <= limit, "{name}");
        let mut bytes = [0; 2];
        assert!(blob
            .read_exact_at(&mut bytes, data.len() as u64 - 1)
            .is_err());
    }
}

#[test]
fn a_cache_serves_the_next_process_and_what_rots_is_asked_anew() {
    let data = content(500_000);
    let right = data.clone();
    let server = Server::start(move |asked, _| part(asked, &right));
    let folder = tempfile::tempdir().unwrap();
    let read_all = |remotes: &Remotes| {
        let blob = remotes.blob(&server.stub(&data)).unwrap().0;
        let mut bytes = vec![0; data.len()];
        blob.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == data);
        blob.fetched_bytes()
    };
    let first = remotes(folder.path(), 1 << 30);
    assert_eq!(read_all(&first), 500_000);
    assert!(
        Cache::open(folder.path(), 1, 0).is_err(),
        "two processes share the folder"
    );
    drop(first);
    let second = remotes(folder.path(), 1 << 30);
    assert_eq!(read_all(&second), 0);
    let file = folder
        .path()
        .join(format!("{}.data", hex(&Sha256::digest(&data))));
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[70_000] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    assert_eq!(read_all(&second), 262_144);
    assert_eq!(second.cache().stats().damaged_blocks, 1);
    assert_eq!(read_all(&second), 0, "the good copy was kept");
}

#[test]
fn a_failed_fetch_leaves_nobody_waiting() {
    let server = Server::start(|_, number| match number {
        0 => reply(404, &[], b""),
        _ => reply(206, &[("content-range", "bytes 0-2/3")], b"abc"),
    });
    let folder = tempfile::tempdir().unwrap();
    let remotes = remotes(folder.path(), 1 << 20);
    let blob = remotes.blob(&server.stub(b"abc")).unwrap().0;
    let mut bytes = [0; 3];
    let error = blob.read_exact_at(&mut bytes, 0).unwrap_err();
    assert!(
        matches!(RemoteError::of(&error), Some(RemoteError::Missing { .. })),
        "{error}"
    );
    blob.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"abc");
}

#[test]
fn connections_are_bounded_for_each_server_by_itself() {
    let (busy, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let data = content(3_000_000);
    let (right, now, top) = (data.clone(), busy.clone(), most.clone());
    let slow = Server::start(move |asked, _| {
        top.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(1500));
        now.fetch_sub(1, Ordering::SeqCst);
        part(asked, &right)
    });
    let right = data.clone();
    let quick = Server::start(move |asked, _| part(asked, &right));
    let http = http();
    let source = |server: &Server| Source::new(http.clone(), Arc::default(), server.stub(&data));
    let (slow, quick) = (source(&slow), source(&quick));
    std::thread::scope(|scope| {
        for reader in 0..8_u64 {
            let slow = &slow;
            scope.spawn(move || {
                slow.read(reader..reader + 1, Duration::from_secs(20))
                    .unwrap()
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        let started = Instant::now();
        quick.read(0..1, PATIENCE).unwrap();
        assert!(
            started.elapsed() < Duration::from_millis(1300),
            "{:?}",
            started.elapsed()
        );
    });
    assert_eq!(most.load(Ordering::SeqCst), 4);
}

#[test]
fn stubs_are_read_back_and_bad_ones_name_the_fault() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let stub = Server::start(|_, _| Vec::new()).stub(b"abc");
    stub.write(&path).unwrap();
    assert_eq!(Stub::read(&path).unwrap(), stub);
    let text = std::fs::read_to_string(&path).unwrap();
    for (from, to) in [
        ("sha256:", "md5:"),
        ("http:", "ftp:"),
        ("\"size_bytes\":3", "\"size_bytes\":0"),
        ("\"size_bytes\":3", "\"size_bytes\":9999999999999999"),
        ("layer 1", "layer 2"),
        ("}", ""),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
        assert!(
            matches!(Stub::read(&path), Err(RemoteError::Stub { .. })),
            "{to}"
        );
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn open_stub(remotes: &Remotes, path: &std::path::Path) -> Arc<dyn Blob> {
    let start = std::fs::read(path).unwrap();
    Elsewhere::open(remotes, path, &start).unwrap().unwrap().0
}

#[test]
fn a_download_takes_the_stubs_place_and_readers_go_on() {
    let data = content(9_000_000);
    let right = data.clone();
    let server = Server::start(move |asked, number| match number {
        3 => Vec::new(),
        _ => part(asked, &right),
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer.lsmt");
    server.stub(&data).write(&path).unwrap();
    let remotes = downloading(&folder.path().join("cache"), 1 << 30, 100 << 20);
    let blob = open_stub(&remotes, &path);
    let mut bytes = vec![0; 1000];
    blob.read_exact_at(&mut bytes, 5_000_000).unwrap();
    wait_until("the layer is local", || !blob.may_wait());
    assert!(std::fs::read(&path).unwrap() == data);
    let before = server.count();
    blob.read_exact_at(&mut bytes, 8_000_000).unwrap();
    assert_eq!(bytes, data[8_000_000..][..1000]);
    assert_eq!(server.count(), before);
    assert_eq!(remotes.cache().stats().used_bytes, 0, "kept once only");
}

#[test]
fn a_download_of_wrong_bytes_is_thrown_away() {
    let data = content(500_000);
    let mut spoilt = data.clone();
    spoilt[400_000] ^= 1;
    let server = Server::start(move |asked, _| part(asked, &spoilt));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer.lsmt");
    server.stub(&data).write(&path).unwrap();
    let stub = std::fs::read(&path).unwrap();
    let remotes = downloading(&folder.path().join("cache"), 1 << 30, 100 << 20);
    let blob = open_stub(&remotes, &path);
    wait_until("all was read", || server.count() >= 1);
    std::thread::sleep(Duration::from_millis(200));
    assert!(blob.may_wait());
    assert_eq!(std::fs::read(&path).unwrap(), stub);
    assert!(!folder.path().join("layer.lsmt.download").exists());
}

#[test]
fn a_download_keeps_to_its_rate_and_ends_with_its_readers() {
    let data = content(1_000_000);
    let right = data.clone();
    let server = Server::start(move |asked, _| part(asked, &right));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer.lsmt");
    server.stub(&data).write(&path).unwrap();
    let remotes = downloading(&folder.path().join("cache"), 0, 1_000_000);
    let blob = open_stub(&remotes, &path);
    let started = Instant::now();
    wait_until("the layer is local", || !blob.may_wait());
    assert!(
        started.elapsed() > Duration::from_millis(900),
        "{:?}",
        started.elapsed()
    );
    let other = folder.path().join("other.lsmt");
    server.stub(&data).write(&other).unwrap();
    drop(blob);
    let before = server.count();
    drop(open_stub(&remotes, &other));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(server.count(), before, "nobody reads it");
}
