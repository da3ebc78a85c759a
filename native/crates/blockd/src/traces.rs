//! Reads of the first stack on a remote disk are noted for a while; later stacks have
//! the same parts fetched ahead of the guest.
//!
//! Invariants: one disk is recorded by one stack at a time, and fetched ahead by one; a
//! trace is a hint only, so whatever fails here is logged and costs nothing but time.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use lsmt::recorder::GRANULE_BYTES;
use lsmt::Recorder;
use parking_lot::Mutex;
use remote::trace;

use crate::stacks::Entry;

/// Reads under way for one disk.
const READERS: usize = 8;
/// Granules of one read (1 MiB).
const MAX_RUN: u64 = 16;
/// A disk is not fetched ahead again for this long: its blocks are in the cache.
const REPEAT_TIME: Duration = Duration::from_secs(60);
/// How often a recording looks whether its stack is still open.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Recordings and fetches under way.
pub struct Traces {
    window: Duration,
    busy: Arc<Mutex<HashMap<PathBuf, Instant>>>,
}

impl Traces {
    /// `window` is how long a first stack is recorded; zero does nothing at all.
    pub fn new(window: Duration) -> Traces {
        Traces {
            window,
            busy: Arc::default(),
        }
    }

    /// Records a stack just opened, or fetches ahead what an earlier one read.
    pub fn begin(&self, entry: &Arc<Entry>) {
        if self.window.is_zero() {
            return;
        }
        let Some(layer) = entry.stack.top_remote() else {
            return;
        };
        let path = trace::path_of(&layer);
        {
            let mut busy = self.busy.lock();
            busy.retain(|_, until| *until > Instant::now());
            if busy.contains_key(&path) {
                return;
            }
            busy.insert(path.clone(), Instant::now() + self.window.max(REPEAT_TIME));
        }
        let (window, weak) = (self.window, Arc::downgrade(entry));
        let thread = std::thread::Builder::new().name("trace".to_owned());
        let started = match trace::read(&path) {
            Some(granules) => thread.spawn(move || fetch_ahead(&path, &weak, &granules)),
            None => {
                let recorder = Arc::new(Recorder::default());
                entry.stack.record_reads(Some(recorder.clone()));
                thread.spawn(move || record(&path, &weak, &recorder, window))
            }
        };
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start a thread for a trace");
        }
    }
}

/// Waits for the end of the window, or of the stack, and keeps what was read.
fn record(path: &Path, entry: &Weak<Entry>, recorder: &Recorder, window: Duration) {
    let end = Instant::now() + window;
    while Instant::now() < end && entry.strong_count() > 0 {
        std::thread::sleep(LOOK_INTERVAL.min(window));
    }
    if let Some(entry) = entry.upgrade() {
        entry.stack.record_reads(None);
    }
    let granules = recorder.granules();
    // The sweep may have taken the layer meanwhile: then its trace is of no use.
    if granules.is_empty() || !path.with_extension("lsmt").exists() {
        return;
    }
    match trace::write(path, &granules) {
        Ok(()) => {
            tracing::info!(trace = %path.display(), granules = granules.len(), "reads recorded")
        }
        Err(error) => tracing::warn!(trace = %path.display(), %error, "cannot keep a trace"),
    }
}

fn fetch_ahead(path: &Path, entry: &Weak<Entry>, granules: &[u64]) {
    let runs = trace::runs(granules, MAX_RUN);
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..READERS.min(runs.len()) {
            scope.spawn(|| {
                let mut buffer = vec![0; (MAX_RUN * GRANULE_BYTES) as usize];
                while let Some((start, count)) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // Held for one read only: a close waits for those who hold it.
                    let Some(entry) = entry.upgrade() else {
                        return;
                    };
                    let target = &mut buffer[..(count * GRANULE_BYTES) as usize];
                    if entry.stack.read_at(target, start * GRANULE_BYTES).is_err() {
                        failed.fetch_add(1, Ordering::Relaxed);
                        return;
                    }
                }
            });
        }
    });
    let (failed, took_ms) = (failed.into_inner(), started.elapsed().as_millis() as u64);
    tracing::info!(trace = %path.display(), runs = runs.len(), failed, took_ms, "fetched ahead");
}
