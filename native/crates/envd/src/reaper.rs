//! Collects every child that ends, ours and orphans alike.

use std::io;
use std::sync::Arc;

use tokio::signal::unix::{signal, SignalKind};

use crate::app::App;

/// Starts reaping; call once, before the first process is started.
pub fn start(app: Arc<App>) -> io::Result<()> {
    let mut child_ended = signal(SignalKind::child())?;
    tokio::spawn(async move {
        loop {
            // One signal may stand for many children, so collect until there are none; pause between
            // batches so that a flood of orphans does not hold up requests.
            while app.processes.reap() {
                tokio::task::yield_now().await;
            }
            if child_ended.recv().await.is_none() {
                return;
            }
        }
    });
    Ok(())
}
