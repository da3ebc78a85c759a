//! The file in place of a layer that is in a registry.
//!
//! ```text
//! AgentENV remote layer 1\n
//! {"blobs_url":"https://host/v2/name/blobs","digest":"sha256:<64 hex>","size_bytes":N,"check_certificate":true}\n
//! ```
//!
//! It holds no secret. When the layer has been downloaded, it takes the stub's place.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::address;
use crate::error::RemoteError;

/// Stubs written by this process, for names of unfinished ones.
static WRITES: AtomicU64 = AtomicU64::new(0);
/// How a stub starts; no layer, archive or compressed file does.
pub const MAGIC: &[u8] = b"AgentENV remote layer 1\n";
/// Longest stub.
const MAX_STUB_BYTES: u64 = 16 << 10;
/// Largest layer; bounds the memory that a stated size can cost.
pub const MAX_LAYER_BYTES: u64 = 256 << 30;

/// Where a layer is, and what it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stub {
    /// Prefix of its address (`repoBlobUrl` of overlaybd): `/` and the digest follow.
    pub blobs_url: String,
    /// `sha256:` and 64 hex digits of the whole blob.
    pub digest: String,
    /// Size of the blob.
    pub size_bytes: u64,
    /// Whether the registry must prove who it is.
    #[serde(default = "yes")]
    pub check_certificate: bool,
}

fn yes() -> bool {
    true
}

impl Stub {
    /// Whether a file that starts so is a stub.
    pub fn is_stub(start: &[u8]) -> bool {
        start.starts_with(MAGIC)
    }

    /// Reads and checks a stub.
    pub fn read(path: &Path) -> Result<Stub, RemoteError> {
        let fail = |reason: String| RemoteError::Stub {
            path: path.display().to_string(),
            reason,
        };
        let mut text = Vec::new();
        let mut file = File::open(path)
            .map_err(|error| fail(error.to_string()))?
            .take(MAX_STUB_BYTES);
        file.read_to_end(&mut text)
            .map_err(|error| fail(error.to_string()))?;
        let body = text
            .strip_prefix(MAGIC)
            .ok_or_else(|| fail("it is no stub".to_owned()))?;
        let stub: Stub = serde_json::from_slice(body).map_err(|error| fail(error.to_string()))?;
        stub.check().map_err(fail)?;
        Ok(stub)
    }

    /// Says what is wrong with the fields.
    pub fn check(&self) -> Result<(), String> {
        if self.sha256_hex().is_none() {
            return Err(format!("{:?} is not a sha256 digest", self.digest));
        }
        if self.size_bytes == 0 || self.size_bytes > MAX_LAYER_BYTES {
            let size_bytes = self.size_bytes;
            return Err(format!(
                "{size_bytes} bytes is no size of a layer; the limit is {MAX_LAYER_BYTES}"
            ));
        }
        if address::parse(&self.blobs_url).is_none() {
            return Err(format!("{:?} is no http or https address", self.blobs_url));
        }
        Ok(())
    }

    /// Writes the stub; an older file stays until the new one is complete.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        // Several may write it at once: each what the layer is, and one stays.
        let number = WRITES.fetch_add(1, Ordering::Relaxed);
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}-{number}.new", std::process::id()));
        let temporary = std::path::PathBuf::from(name);
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(MAGIC)?;
            serde_json::to_writer(&mut file, self)?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            std::fs::rename(&temporary, path)
        };
        write().inspect_err(|_| {
            // Best effort: the next writer overwrites it.
            let _ = std::fs::remove_file(&temporary);
        })
    }

    /// Address of the blob.
    pub fn address(&self) -> String {
        format!("{}/{}", self.blobs_url.trim_end_matches('/'), self.digest)
    }

    /// The digest's 64 digits.
    pub fn sha256_hex(&self) -> Option<&str> {
        let hex = self.digest.strip_prefix("sha256:")?;
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        (hex.len() == 64 && hex.bytes().all(is_digit)).then_some(hex)
    }
}
