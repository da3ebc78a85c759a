//! `POST /fsfreeze` and `/fsthaw`: hold the root file system still while its disk is taken. Host-internal.
//!
//! A freeze writes everything out, waits for writers and lets no new one in, so that the disk of that moment mounts
//! clean and has all that was written before. A host that goes away must not leave the guest frozen for ever: it
//! thaws by itself after `FREEZE_MAX` of its own time. Only PID 1 does it: outside a guest the root is not ours.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use hyper::{Method, Response, StatusCode};
use rustix::fs::{Mode, OFlags};
use tokio::sync::oneshot;

use crate::app::{lock, App};
use crate::connect::error::cause;
use crate::http::{self, Body, RestError};
use crate::limits::FREEZE_MAX;
use crate::sys;

/// Answers either call once it is done; a second one waits for the first.
pub async fn handle(app: Arc<App>, method: &Method, freeze: bool) -> Response<Body> {
    if method != Method::POST {
        let message = format!("{method} is not allowed here; use POST");
        return RestError::new(StatusCode::METHOD_NOT_ALLOWED, message).into_response();
    }
    if std::process::id() != 1 {
        let message = "the root file system is not this program's to freeze";
        return RestError::new(StatusCode::FORBIDDEN, message.to_owned()).into_response();
    }
    match on_own_thread(app, freeze).await {
        Ok(()) => http::empty(StatusCode::NO_CONTENT),
        Err(error) => {
            let what = if freeze { "freeze" } else { "thaw" };
            let message = format!("cannot {what} the root file system: {}", cause(&error));
            RestError::new(StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
        }
    }
}

/// The workers may all wait in the frozen file system for the thaw, which must not queue behind them.
async fn on_own_thread(app: Arc<App>, freeze: bool) -> io::Result<()> {
    let (done, result) = oneshot::channel();
    std::thread::Builder::new()
        .name("freeze".to_owned())
        .spawn(move || done.send(set_frozen(&app, freeze)))?;
    result
        .await
        .unwrap_or_else(|error| Err(io::Error::other(error)))
}

fn set_frozen(app: &Arc<App>, freeze: bool) -> io::Result<()> {
    let mut since = lock(&app.frozen_since);
    if freeze == since.is_some() {
        return Ok(());
    }
    let root = rustix::fs::open("/", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    if !freeze {
        sys::thaw(root.as_fd())?;
        *since = None;
        return Ok(());
    }
    sys::freeze(root.as_fd())?;
    let now = Instant::now();
    *since = Some(now);
    let shared = app.clone();
    let timer = std::thread::Builder::new()
        .name("thaw".to_owned())
        .spawn(move || {
            std::thread::sleep(FREEZE_MAX);
            if *lock(&shared.frozen_since) == Some(now) {
                // Nobody is left to tell; a later call of the host says what is wrong.
                let _told_later = set_frozen(&shared, false);
            }
        });
    if timer.is_err() {
        sys::thaw(root.as_fd())?;
        *since = None;
    }
    timer.map(drop)
}
