//! One watch at work: a task that moves events from the kernel into a bounded queue, and the client's
//! end of that queue.
//!
//! Invariants: the tracker is used by worker threads only, one at a time; the reason a watch ended is
//! set before its queue closes; dropping the [`Subscription`] ends the watch and frees all it held.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::{Context, Poll};

use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use tokio::sync::{mpsc, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use super::messages::FilesystemEvent;
use super::tracker::{Failure, Progress, Target, Tracker};
use crate::app::lock;
use crate::connect::{Code, ConnectError};
use crate::filesystem::service::as_user;
use crate::limits::{
    WATCHERS_MAX, WATCH_CATCH_UP_BATCHES, WATCH_QUEUED_MAX_BYTES, WATCH_QUEUE_EVENTS_MAX,
};
use crate::sys;
use crate::users::User;

/// What all watches share.
pub struct Budget {
    watchers: Arc<Semaphore>,
    folders: Arc<AtomicUsize>,
    queued_bytes: Arc<AtomicUsize>,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            watchers: Arc::new(Semaphore::new(WATCHERS_MAX)),
            folders: Arc::default(),
            queued_bytes: Arc::default(),
        }
    }
}

/// An event in the queue.
struct Queued {
    event: FilesystemEvent,
    _charge: Charge,
}

/// Memory charged to the shared limit, until dropped.
struct Charge {
    size_bytes: usize,
    used: Arc<AtomicUsize>,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.used.fetch_sub(self.size_bytes, Ordering::Relaxed);
    }
}

struct Active {
    tracker: Tracker,
    sender: mpsc::Sender<Queued>,
    queued_bytes: Arc<AtomicUsize>,
}

impl Active {
    fn send(&self, event: FilesystemEvent) -> Result<(), Failure> {
        let size_bytes = event.size_bytes();
        let before = self.queued_bytes.fetch_add(size_bytes, Ordering::Relaxed);
        let queued = Queued {
            event,
            _charge: Charge {
                size_bytes,
                used: self.queued_bytes.clone(),
            },
        };
        if before + size_bytes > WATCH_QUEUED_MAX_BYTES {
            return Err(Failure::Backlog);
        }
        // A closed queue has nobody to tell.
        match self.sender.try_send(queued) {
            Err(mpsc::error::TrySendError::Full(_)) => Err(Failure::Backlog),
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
        }
    }
}

struct Watcher {
    user: User,
    /// None once the watch is over.
    active: Mutex<Option<Active>>,
    /// How it ended: None for the end of the folder.
    end: OnceLock<Option<ConnectError>>,
    _permit: OwnedSemaphorePermit,
}

enum Step {
    More,
    Idle,
    Over,
}

impl Watcher {
    /// Moves one batch of events into the queue. Worker threads only.
    fn advance(&self) -> Step {
        let mut active = lock(&self.active);
        let Some(watch) = active.as_mut() else {
            return Step::Over;
        };
        let (events, progress) = watch.tracker.advance();
        let sent = events.into_iter().try_for_each(|event| watch.send(event));
        let end = match (sent, progress) {
            (Err(failure), _) | (Ok(()), Progress::Failed(failure)) => Some(failure.error()),
            (Ok(()), Progress::Over) => None,
            (Ok(()), Progress::More) => return Step::More,
            (Ok(()), Progress::Idle) => return Step::Idle,
        };
        // Only set here, under the lock, and once.
        let _first = self.end.set(end);
        *active = None;
        Step::Over
    }
}

/// The client's end of a watch.
pub struct Subscription {
    watcher: Option<Arc<Watcher>>,
    events: mpsc::Receiver<Queued>,
    pump: AbortHandle,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.pump.abort();
        // Closing a descriptor with many watches takes the kernel a while.
        let watcher = self.watcher.take();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(move || drop(watcher));
        }
    }
}

/// What is in the queue.
pub enum Next {
    /// The next event.
    Event(FilesystemEvent),
    /// The watch is over, by an error or with its folder.
    End(Option<ConnectError>),
}

