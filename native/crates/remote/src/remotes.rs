//! Opens stubs: one blob for all stacks that read the same layer.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use lsmt::block_cache::FileKey;
use lsmt::{Blob, Elsewhere};
use parking_lot::Mutex;

use crate::blob::RemoteBlob;
use crate::cache::Cache;
use crate::download::{DownloadOptions, Downloads};
use crate::error::RemoteError;
use crate::http::{Http, HttpOptions};
use crate::logins::{Login, Logins};
use crate::source::Source;
use crate::stub::Stub;

/// What remote layers need of the machine.
#[derive(Debug, Clone)]
pub struct RemoteOptions {
    /// Folder of the block cache.
    pub cache_folder: PathBuf,
    /// Its limit; 0 keeps nothing.
    pub cache_bytes: u64,
    /// Free bytes that cache and downloads leave on the disk.
    pub reserve_bytes: u64,
    /// Files with logins in the form of docker's config, the strongest first.
    pub docker_configs: Vec<PathBuf>,
    /// How to reach registries.
    pub http: HttpOptions,
    /// What is brought here as a whole.
    pub download: DownloadOptions,
}

/// All remote layers of the process.
pub struct Remotes {
    http: Arc<Http>,
    logins: Arc<Logins>,
    cache: Arc<Cache>,
    open: Mutex<HashMap<Stub, Weak<RemoteBlob>>>,
    downloads: Downloads,
}

impl Remotes {
    /// Takes the cache over. Fails when another process has it.
    pub fn new(options: RemoteOptions) -> io::Result<Remotes> {
        Ok(Remotes {
            cache: Arc::new(Cache::open(
                &options.cache_folder,
                options.cache_bytes,
                options.reserve_bytes,
            )?),
            http: Arc::new(Http::new(options.http)),
            logins: Arc::new(Logins::new(options.docker_configs)),
            open: Mutex::default(),
            downloads: Downloads::start(options.download, options.reserve_bytes)?,
        })
    }

    /// The cache of blocks.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Remembers a login for blobs below an address, until the process ends.
    pub fn give_login(&self, blobs_url: &str, login: Login) {
        self.logins.give(blobs_url, login);
    }

    /// The blobs read now.
    pub fn blobs(&self) -> Vec<Arc<RemoteBlob>> {
        self.open
            .lock()
            .values()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// What a stub points to, and its key in the cache of decompressed blocks.
    pub fn blob(&self, stub: &Stub) -> Result<(Arc<RemoteBlob>, FileKey), RemoteError> {
        let fail = |reason: String| RemoteError::Wrong {
            address: stub.address(),
            reason,
        };
        let digest = digest_of(stub).ok_or_else(|| fail("it has no digest".to_owned()))?;
        let key = FileKey::of_digest(&digest);
        let mut open = self.open.lock();
        if let Some(blob) = open.get(stub).and_then(Weak::upgrade) {
            return Ok((blob, key));
        }
        let source = Source::new(self.http.clone(), self.logins.clone(), stub.clone());
        let blob = RemoteBlob::new(source, self.cache.clone(), digest)
            .map_err(|error| fail(error.to_string()))?;
        let blob = Arc::new(blob);
        open.retain(|_, blob| blob.strong_count() > 0);
        open.insert(stub.clone(), Arc::downgrade(&blob));
        Ok((blob, key))
    }
}

fn digest_of(stub: &Stub) -> Option<[u8; 32]> {
    let hex = stub.sha256_hex()?;
    let mut digest = [0; 32];
    for (number, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * number..2 * number + 2], 16).ok()?;
    }
    Some(digest)
}

impl Elsewhere for Remotes {
    fn open(&self, path: &Path, start: &[u8]) -> io::Result<Option<(Arc<dyn Blob>, FileKey)>> {
        if !Stub::is_stub(start) {
            return Ok(None);
        }
        let stub = Stub::read(path)?;
        let (blob, key) = self.blob(&stub)?;
        self.downloads.wish(path, &blob);
        Ok(Some((blob, key)))
    }
}
