//! `POST /files/compose`: joins uploaded pieces into one file and removes them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use serde::Deserialize;

use super::upload::{self, UploadedFile};
use crate::app::App;
use crate::filesystem::service::as_user;
use crate::http::{self, Body, RestError};
use crate::limits::COMPOSE_SOURCES_MAX;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ComposeRequest {
    #[serde(alias = "sourcePaths")]
    source_paths: Vec<String>,
    destination: String,
    username: Option<String>,
}

/// Answers the request.
pub async fn handle(app: Arc<App>, request: Request<Incoming>) -> Response<Body> {
    match try_compose(&app, request).await {
        Ok(file) => http::json(StatusCode::OK, serde_json::json!(file).to_string()),
        Err(error) => error.into_response(),
    }
}

fn bad(message: impl Into<String>) -> RestError {
    RestError::new(StatusCode::BAD_REQUEST, message)
}

async fn try_compose(app: &App, request: Request<Incoming>) -> Result<UploadedFile, RestError> {
    let request: ComposeRequest = http::read_json(request.into_body()).await?;
    if request.source_paths.is_empty() || request.source_paths.len() > COMPOSE_SOURCES_MAX {
        return Err(bad(format!(
            "source_paths has {} entries; give 1 to {COMPOSE_SOURCES_MAX}",
            request.source_paths.len()
        )));
    }
    if request.destination.is_empty() {
        return Err(bad("destination is empty"));
    }
    let user = super::user(app, request.username.as_deref())?;
    let sources: Vec<PathBuf> = request
        .source_paths
        .iter()
        .map(|path| super::resolve(app, &user, path))
        .collect::<Result<_, _>>()?;
    let destination = super::resolve(app, &user, &request.destination)?;
    let (paths, target) = (sources.clone(), destination.clone());
    let opened = as_user(user.clone(), move || open_sources(&paths, &target)).await;
    let files = opened.map_err(|error| super::failed(&destination, &error))??;
    let target = upload::open(destination.clone(), user.clone(), (BTreeMap::new(), ())).await;
    let target = target.map_err(|error| super::failed(&destination, &error))?;
    let shown = destination.clone();
    as_user(user, move || join(&sources, files, target, &destination))
        .await
        .map_err(|error| super::failed(&shown, &error))??;
    Ok(UploadedFile::new(&shown, BTreeMap::new()))
}

/// All sources are open before the destination is touched.
fn open_sources(sources: &[PathBuf], destination: &Path) -> Result<Vec<File>, RestError> {
    let existing = fs::metadata(destination)
        .ok()
        .map(|info| (info.dev(), info.ino()));
    let mut files = Vec::with_capacity(sources.len());
    for path in sources {
        let mut options = File::options();
        let file = options
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|error| super::failed(path, &error))?;
        let info = file
            .metadata()
            .map_err(|error| super::failed(path, &error))?;
        if !info.is_file() {
            return Err(bad(format!(
                "path '{}' is not a regular file",
                path.display()
            )));
        }
        if existing == Some((info.dev(), info.ino())) {
            return Err(bad(format!(
                "destination '{}' is also a source; compose into a new file",
                destination.display()
            )));
        }
        files.push(file);
    }
    Ok(files)
}

/// The sources are removed only after all was written.
fn join(
    sources: &[PathBuf],
    files: Vec<File>,
    mut target: File,
    destination: &Path,
) -> Result<(), RestError> {
    for mut file in files {
        io::copy(&mut file, &mut target).map_err(|error| super::failed(destination, &error))?;
    }
    for path in sources {
        match fs::remove_file(path) {
            // The same piece may be named twice.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(super::failed(path, &error))
            }
            _ => {}
        }
    }
    Ok(())
}
