//! The part of a registry that serves blobs, on loopback.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{json, Value};
use sha2::{Digest, Sha256};

/// One blob, served by range to who knows the password.
pub struct Registry {
    pub address: String,
    pub digest: String,
    pub size_bytes: u64,
    pub served_bytes: Arc<AtomicU64>,
    pub is_stuck: Arc<AtomicBool>,
    /// So many of the next replies have a wrong byte.
    pub spoilt_replies: Arc<AtomicU64>,
}

impl Registry {
    pub fn start(blob: Vec<u8>) -> Registry {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let hex = Sha256::digest(&blob);
        let hex: String = hex.iter().map(|byte| format!("{byte:02x}")).collect();
        let registry = Registry {
            address: listener.local_addr().unwrap().to_string(),
            digest: format!("sha256:{hex}"),
            size_bytes: blob.len() as u64,
            served_bytes: Arc::default(),
            is_stuck: Arc::default(),
            spoilt_replies: Arc::default(),
        };
        let blob = Arc::new(blob);
        let (served, is_stuck) = (registry.served_bytes.clone(), registry.is_stuck.clone());
        let spoilt = registry.spoilt_replies.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (blob, served) = (blob.clone(), served.clone());
                let (is_stuck, spoilt) = (is_stuck.clone(), spoilt.clone());
                std::thread::spawn(move || {
                    serve(stream.unwrap(), &blob, &served, &is_stuck, &spoilt);
                });
            }
        });
        registry
    }

    /// Body of `POST /v1/remotes`.
    pub fn layer(&self, output: &std::path::Path, password: Option<&str>) -> Value {
        let login = password.map(|password| json!({"username": "u", "password": password}));
        json!({
            "output": output,
            "blobs_url": format!("http://{}/v2/x/blobs", self.address),
            "digest": self.digest,
            "size_bytes": self.size_bytes,
            "check_certificate": true,
            "login": login,
        })
    }

    pub fn served(&self) -> u64 {
        self.served_bytes.load(Ordering::SeqCst)
    }
}

fn serve(
    stream: TcpStream,
    blob: &[u8],
    served: &AtomicU64,
    is_stuck: &AtomicBool,
    spoilt: &AtomicU64,
) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        while is_stuck.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        // dTpw is "u:p".
        let reply = if head
            .to_ascii_lowercase()
            .contains("authorization: basic dtpw")
        {
            let range = head.split("bytes=").nth(1).unwrap();
            let (start, end) = range.lines().next().unwrap().split_once('-').unwrap();
            let (start, end): (usize, usize) = (start.parse().unwrap(), end.parse().unwrap());
            let mut part = blob[start..=end].to_vec();
            let less = |left: u64| left.checked_sub(1);
            if spoilt
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
                .is_ok()
            {
                let middle = part.len() / 2;
                part[middle] ^= 1;
            }
            served.fetch_add(part.len() as u64, Ordering::SeqCst);
            let (length, total) = (part.len(), blob.len());
            let head = format!(
                "HTTP/1.1 206 X\r\ncontent-range: bytes {start}-{end}/{total}\r\ncontent-length: {length}\r\n\r\n"
            );
            [head.as_bytes(), &part].concat()
        } else {
            let head =
                "HTTP/1.1 401 X\r\nwww-authenticate: Basic realm=x\r\ncontent-length: 0\r\n\r\n";
            head.as_bytes().to_vec()
        };
        if (&stream).write_all(&reply).is_err() {
            return;
        }
    }
}
