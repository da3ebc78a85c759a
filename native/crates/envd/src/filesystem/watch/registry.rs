//! Watches whose events are collected by polling.
//!
//! Invariant: a watcher is in the table until it is removed or nobody asked for its events for
//! [`POLLED_WATCHER_IDLE_MAX`]; the time a paused sandbox sleeps does not count, as its clock stands.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::messages::FilesystemEvent;
use super::watcher::{Budget, Next, Subscription};
use crate::app::lock;
use crate::connect::{Code, ConnectError};
use crate::limits::POLLED_WATCHER_IDLE_MAX;

/// All watches of the program: the limits they share, and the polled ones by name.
pub struct Watchers {
    /// Shared limits.
    pub budget: Budget,
    polled: Mutex<HashMap<String, Arc<Polled>>>,
    next: Mutex<u64>,
}

impl Default for Watchers {
    fn default() -> Self {
        // Names of an earlier run of the program must not mean other watchers now.
        let start = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |time| time.as_micros() as u64);
        Self {
            budget: Budget::default(),
            polled: Mutex::default(),
            next: Mutex::new(start),
        }
    }
}

struct Polled {
    subscription: Mutex<Subscription>,
    last_poll: Mutex<Instant>,
    expiry: Mutex<Option<AbortHandle>>,
}

impl Drop for Polled {
    fn drop(&mut self) {
        if let Some(expiry) = lock(&self.expiry).take() {
            expiry.abort();
        }
    }
}

impl Watchers {
    /// Takes a watch into the table and returns its name.
    pub fn add(self: &Arc<Self>, subscription: Subscription) -> String {
        let id = {
            let mut next = lock(&self.next);
            *next += 1;
            format!("w{:x}", *next)
        };
        let polled = Arc::new(Polled {
            subscription: Mutex::new(subscription),
            last_poll: Mutex::new(Instant::now()),
            expiry: Mutex::new(None),
        });
        let expiry = tokio::spawn(expire(Arc::downgrade(self), id.clone()));
        *lock(&polled.expiry) = Some(expiry.abort_handle());
        lock(&self.polled).insert(id.clone(), polled);
        id
    }

    /// Takes out all events of a watcher, those included that happened right before the call. Once a
    /// failed watch has no more events, its error.
    pub async fn poll(&self, id: &str) -> Result<Vec<FilesystemEvent>, ConnectError> {
        let polled = self.find(id)?;
        *lock(&polled.last_poll) = Instant::now();
        let catch_up = lock(&polled.subscription).catch_up();
        catch_up.run().await?;
        *lock(&polled.last_poll) = Instant::now();
        let mut subscription = lock(&polled.subscription);
        let mut events = Vec::new();
        loop {
            match subscription.try_next() {
                Some(Next::Event(event)) => events.push(event),
                Some(Next::End(Some(error))) if events.is_empty() => return Err(error),
                Some(Next::End(_)) | None => return Ok(events),
            }
        }
    }

    /// Ends a watcher.
    pub fn remove(&self, id: &str) -> Result<(), ConnectError> {
        let removed = lock(&self.polled).remove(id);
        removed.map(drop).ok_or_else(|| not_found(id))
    }

    fn find(&self, id: &str) -> Result<Arc<Polled>, ConnectError> {
        lock(&self.polled)
            .get(id)
            .cloned()
            .ok_or_else(|| not_found(id))
    }
}

fn not_found(id: &str) -> ConnectError {
    let hours = POLLED_WATCHER_IDLE_MAX.as_secs() / 3600;
    ConnectError::new(
        Code::NotFound,
        format_args!("watcher with id '{id}' not found: it was removed, or nobody collected its events for {hours} h; start a new watch"),
    )
}

/// Removes a watcher nobody polls.
async fn expire(table: Weak<Watchers>, id: String) {
    loop {
        let Some(polled) = table.upgrade().and_then(|table| table.find(&id).ok()) else {
            return;
        };
        let due = *lock(&polled.last_poll) + POLLED_WATCHER_IDLE_MAX;
        drop(polled);
        if due > Instant::now() {
            tokio::time::sleep_until(due).await;
            continue;
        }
        if let Some(table) = table.upgrade() {
            // It may have been removed this very moment.
            let _gone = table.remove(&id);
        }
        return;
    }
}
