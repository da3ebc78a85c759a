//! Uploads to one path take turns, so that what is there afterwards is one of them and never a mix.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hyper::StatusCode;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::app::lock;
use crate::http::RestError;
use crate::limits::UPLOAD_TURN_WAIT;

/// Who writes what at the moment. Grows with uploads in progress, not with paths ever seen.
#[derive(Default)]
pub struct Turns {
    writers: Mutex<HashMap<PathBuf, Arc<AsyncMutex<()>>>>,
}

/// The right to write one path, until dropped.
pub struct Turn {
    turns: Arc<Turns>,
    path: PathBuf,
    guard: Option<OwnedMutexGuard<()>>,
}

impl Turns {
    /// Waits for earlier uploads to the path; [`UPLOAD_TURN_WAIT`] at most, then 409.
    pub async fn take(self: &Arc<Self>, path: &Path) -> Result<Turn, RestError> {
        let queue = lock(&self.writers)
            .entry(path.to_owned())
            .or_default()
            .clone();
        // Made before the wait, so that its drop clears the table also when the client leaves meanwhile.
        let mut turn = Turn {
            turns: self.clone(),
            path: path.to_owned(),
            guard: None,
        };
        match tokio::time::timeout(UPLOAD_TURN_WAIT, queue.lock_owned()).await {
            Ok(guard) => {
                turn.guard = Some(guard);
                Ok(turn)
            }
            Err(_) => Err(RestError::new(
                StatusCode::CONFLICT,
                format!(
                    "another upload to '{}' is still in progress; try again when it is done",
                    path.display()
                ),
            )),
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut writers = lock(&self.turns.writers);
        self.guard.take();
        // One reference is the table's own: nobody holds or awaits this turn.
        if writers
            .get(&self.path)
            .is_some_and(|queue| Arc::strong_count(queue) == 1)
        {
            writers.remove(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_nothing_left() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let turns = Arc::new(Turns::default());
            let first = turns.take(Path::new("/a")).await.unwrap();
            let _other = turns.take(Path::new("/b")).await.unwrap();
            assert_eq!(
                turns.take(Path::new("/a")).await.err().unwrap().status,
                StatusCode::CONFLICT
            );
            let waiting = tokio::spawn({
                let turns = turns.clone();
                async move { turns.take(Path::new("/a")).await.is_ok() }
            });
            tokio::task::yield_now().await;
            drop(first);
            assert!(waiting.await.unwrap());
            assert_eq!(
                lock(&turns.writers).keys().collect::<Vec<_>>(),
                [Path::new("/b")]
            );
        });
    }
}
