//! `config.v1.json`: the file by which overlaybd tools name the layers of an image
//! (overlaybd spec 4.1).
//!
//! Relative paths count from the config's folder. A blob that is only in a registry
//! gets a stub where its `dir` says, which a download replaces later.

use std::io::Write;
use std::path::{Path, PathBuf};

use lsmt::UpperPaths;
use remote::Stub;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Largest config file read.
const MAX_CONFIG_BYTES: u64 = 8 << 20;
/// Names a layer may have in its folder, best first.
const NAMES_IN_DIR: [&str; 3] = ["overlaybd.commit", ".commit", "overlaybd.sealed"];

/// Why a config is of no use.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// It could not be read or written.
    #[error("config {path}: cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The config or its result file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// It is no JSON of the right shape.
    #[error("config {path}: {source}")]
    Json {
        /// The config.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// It says something that cannot be done.
    #[error("config {path}: {reason}")]
    Content {
        /// The config.
        path: PathBuf,
        /// What, and what to do about it.
        reason: String,
    },
}

/// The fields that matter here; others are ignored when read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageConfig {
    /// Prefix of the blobs' addresses.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub repo_blob_url: String,
    /// Layers, bottom first.
    pub lowers: Vec<LowerConfig>,
    /// The writable layer, if both of its paths are set.
    #[serde(skip_serializing_if = "UpperConfig::is_blank")]
    pub upper: UpperConfig,
    /// Where the outcome of opening goes.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub result_file: String,
    /// The last of the lowers is a trace, not data.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub acceleration_layer: bool,
}

/// One layer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LowerConfig {
    /// Its file.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub file: String,
    /// The folder where its file is or will be.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub dir: String,
    /// `sha256:` and the digest of its file.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub digest: String,
    /// Size of its file, bytes; 0 when unknown.
    #[serde(skip_serializing_if = "is_zero")]
    pub size: u64,
    /// TurboOCI, which is not supported.
    #[serde(skip_serializing)]
    target_file: String,
    #[serde(skip_serializing)]
    target_digest: String,
    #[serde(skip_serializing)]
    gzip_index: String,
}

/// The two files of the writable layer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpperConfig {
    /// Data file.
    pub data: String,
    /// Index file.
    pub index: String,
}

impl UpperConfig {
    fn is_blank(&self) -> bool {
        self.data.is_empty() && self.index.is_empty()
    }
}

fn is_zero(size_bytes: &u64) -> bool {
    *size_bytes == 0
}

/// A config whose files are found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// Layers, bottom first, with what the config says about their files.
    pub lowers: Vec<ResolvedLower>,
    /// The writable layer.
    pub upper: Option<UpperPaths>,
    /// Where the outcome of opening goes.
    pub result_file: Option<PathBuf>,
}

/// A layer whose file is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedLower {
    /// The file.
    pub path: PathBuf,
    /// Its digest, hex, if stated.
    pub sha256: Option<String>,
    /// Its size, if stated.
    pub size_bytes: Option<u64>,
    /// Where its bytes are, if there is no file yet.
    pub remote: Option<Stub>,
}

impl ResolvedLower {
    /// Puts a stub where the layer will be, if it is in a registry.
    pub fn place_stub(&self) -> Result<(), ConfigError> {
        let Some(stub) = &self.remote else {
            return Ok(());
        };
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let written = std::fs::create_dir_all(folder).and_then(|()| stub.write(&self.path));
        written.map_err(|source| ConfigError::Io {
            action: "write",
            path: self.path.clone(),
            source,
        })
    }
}

impl Resolved {
    /// Files of the layers, bottom first.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.lowers.iter().map(|lower| lower.path.clone()).collect()
    }
}

impl ImageConfig {
    /// Reads a config file.
    pub fn read(path: &Path) -> Result<ImageConfig, ConfigError> {
        let failed = |source| ConfigError::Io {
            action: "read",
            path: path.to_owned(),
            source,
        };
        if std::fs::metadata(path).map_err(failed)?.len() > MAX_CONFIG_BYTES {
            let reason = format!("larger than {MAX_CONFIG_BYTES} bytes");
            return Err(content(path, reason));
        }
        ImageConfig::parse(path, &std::fs::read(path).map_err(failed)?)
    }

    /// Reads a config; `path` is used in messages only.
    pub fn parse(path: &Path, text: &[u8]) -> Result<ImageConfig, ConfigError> {
        serde_json::from_slice(text).map_err(|source| ConfigError::Json {
            path: path.to_owned(),
            source,
        })
    }

    /// Writes a config file; an older one stays until the new one is complete.
    pub fn write(&self, path: &Path) -> Result<(), ConfigError> {
        let json = |source| ConfigError::Json {
            path: path.to_owned(),
            source,
        };
        let mut text = serde_json::to_vec_pretty(self).map_err(json)?;
        text.push(b'\n');
        replace_file(path, &text)
    }

