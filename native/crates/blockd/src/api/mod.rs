//! HTTP/1.1 and JSON on a Unix socket.
//!
//! Handlers decode, hand the blocking work to a thread, and encode. Invariants:
//! every error has the one shape of [`error::ApiError`]; a body is at most
//! 8 MiB; two writers of one output file never run at the same time.

mod body;
pub mod error;
mod memory;
pub mod models;
mod outputs;
mod remotes;

use std::os::unix::fs::MetadataExt;
use std::path::Path as FilePath;
use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{header, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::Router;
use lsmt::format::parse_uuid;
use lsmt::lowers::Lowers;
use lsmt::{CommitOptions, Encoding};
use remote::Remotes;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::stacks::{check_absolute, Registry};
use body::WholeBody;
use error::{ApiError, Code};
use models::{
    CommitRequest, ImportRequest, Info, OpenStack, ReplaceLayers, SealStack, ShutdownRequest,
    StackList, WrittenLayer,
};
use outputs::Outputs;

/// Version of the protocol; raised when an old caller would misread it.
const PROTOCOL: u32 = 1;

/// What the handlers work on.
pub struct App {
    /// The open stacks.
    pub registry: Arc<Registry>,
    /// Device number of the mount, as `stat` reports it.
    pub mount_device: u64,
    remotes: Option<Arc<Remotes>>,
    outputs: Outputs,
    stop: watch::Sender<bool>,
}

impl App {
    /// `stop` is set to true when a caller asks the daemon to end.
    pub fn new(
        registry: Arc<Registry>,
        remotes: Option<Arc<Remotes>>,
        mount: &FilePath,
        stop: watch::Sender<bool>,
    ) -> std::io::Result<App> {
        Ok(App {
            registry,
            remotes,
            mount_device: std::fs::metadata(mount)?.dev(),
            outputs: Outputs::default(),
            stop,
        })
    }
}

type Shared = State<Arc<App>>;

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/info", get(info))
        .route("/v1/stacks", get(list_stacks))
        .route(
            "/v1/stacks/{id}",
            get(get_stack).put(open_stack).delete(close_stack),
        )
        .route("/v1/stacks/{id}/seal", post(seal_stack))
        .route("/v1/stacks/{id}/replace", post(replace_layers))
        .route("/v1/stacks/{id}/flush", post(flush_stack))
        .route("/v1/captures", post(memory::capture))
        .route("/v1/fills", post(memory::fill))
        .route("/v1/imports", post(import_image))
        .route("/v1/commits", post(commit_layers))
        .route("/v1/remotes", get(remotes::list).post(remotes::add))
        .route("/v1/remotes/shrink", post(remotes::shrink))
        .route("/v1/shutdown", post(shutdown))
        .fallback(|| async { no_route() })
        .method_not_allowed_fallback(|| async { no_route() })
        .with_state(app)
}

fn no_route() -> ApiError {
    let message = "no such route or method";
    ApiError::new(
        Code::NotFound,
        message,
        "GET /v1/info shows the protocol version",
    )
}

/// A JSON reply.
struct Json<T>(StatusCode, T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.1) {
            Ok(body) => {
                let kind = [(header::CONTENT_TYPE, "application/json")];
                (self.0, kind, body).into_response()
            }
            // A path that is not UTF-8 has no JSON form.
            Err(error) => ApiError::new(
                Code::Internal,
                format!("cannot encode the reply: {error}"),
                "use paths that are valid UTF-8",
            )
            .into_response(),
        }
    }
}

/// Runs blocking work on a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<Json<T>, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map(|value| Json(StatusCode::OK, value)),
        Err(error) => Err(ApiError::new(
            Code::Internal,
            format!("a worker failed: {error}"),
            "report this with the daemon's log",
        )),
    }
}

async fn info(State(app): Shared) -> Json<Info> {
    let (exports, no_ublk) = app.registry.exports();
    let info = Info {
        program: "blockd",
        version: env!("CARGO_PKG_VERSION"),
        protocol: PROTOCOL,
        pid: std::process::id(),
        mount: app.registry.mount().to_owned(),
        exports,
        no_ublk,
        fills_memory: true,
    };
    Json(StatusCode::OK, info)
}

async fn list_stacks(State(app): Shared) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        let entries = app.registry.all().into_iter();
        let stacks = entries.map(|entry| app.registry.describe(&entry)).collect();
        Ok(StackList { stacks })
    })
    .await
}

async fn get_stack(
    State(app): Shared,
    Path(id): Path<String>,
) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        let entry = app
            .registry
            .by_id(&id)
            .ok_or_else(|| ApiError::no_stack(&id))?;
        Ok(app.registry.describe(&entry))
    })
    .await
}

