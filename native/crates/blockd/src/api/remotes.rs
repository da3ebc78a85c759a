//! Layers that are in a registry: a stub is made when the layer behind it proved
//! readable.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::State;
use axum::response::IntoResponse;
use lsmt::{LayerError, RoLayer};
use remote::{Login, Remotes, Stub};
use serde::{Deserialize, Serialize};

use super::body::WholeBody;
use super::error::ApiError;
use super::{blocking, check_absolute, App, Shared};

/// Body of `POST /v1/remotes`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddRemote {
    /// Stub to write, a layer for all other calls.
    output: PathBuf,
    /// Prefix of the blob's address.
    blobs_url: String,
    /// `sha256:` and the digest of the blob.
    digest: String,
    /// Its size.
    size_bytes: u64,
    /// Whether the registry must prove who it is.
    check_certificate: bool,
    /// What the registry asks for; kept in memory only. Default: docker's config.
    #[serde(default)]
    login: Option<Login>,
}

/// Reply to it.
#[derive(Debug, Serialize)]
struct RemoteLayer {
    output: PathBuf,
    virtual_size_bytes: u64,
    uuid: String,
    parent_uuid: String,
    fetched_bytes: u64,
}

/// A remote layer that is open.
#[derive(Debug, Serialize)]
struct OpenRemote {
    digest: String,
    size_bytes: u64,
    fetched_bytes: u64,
    is_local: bool,
}

/// Reply of `GET /v1/remotes`.
#[derive(Debug, Serialize)]
struct RemoteList {
    layers: Vec<OpenRemote>,
    cache: CacheFigures,
}

/// Figures of the block cache.
#[derive(Debug, Serialize)]
struct CacheFigures {
    used_bytes: u64,
    limit_bytes: u64,
    evicted_blocks: u64,
    damaged_blocks: u64,
    unkept_blocks: u64,
}

fn remotes_of(app: &App) -> Result<&Arc<Remotes>, ApiError> {
    app.remotes.as_ref().ok_or_else(|| {
        let message = "this daemon reads no remote layers";
        ApiError::invalid(message, "start it with --remote-cache FOLDER")
    })
}

pub async fn add(State(app): Shared, body: WholeBody) -> Result<impl IntoResponse, ApiError> {
    let request: AddRemote = body.decode()?;
    blocking(move || add_now(&app, request)).await
}

fn add_now(app: &App, request: AddRemote) -> Result<RemoteLayer, ApiError> {
    check_absolute(&request.output)?;
    let remotes = remotes_of(app)?;
    let stub = Stub {
        blobs_url: request.blobs_url,
        digest: request.digest,
        size_bytes: request.size_bytes,
        check_certificate: request.check_certificate,
    };
    let hint = "take the values from the image's manifest";
    stub.check()
        .map_err(|reason| ApiError::invalid(reason, hint))?;
    if let Some(login) = request.login {
        remotes.give_login(&stub.blobs_url, login);
    }
    let (blob, key) = remotes.blob(&stub).map_err(ApiError::from)?;
    let opened = app.registry.opener().unwrap(blob.clone(), key);
    let (blob_inside, _) = opened.map_err(|source| LayerError::Open {
        path: stub.address().into(),
        source,
    })?;
    let (layer, _) = RoLayer::from_blob(stub.address().as_ref(), blob_inside)?;
    write_stub(&stub, &request.output)?;
    Ok(RemoteLayer {
        output: request.output,
        virtual_size_bytes: layer.trailer().virtual_size_bytes,
        uuid: layer.trailer().uuid.clone(),
        parent_uuid: layer.trailer().parent_uuid.clone(),
        fetched_bytes: blob.fetched_bytes(),
    })
}

/// Writes the stub, unless the layer itself is there: a repeated call may find it
/// downloaded.
fn write_stub(stub: &Stub, output: &Path) -> Result<(), ApiError> {
    let is_there = std::fs::metadata(output).is_ok_and(|file| file.len() == stub.size_bytes);
    if is_there {
        return Ok(());
    }
    let what = format!("cannot write {}", output.display());
    stub.write(output)
        .map_err(|error| ApiError::io(&what, &error))
}

/// Body of `POST /v1/remotes/shrink`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShrinkCache {
    /// Bytes of blocks to take out, the coldest first.
    bytes: u64,
}

/// Reply to it.
#[derive(Debug, Serialize)]
struct Shrunk {
    freed_bytes: u64,
}

pub async fn shrink(State(app): Shared, body: WholeBody) -> Result<impl IntoResponse, ApiError> {
    let request: ShrinkCache = body.decode()?;
    blocking(move || {
        let freed_bytes = remotes_of(&app)?.cache().shrink(request.bytes);
        Ok(Shrunk { freed_bytes })
    })
    .await
}

pub async fn list(State(app): Shared) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        let remotes = remotes_of(&app)?;
        let blobs = remotes.blobs().into_iter();
        let mut layers: Vec<_> = blobs
            .map(|blob| OpenRemote {
                digest: blob.source().stub().digest.clone(),
                size_bytes: blob.source().stub().size_bytes,
                fetched_bytes: blob.fetched_bytes(),
                is_local: blob.is_local(),
            })
            .collect();
        layers.sort_by(|a, b| a.digest.cmp(&b.digest));
        let cache = remotes.cache().stats();
        Ok(RemoteList {
            layers,
            cache: CacheFigures {
                used_bytes: cache.used_bytes,
                limit_bytes: cache.limit_bytes,
                evicted_blocks: cache.evicted_blocks,
                damaged_blocks: cache.damaged_blocks,
                unkept_blocks: cache.unkept_blocks,
            },
        })
    })
    .await
}
