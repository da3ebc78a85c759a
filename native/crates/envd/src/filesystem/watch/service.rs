//! The watch calls.

use std::sync::Arc;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Request, Response};
use tokio::time::Instant;

use super::messages::{CreateWatcherResponse, WatchRequest, WatcherEventsResponse, WatcherRequest};
use super::stream::WatchBody;
use super::tracker::Target;
use super::watcher::{self, Subscription};
use crate::app::App;
use crate::connect::frames::Format;
use crate::connect::{Code, ConnectError};
use crate::filesystem::service::Caller;
use crate::http::{basic_user, Body};
use crate::process::messages::Empty;
use crate::rpc;

/// WatchDir: events as they happen.
pub async fn watch_dir(app: Arc<App>, request: Request<Incoming>) -> Response<Body> {
    let format = match rpc::stream_format(request.headers()) {
        Ok(format) => format,
        Err(refusal) => return *refusal,
    };
    let keepalive = rpc::keepalive(request.headers());
    match try_watch(&app, format, request).await {
        Ok((subscription, deadline)) => rpc::stream(
            format,
            WatchBody::new(subscription, format, keepalive, deadline).boxed_unsync(),
        ),
        Err(error) => rpc::stream_error(format, &error),
    }
}

async fn try_watch(
    app: &App,
    format: Format,
    request: Request<Incoming>,
) -> Result<(Subscription, Option<Instant>), ConnectError> {
    let deadline = rpc::deadline(request.headers())?.map(|timeout| Instant::now() + timeout);
    let user_name = basic_user(request.headers());
    let start = async {
        let query: WatchRequest = rpc::single_message(format, request.into_body()).await?;
        start(app, user_name.as_deref(), query).await
    };
    let subscription = match deadline {
        None => start.await?,
        Some(at) => tokio::time::timeout_at(at, start).await.map_err(|_| {
            ConnectError::new(
                Code::DeadlineExceeded,
                "the deadline of the request passed before the watch was in place; raise its timeout or watch a smaller folder",
            )
        })??,
    };
    Ok((subscription, deadline))
}

/// CreateWatcher: a watch whose events are collected by [`watcher_events`].
pub async fn create_watcher(app: Arc<App>, request: Request<Incoming>) -> Response<Body> {
    let user_name = basic_user(request.headers());
    rpc::unary(request, |query: WatchRequest| async move {
        let subscription = start(&app, user_name.as_deref(), query).await?;
        Ok(CreateWatcherResponse {
            watcher_id: app.watchers.add(subscription),
        })
    })
    .await
}

/// GetWatcherEvents.
pub async fn watcher_events(app: Arc<App>, request: Request<Incoming>) -> Response<Body> {
    rpc::unary(request, |query: WatcherRequest| async move {
        Ok(WatcherEventsResponse {
            events: app.watchers.poll(&query.watcher_id).await?,
        })
    })
    .await
}

/// RemoveWatcher.
pub async fn remove_watcher(app: Arc<App>, request: Request<Incoming>) -> Response<Body> {
    rpc::unary(request, |query: WatcherRequest| async move {
        app.watchers.remove(&query.watcher_id)?;
        Ok(Empty {})
    })
    .await
}

async fn start(
    app: &App,
    user_name: Option<&str>,
    query: WatchRequest,
) -> Result<Subscription, ConnectError> {
    let caller = Caller::of(app, user_name)?;
    let target = Target {
        path: caller.resolve(&query.path)?,
        recursive: query.recursive,
        include_entry: query.include_entry,
        allow_network: query.allow_network_mounts,
    };
    watcher::start(&app.watchers.budget, caller.user, target).await
}