async fn open_stack(
    State(app): Shared,
    Path(id): Path<String>,
    body: WholeBody,
) -> Result<impl IntoResponse, ApiError> {
    let request: OpenStack = body.decode()?;
    blocking(move || app.registry.open(&id, &request)).await
}

async fn seal_stack(
    State(app): Shared,
    Path(id): Path<String>,
    body: WholeBody,
) -> Result<impl IntoResponse, ApiError> {
    let request: SealStack = body.decode()?;
    blocking(move || app.registry.seal(&id, &request)).await
}

async fn replace_layers(
    State(app): Shared,
    Path(id): Path<String>,
    body: WholeBody,
) -> Result<impl IntoResponse, ApiError> {
    let request: ReplaceLayers = body.decode()?;
    blocking(move || app.registry.replace(&id, &request)).await
}

async fn flush_stack(State(app): Shared, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    blocking(move || app.registry.flush(&id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
struct CloseQuery {
    #[serde(default)]
    force: bool,
}

async fn close_stack(
    State(app): Shared,
    Path(id): Path<String>,
    query: Result<Query<CloseQuery>, QueryRejection>,
) -> Result<StatusCode, ApiError> {
    let Query(query) = query.map_err(|error| {
        ApiError::invalid(error.to_string(), "the only parameter is force=true|false")
    })?;
    blocking(move || app.registry.close(&id, query.force)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn import_image(State(app): Shared, body: WholeBody) -> Result<impl IntoResponse, ApiError> {
    let request: ImportRequest = body.decode()?;
    blocking(move || {
        check_absolute(&request.source)?;
        check_absolute(&request.output)?;
        let _claim = app.outputs.claim(&request.output)?;
        let size_bytes = request.virtual_size_bytes;
        let layer = lsmt::import_raw(&request.source, &request.output, size_bytes, request.sync)?;
        written(layer)
    })
    .await
}

async fn commit_layers(State(app): Shared, body: WholeBody) -> Result<impl IntoResponse, ApiError> {
    let request: CommitRequest = body.decode()?;
    blocking(move || {
        check_absolute(&request.output)?;
        request
            .lowers
            .iter()
            .try_for_each(|path| check_absolute(path))?;
        if request.lowers.is_empty() {
            let message = "there are no layers to commit";
            return Err(ApiError::invalid(
                message,
                "list at least one layer in lowers",
            ));
        }
        let mut options = commit_options(&request)?;
        let _claim = app.outputs.claim(&request.output)?;
        let lowers = Lowers::open(app.registry.opener(), &request.lowers)?;
        if request.keep_uuid {
            let top = lowers.layers().last();
            options.uuid = top.map(|layer| layer.trailer().uuid.clone());
        }
        written(lsmt::commit(&lowers, &request.output, &options)?)
    })
    .await
}

fn commit_options(request: &CommitRequest) -> Result<CommitOptions, ApiError> {
    if request.keep_uuid && request.uuid.is_some() {
        let message = "a layer cannot keep its uuid and get another";
        return Err(ApiError::invalid(message, "give uuid or keep_uuid"));
    }
    let uuid = |text: &String| {
        parse_uuid(text).ok_or_else(|| {
            let message = format!("{text:?} is not a UUID");
            ApiError::invalid(message, "write it as 8-4-4-4-12 hex digits")
        })
    };
    let compression = match &request.compression {
        None => None,
        Some(wanted) => Some(wanted.checked().ok_or_else(|| {
            let message = format!("blocks of {} bytes are not possible", wanted.block_bytes);
            ApiError::invalid(message, "give a power of two from 4096 to 65536")
        })?),
    };
    Ok(CommitOptions {
        uuid: request.uuid.as_ref().map(uuid).transpose()?,
        parent_uuid: request.parent_uuid.as_ref().map(uuid).transpose()?,
        user_tag: request.user_tag.clone(),
        encoding: Encoding {
            compression,
            tar: request.tar,
        },
        sync: request.sync,
    })
}

fn written(layer: lsmt::LayerInfo) -> Result<WrittenLayer, ApiError> {
    let what = format!("cannot read {}", layer.path.display());
    WrittenLayer::describe(layer).map_err(|error| ApiError::io(&what, &error))
}

async fn shutdown(State(app): Shared, body: WholeBody) -> Result<StatusCode, ApiError> {
    let request = if body.is_empty() {
        ShutdownRequest::default()
    } else {
        body.decode()?
    };
    let busy = app.registry.busy();
    if !busy.is_empty() && !request.force {
        let message = format!(
            "{} stacks have open handles: {}",
            busy.len(),
            first_few(&busy)
        );
        let hint = "close their users first, or send {\"force\": true}";
        return Err(ApiError::new(Code::Busy, message, hint));
    }
    app.stop.send_replace(true);
    Ok(StatusCode::ACCEPTED)
}

fn first_few(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let mut text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        text.push_str(", ...");
    }
    text
}
