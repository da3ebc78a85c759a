//! Brings remote layers to this machine while they are used, one at a time and at a
//! bounded rate. A layer takes its stub's place when its whole digest was right.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sha2::{Digest, Sha256};

use crate::blob::RemoteBlob;
use crate::cache::hex;
use crate::error::RemoteError;
use crate::source::MAX_RANGE_BYTES;
use crate::stub::Stub;

/// Tries for one layer; those who read it go on without.
const MAX_TRIES: u32 = 5;
/// Pause before another try, longer each time.
const RETRY_PAUSE: Duration = Duration::from_secs(30);

/// How much downloads may take.
#[derive(Debug, Clone, Copy)]
pub struct DownloadOptions {
    /// Bytes in a second, on average; 0 downloads nothing.
    pub bytes_per_s: u64,
    /// How long a layer is in use before its download begins.
    pub delay: Duration,
}

struct Wish {
    blob: Weak<RemoteBlob>,
    due: Instant,
    tries: u32,
}

#[derive(Default)]
struct Wishes {
    by_path: HashMap<PathBuf, Wish>,
    is_closed: bool,
}

/// What is to be downloaded. The thread that does it ends when this is dropped.
pub struct Downloads {
    options: DownloadOptions,
    shared: Arc<(Mutex<Wishes>, Condvar)>,
}

impl Drop for Downloads {
    fn drop(&mut self) {
        self.shared.0.lock().is_closed = true;
        self.shared.1.notify_all();
    }
}

impl Downloads {
    /// Starts the thread, unless nothing is to be downloaded.
    pub fn start(options: DownloadOptions, reserve_bytes: u64) -> io::Result<Downloads> {
        let shared: Arc<(Mutex<Wishes>, Condvar)> = Arc::default();
        let theirs = shared.clone();
        if options.bytes_per_s > 0 {
            let thread = std::thread::Builder::new().name("download".to_owned());
            thread.spawn(move || run(&theirs, options, reserve_bytes))?;
        }
        Ok(Downloads { options, shared })
    }

    /// Asks for the layer in place of the stub at `path`, some time from now.
    pub fn wish(&self, path: &Path, blob: &Arc<RemoteBlob>) {
        if self.options.bytes_per_s == 0 {
            return;
        }
        let due = Instant::now() + self.options.delay;
        let blob = Arc::downgrade(blob);
        let mut wishes = self.shared.0.lock();
        wishes
            .by_path
            .retain(|_, wish| wish.blob.strong_count() > 0);
        let wish = Wish {
            blob,
            due,
            tries: 0,
        };
        wishes.by_path.entry(path.to_owned()).or_insert(wish);
        self.shared.1.notify_all();
    }
}

fn run(shared: &(Mutex<Wishes>, Condvar), options: DownloadOptions, reserve_bytes: u64) {
    while let Some((path, wish)) = next(shared) {
        // Closed meanwhile: nobody needs it.
        let Some(blob) = wish.blob.upgrade() else {
            continue;
        };
        let is_closed = || shared.0.lock().is_closed;
        match has_room(&path, &blob, reserve_bytes)
            .and_then(|()| download(&path, &blob, options.bytes_per_s, &is_closed))
        {
            Ok(()) => tracing::info!(layer = %path.display(), "downloaded"),
            Err(error)
                if RemoteError::of(&error).is_some_and(is_final) || wish.tries + 1 >= MAX_TRIES =>
            {
                tracing::warn!(layer = %path.display(), %error, "not downloaded; it is read from the registry");
            }
            Err(error) => {
                tracing::info!(layer = %path.display(), %error, "the download is tried again later");
                let tries = wish.tries + 1;
                let due = Instant::now() + RETRY_PAUSE * tries;
                let wish = Wish { tries, due, ..wish };
                shared.0.lock().by_path.entry(path).or_insert(wish);
            }
        }
    }
}

fn is_final(error: &RemoteError) -> bool {
    !matches!(error, RemoteError::Unavailable { .. })
}

/// Waits for the next wish that is due; `None` at the end.
fn next(shared: &(Mutex<Wishes>, Condvar)) -> Option<(PathBuf, Wish)> {
    let (wishes, signal) = shared;
    let mut wishes = wishes.lock();
    loop {
        if wishes.is_closed {
            return None;
        }
        let first = wishes.by_path.iter().min_by_key(|(_, wish)| wish.due);
        let Some((path, due)) = first.map(|(path, wish)| (path.clone(), wish.due)) else {
            signal.wait(&mut wishes);
            continue;
        };
        if due <= Instant::now() {
            return wishes.by_path.remove_entry(&path);
        }
        signal.wait_until(&mut wishes, due);
    }
}

/// Downloads a layer beside its stub, and puts it in its place.
fn download(
    path: &Path,
    blob: &Arc<RemoteBlob>,
    bytes_per_s: u64,
    is_closed: &dyn Fn() -> bool,
) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".download");
    let temporary = PathBuf::from(name);
    let result = fetch(&temporary, blob, bytes_per_s, is_closed).and_then(|file| {
        // The sweep may have taken the stub meanwhile.
        if Stub::read(path)? != *blob.source().stub() {
            return Err(io::ErrorKind::NotFound.into());
        }
        std::fs::rename(&temporary, path)?;
        blob.set_local(file)
    });
    if result.is_err() {
        // It may be gone already.
        let _ = std::fs::remove_file(&temporary);
    }
    result
}

fn fetch(
    temporary: &Path,
    blob: &Arc<RemoteBlob>,
    bytes_per_s: u64,
    is_closed: &dyn Fn() -> bool,
) -> io::Result<File> {
    let stub = blob.source().stub();
    let mut file = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(temporary)?;
    let mut digest = Sha256::new();
    let started = Instant::now();
    let mut position = 0;
    while position < stub.size_bytes {
        if is_closed() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let end = stub
            .size_bytes
            .min(position + MAX_RANGE_BYTES.min(bytes_per_s.max(64 << 10)));
        let bytes = blob.read_once(position..end)?;
        digest.update(&bytes);
        file.write_all(&bytes)?;
        position = end;
        let due = Duration::from_secs_f64(position as f64 / bytes_per_s as f64);
        std::thread::sleep(due.saturating_sub(started.elapsed()));
    }
    let found = hex(&digest.finalize());
    if Some(found.as_str()) != stub.sha256_hex() {
        let address = stub.address();
        let reason = format!("what it sent has the digest {found}");
        return Err(RemoteError::Wrong { address, reason }.into());
    }
    file.sync_all()?;
    Ok(file)
}

/// Whether the whole layer fits beside its stub.
fn has_room(path: &Path, blob: &RemoteBlob, reserve_bytes: u64) -> io::Result<()> {
    let wanted_bytes = blob.source().stub().size_bytes;
    let found = nix::sys::statvfs::statvfs(path)?;
    let free_bytes = found
        .blocks_available()
        .saturating_mul(found.fragment_size());
    if free_bytes < wanted_bytes.saturating_add(reserve_bytes) {
        let text = format!("{free_bytes} bytes are free, {wanted_bytes} and a reserve are needed");
        return Err(io::Error::new(io::ErrorKind::StorageFull, text));
    }
    Ok(())
}