    /// Finds the files of a config that is at `path`.
    pub fn resolve(&self, path: &Path) -> Result<Resolved, ConfigError> {
        let folder = path.parent().unwrap_or(Path::new("."));
        let layers = match self.lowers.split_last() {
            Some((_, layers)) if self.acceleration_layer => layers,
            _ => &self.lowers[..],
        };
        let upper = &self.upper;
        if upper.data.is_empty() != upper.index.is_empty() {
            let reason = "the upper has only one of data and index; set both, or none".to_owned();
            return Err(content(path, reason));
        }
        let upper = (!upper.is_blank()).then(|| UpperPaths {
            data: folder.join(&upper.data),
            index: folder.join(&upper.index),
        });
        if layers.is_empty() && upper.is_none() {
            let reason = "it names neither lowers nor an upper".to_owned();
            return Err(content(path, reason));
        }
        let found: Result<Vec<_>, _> = (layers.iter().enumerate())
            .map(|(number, lower)| {
                let found = lower.resolve(folder, &self.repo_blob_url);
                found.map_err(|reason| (number, reason))
            })
            .collect();
        let lowers =
            found.map_err(|(number, reason)| content(path, format!("lower {number}: {reason}")))?;
        let result = &self.result_file;
        Ok(Resolved {
            lowers,
            upper,
            result_file: (!result.is_empty()).then(|| folder.join(result)),
        })
    }
}

impl LowerConfig {
    /// The layer in a file.
    pub fn of_file(path: &str) -> LowerConfig {
        LowerConfig {
            file: path.to_owned(),
            ..LowerConfig::default()
        }
    }

    fn resolve(&self, folder: &Path, blobs_url: &str) -> Result<ResolvedLower, String> {
        let turbo = [&self.target_file, &self.target_digest, &self.gzip_index];
        if turbo.iter().any(|field| !field.is_empty()) {
            return Err("TurboOCI layers are not supported; convert the image to overlaybd".into());
        }
        let sha256 = match self.digest.strip_prefix("sha256:") {
            Some(hex) if hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
                Some(hex.to_lowercase())
            }
            None if self.digest.is_empty() => None,
            _ => return Err(format!("{:?} is not a sha256 digest", self.digest)),
        };
        let (path, remote) = match self.find(folder)? {
            Some(path) => (path, None),
            None => {
                let place = folder.join(&self.dir).join(NAMES_IN_DIR[0]);
                (place, Some(self.stub(blobs_url)?))
            }
        };
        Ok(ResolvedLower {
            path,
            sha256,
            size_bytes: (self.size > 0).then_some(self.size),
            remote,
        })
    }

    /// Its file; `None` when it is to be read from a registry.
    fn find(&self, folder: &Path) -> Result<Option<PathBuf>, String> {
        if !self.file.is_empty() {
            return Ok(Some(folder.join(&self.file)));
        }
        if self.dir.is_empty() {
            return Err(match self.digest.as_str() {
                "" => "it has neither file nor dir nor digest".to_owned(),
                digest => format!("{digest} is in a registry only; name a dir to keep it in"),
            });
        }
        let mut named = NAMES_IN_DIR
            .map(|name| folder.join(&self.dir).join(name))
            .into_iter();
        Ok(named.find(|path| path.is_file()))
    }

    fn stub(&self, blobs_url: &str) -> Result<Stub, String> {
        if self.digest.is_empty() || blobs_url.is_empty() {
            return Err(format!(
                "there is no layer in {}; download it, or state repoBlobUrl, digest and size",
                self.dir
            ));
        }
        let stub = Stub {
            blobs_url: blobs_url.to_owned(),
            digest: self.digest.to_lowercase(),
            size_bytes: self.size,
            check_certificate: true,
        };
        stub.check().map(|()| stub)
    }
}

/// Tells the outcome of opening to the one who wrote the config.
pub fn write_result(path: &Path, failure: Option<&str>) -> Result<(), ConfigError> {
    let text = match failure {
        None => "success".to_owned(),
        Some(message) => format!("failed:{message}"),
    };
    replace_file(path, text.as_bytes())
}

fn replace_file(path: &Path, text: &[u8]) -> Result<(), ConfigError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let temporary = PathBuf::from(name);
    let write = || {
        let mut file = std::fs::File::create(&temporary)?;
        file.write_all(text)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    };
    write().map_err(|source| {
        // Best effort: the next writer overwrites it.
        let _ = std::fs::remove_file(&temporary);
        ConfigError::Io {
            action: "write",
            path: path.to_owned(),
            source,
        }
    })
}

fn content(path: &Path, reason: String) -> ConfigError {
    ConfigError::Content {
        path: path.to_owned(),
        reason,
    }
}

#[cfg(test)]
mod tests;
