//! Metadata of uploads: `X-Metadata-<key>` headers kept as extended attributes `user.e2b.<key>`
//! (contract section 3.2).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;

use hyper::{HeaderMap, StatusCode};
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::http::RestError;
use crate::limits::{METADATA_KEY_MAX_BYTES, METADATA_TOTAL_MAX_BYTES};

const HEADER_PREFIX: &str = "x-metadata-";
const ATTRIBUTE_PREFIX: &str = "user.e2b.";

/// Metadata of a request.
pub fn from_headers(headers: &HeaderMap) -> Result<BTreeMap<String, String>, RestError> {
    let bad = |message: String| RestError::new(StatusCode::BAD_REQUEST, message);
    let mut all = BTreeMap::new();
    let mut total_bytes = 0;
    for (name, value) in headers {
        let Some(key) = name
            .as_str()
            .strip_prefix(HEADER_PREFIX)
            .filter(|key| !key.is_empty())
        else {
            continue;
        };
        if key.len() > METADATA_KEY_MAX_BYTES {
            return Err(bad(format!(
                "metadata key '{key}' is longer than {METADATA_KEY_MAX_BYTES} bytes"
            )));
        }
        let text = value
            .to_str()
            .ok()
            .filter(|text| text.bytes().all(|byte| (0x20..0x7f).contains(&byte)));
        let text = text.ok_or_else(|| bad(format!("metadata '{key}' must be printable ASCII")))?;
        total_bytes += key.len() + text.len();
        all.insert(key.to_owned(), text.to_owned());
    }
    if total_bytes > METADATA_TOTAL_MAX_BYTES {
        return Err(bad(format!(
            "metadata of {total_bytes} bytes is above the limit of {METADATA_TOTAL_MAX_BYTES}"
        )));
    }
    Ok(all)
}

/// Replaces all metadata of a file. Metadata that does not fit is `E2BIG`: the kernel says "no space" of
/// an inode that has none left for attributes, on a disk with plenty.
pub fn write(file: &File, metadata: &BTreeMap<String, String>) -> io::Result<()> {
    let names = list(|buffer| rustix::fs::flistxattr(file, buffer));
    for name in names
        .iter()
        .filter_map(|name| name.strip_prefix(ATTRIBUTE_PREFIX))
        .filter(|key| !metadata.contains_key(*key))
    {
        rustix::fs::fremovexattr(file, format!("{ATTRIBUTE_PREFIX}{name}"))?;
    }
    for (key, value) in metadata {
        let name = format!("{ATTRIBUTE_PREFIX}{key}");
        match rustix::fs::fsetxattr(file, name, value.as_bytes(), XattrFlags::empty()) {
            Err(Errno::NOSPC) => return Err(Errno::TOOBIG.into()),
            other => other?,
        }
    }
    Ok(())
}

/// Metadata of a file; empty where there is none or the file system has no attributes.
pub fn read(path: &Path) -> BTreeMap<String, String> {
    let names = list(|buffer| rustix::fs::llistxattr(path, buffer));
    let mut value = vec![0u8; METADATA_TOTAL_MAX_BYTES];
    names
        .iter()
        .filter_map(|name| {
            let key = name.strip_prefix(ATTRIBUTE_PREFIX)?;
            let length = rustix::fs::lgetxattr(path, name.as_str(), &mut value[..]).ok()?;
            Some((
                key.to_owned(),
                String::from_utf8_lossy(&value[..length]).into_owned(),
            ))
        })
        .collect()
}

fn list(read: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> Vec<String> {
    let mut names = [0u8; 512];
    let text = match read(&mut names) {
        Ok(length) => names[..length].to_vec(),
        // The kernel's own limit on a list of names.
        Err(Errno::RANGE) => {
            let mut names = vec![0u8; 64 * 1024];
            let length = read(&mut names).unwrap_or(0);
            names.truncate(length);
            names
        }
        Err(_) => return Vec::new(),
    };
    text.split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect()
}
