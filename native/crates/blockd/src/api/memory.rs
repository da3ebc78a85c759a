//! The memory of VMMs: captures, and fills.

use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::State;
use axum::response::IntoResponse;
use lsmt::lowers::Lowers;
use serde::{Deserialize, Serialize};

use super::body::WholeBody;
use super::error::{ApiError, Code};
use super::models::{CacheMode, CaptureRequest, Captured};
use super::{blocking, App, Shared};
use crate::capture::maps::FileIdentity;
use crate::capture::{self, fill, CaptureError};
use crate::stacks::{check_absolute, Entry};

/// Body of `POST /v1/fills`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FillRequest {
    /// Process whose memory is filled; its guest must not run yet.
    pid: i32,
    /// The stack it maps privately.
    stack: String,
    /// Sealed layers that lie upon that stack, bottom first.
    layers: Vec<PathBuf>,
}

/// Reply of a fill.
#[derive(Debug, Serialize)]
pub struct Filled {
    /// Bytes written into the process.
    bytes: u64,
}

/// Writes what a process changed in its memory into a layer.
pub async fn capture(State(app): Shared, body: WholeBody) -> Result<impl IntoResponse, ApiError> {
    let request: CaptureRequest = body.decode()?;
    blocking(move || capture_now(&app, &request)).await
}

/// Writes what layers hold into the memory of a process.
pub async fn fill(State(app): Shared, body: WholeBody) -> Result<impl IntoResponse, ApiError> {
    let request: FillRequest = body.decode()?;
    blocking(move || fill_now(&app, &request)).await
}

fn capture_now(app: &App, request: &CaptureRequest) -> Result<Captured, ApiError> {
    check_absolute(&request.output)?;
    let id = &request.stack;
    let (entry, file) = mapped(app, id)?;
    let _claim = app.outputs.claim(&request.output)?;
    let outcome = capture::capture(
        request.pid,
        file,
        &entry.stack,
        &request.output,
        request.sync,
    )
    .map_err(|error| memory_error(error, &format!("capture of stack {id:?}")))?;
    Ok(Captured {
        output: outcome.layer.path,
        virtual_size_bytes: outcome.layer.virtual_size_bytes,
        size_bytes: outcome.layer.size_bytes,
        pages: outcome.pages,
        zero_pages: outcome.zero_pages,
        stored_pages: outcome.pages - outcome.zero_pages,
        find_us: outcome.find_us,
        copy_us: outcome.copy_us,
    })
}

fn fill_now(app: &App, request: &FillRequest) -> Result<Filled, ApiError> {
    for path in &request.layers {
        check_absolute(path)?;
    }
    let id = &request.stack;
    let (entry, file) = mapped(app, id)?;
    let layers = Lowers::open(app.registry.opener(), &request.layers)?;
    let size_bytes = entry.stack.virtual_size_bytes();
    let bytes = fill::fill(request.pid, file, size_bytes, layers)
        .map_err(|error| memory_error(error, &format!("fill of memory upon stack {id:?}")))?;
    Ok(Filled { bytes })
}

/// The stack, and how the kernel names its file.
fn mapped(app: &App, id: &str) -> Result<(Arc<Entry>, FileIdentity), ApiError> {
    let entry = app
        .registry
        .by_id(id)
        .ok_or_else(|| ApiError::no_stack(id))?;
    if entry.cache != CacheMode::Page || entry.is_writable() {
        let message = format!("stack {id:?} is not a read-only stack with cache mode \"page\"");
        let hint = "name the stack the process maps as its memory";
        return Err(ApiError::invalid(message, hint));
    }
    let file = FileIdentity {
        major: nix::sys::stat::major(app.mount_device),
        minor: nix::sys::stat::minor(app.mount_device),
        inode: entry.inode,
    };
    Ok((entry, file))
}

fn memory_error(error: CaptureError, what: &str) -> ApiError {
    let message = format!("{what}: {error}");
    match error {
        CaptureError::Stack(error) => ApiError::from(error),
        CaptureError::NoProcess { .. } => {
            ApiError::new(Code::NotFound, message, "the VMM has ended")
        }
        CaptureError::NotMapped { .. } => {
            let hint = "the process must map the stack's file with MAP_PRIVATE";
            ApiError::invalid(message, hint)
        }
        CaptureError::MappedTwice { .. } => {
            ApiError::invalid(message, "map every part of the file once only")
        }
        CaptureError::Outside { .. } => {
            ApiError::invalid(message, "the layers are of another memory")
        }
        CaptureError::Process { source, .. } => ApiError::io(&message, &source),
    }
}