/// Starts a watch; when this returns every later change is caught.
pub async fn start(
    budget: &Budget,
    user: User,
    target: Target,
) -> Result<Subscription, ConnectError> {
    let permit = budget.watchers.clone().try_acquire_owned().map_err(|_| {
        ConnectError::new(
            Code::ResourceExhausted,
            format_args!("there are {WATCHERS_MAX} watches already; stop one first"),
        )
    })?;
    let folders = budget.folders.clone();
    let internal = |error: io::Error| ConnectError::new(Code::Internal, error);
    let tracker = as_user(user.clone(), move || Tracker::open(target, folders))
        .await
        .map_err(internal)??;
    let waker = tracker.waker().map_err(internal)?;
    let waker = sys::watch_fd(waker, Interest::READABLE).map_err(internal)?;
    let (sender, events) = mpsc::channel(WATCH_QUEUE_EVENTS_MAX);
    let watcher = Arc::new(Watcher {
        user,
        active: Mutex::new(Some(Active {
            tracker,
            sender,
            queued_bytes: budget.queued_bytes.clone(),
        })),
        end: OnceLock::new(),
        _permit: permit,
    });
    let pump = tokio::spawn(pump(Arc::downgrade(&watcher), waker)).abort_handle();
    Ok(Subscription {
        watcher: Some(watcher),
        events,
        pump,
    })
}

/// Empties the kernel's queue whenever there is something in it, whether or not the client listens:
/// that queue is small and shared limits apply to ours.
async fn pump(watcher: Weak<Watcher>, waker: AsyncFd<OwnedFd>) {
    while let Ok(mut ready) = waker.readable().await {
        let Some(watcher) = watcher.upgrade() else {
            return;
        };
        match as_user(watcher.user.clone(), move || watcher.advance()).await {
            Ok(Step::Idle) => ready.clear_ready(),
            Ok(Step::More) => {}
            // An error would be a panic of the worker, which ends the program.
            Ok(Step::Over) | Err(_) => return,
        }
    }
}

impl Subscription {
    /// The next event; pending while there is none.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Next> {
        self.events.poll_recv(context).map(|queued| match queued {
            Some(queued) => Next::Event(queued.event),
            None => Next::End(self.end()),
        })
    }

    /// The next event if there is one; None while there is none.
    pub fn try_next(&mut self) -> Option<Next> {
        match self.events.try_recv() {
            Ok(queued) => Some(Next::Event(queued.event)),
            Err(mpsc::error::TryRecvError::Empty) => None,
            Err(mpsc::error::TryRecvError::Disconnected) => Some(Next::End(self.end())),
        }
    }

    /// Waits until what happened before this call is in the queue.
    pub fn catch_up(&self) -> CatchUp {
        CatchUp(self.watcher.clone())
    }

    fn end(&self) -> Option<ConnectError> {
        let watcher = self.watcher.as_ref()?;
        watcher.end.get().cloned().flatten()
    }
}

/// See [`Subscription::catch_up`]; holds no lock while it waits.
pub struct CatchUp(Option<Arc<Watcher>>);

impl CatchUp {
    /// Runs to the end even if the caller stops waiting, so no event is lost by that.
    pub async fn run(self) -> Result<(), ConnectError> {
        let Some(watcher) = self.0 else { return Ok(()) };
        let user = watcher.user.clone();
        let work = move || {
            // A writer that never stops must not hold the caller.
            for _ in 0..WATCH_CATCH_UP_BATCHES {
                if !matches!(watcher.advance(), Step::More) {
                    break;
                }
            }
        };
        as_user(user, work)
            .await
            .map_err(|error| ConnectError::new(Code::Internal, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filesystem::watch::tests::Scratch;

    #[tokio::test]
    async fn events_beyond_the_memory_limit_end_the_watch_with_an_error() {
        let scratch = Scratch::new("backlog");
        let budget = Budget::default();
        let user = User {
            name: "root".into(),
            uid: 0,
            gid: 0,
            groups: vec![0],
            home: "/".into(),
        };
        let target = Target {
            path: scratch.path.clone(),
            recursive: false,
            include_entry: false,
            allow_network: false,
        };
        let mut subscription = start(&budget, user.clone(), target.clone()).await.unwrap();
        let one_event = size_of::<FilesystemEvent>() + 1;
        let others = WATCH_QUEUED_MAX_BYTES - one_event;
        budget.queued_bytes.store(others, Ordering::Relaxed);
        std::fs::write(scratch.path.join("f"), "x").unwrap();
        subscription.catch_up().run().await.unwrap();
        assert!(matches!(subscription.try_next(), Some(Next::Event(_))));
        let Some(Next::End(Some(error))) = subscription.try_next() else {
            panic!("no error");
        };
        assert_eq!(error.code, Code::ResourceExhausted);
        assert_eq!(budget.queued_bytes.load(Ordering::Relaxed), others);
        drop(subscription);

        let free = budget.watchers.available_permits() as u32;
        let _others = budget.watchers.clone().try_acquire_many_owned(free);
        let refused = start(&budget, user, target).await.err().unwrap();
        assert_eq!(refused.code, Code::ResourceExhausted);
    }
}
