//! `POST /files`: one file as raw bytes, or any number as multipart.
//!
//! A file is opened with O_TRUNC and written in place, so a watcher sees create, chmod, write and
//! nothing else (contract section 3.2). An upload that breaks off leaves what had arrived.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE};
use hyper::{Request, Response, StatusCode};
use serde::Serialize;

use super::metadata;
use super::multipart::Multipart;
use super::turns::{Turn, Turns};
use crate::app::App;
use crate::filesystem::pinned::{self, Pinned};
use crate::filesystem::service::{as_agent, as_user, make_parents};
use crate::http::{self, header, query_value, Body, RestError};
use crate::limits::{FILE_CHUNK_BYTES, UPLOAD_IDLE_MAX};
use crate::users::User;

/// Compressed bytes decoded at once; deflate expands at most about 1030-fold, so this bounds memory.
const GZIP_STEP_BYTES: usize = 1024;
/// One uploaded file in the answer; the keys are exactly those of the contract.
#[derive(Debug, Serialize)]
pub struct UploadedFile {
    /// Absolute path.
    pub path: String,
    /// Last part of the path.
    pub name: String,
    /// Always `file`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Metadata, if any.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

impl UploadedFile {
    /// Describes `path`.
    pub fn new(path: &Path, metadata: BTreeMap<String, String>) -> Self {
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        Self {
            path: path.to_string_lossy().into_owned(),
            name,
            kind: "file",
            metadata,
        }
    }
}

/// Bytes of a request body, decompressed where it says so.
pub struct Source {
    body: Incoming,
    pending: Bytes,
    decoder: Option<MultiGzDecoder<Vec<u8>>>,
    done: bool,
}

impl Source {
    fn new(body: Incoming, gzip: bool) -> Self {
        Self {
            body,
            pending: Bytes::new(),
            decoder: gzip.then(|| MultiGzDecoder::new(Vec::new())),
            done: false,
        }
    }

    /// The next bytes, or None at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RestError> {
        loop {
            if self.pending.is_empty() && !self.done {
                match tokio::time::timeout(UPLOAD_IDLE_MAX, self.body.frame()).await {
                    Ok(None) => self.done = true,
                    Ok(Some(Ok(frame))) => self.pending = frame.into_data().unwrap_or_default(),
                    Ok(Some(Err(error))) => {
                        return Err(bad(format!("cannot read the request: {error}")))
                    }
                    Err(_) => {
                        return Err(RestError::new(
                            StatusCode::REQUEST_TIMEOUT,
                            format!("the upload stood still for {} s", UPLOAD_IDLE_MAX.as_secs()),
                        ))
                    }
                }
            }
            let Some(decoder) = &mut self.decoder else {
                if self.pending.is_empty() && !self.done {
                    continue;
                }
                return Ok(
                    Some(std::mem::take(&mut self.pending)).filter(|bytes| !bytes.is_empty())
                );
            };
            let step = self
                .pending
                .split_to(self.pending.len().min(GZIP_STEP_BYTES));
            let result = if step.is_empty() && self.done {
                decoder.try_finish()
            } else {
                decoder.write_all(&step)
            };
            result.map_err(|error| bad(format!("the body is not valid gzip: {error}")))?;
            let ready = std::mem::take(decoder.get_mut());
            if !ready.is_empty() {
                return Ok(Some(ready.into()));
            }
            if self.done && step.is_empty() {
                return Ok(None);
            }
        }
    }
}

fn bad(message: impl Into<String>) -> RestError {
    RestError::new(StatusCode::BAD_REQUEST, message)
}

/// Answers the request.
pub async fn handle(
    app: Arc<App>,
    request: Request<Incoming>,
    query: &[(String, String)],
) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let gzip = match header(&parts.headers, CONTENT_ENCODING)
        .map(str::to_ascii_lowercase)
        .as_deref()
    {
        None | Some("" | "identity") => Ok(false),
        Some("gzip" | "x-gzip") => Ok(true),
        Some(other) => Err(bad(format!(
            "content encoding '{other}' is not supported; send gzip or identity"
        ))),
    };
    let mut source = Source::new(body, *gzip.as_ref().unwrap_or(&false));
    let result = match gzip {
        Ok(_) => receive(&app, &parts.headers, query, &mut source).await,
        Err(error) => Err(error),
    };
    match result.and_then(|files| {
        serde_json::to_vec(&files)
            .map_err(|error| RestError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
    }) {
        Ok(text) => http::json(StatusCode::OK, text),
        Err(error) => {
            http::discard(source.body).await;
            error.into_response()
        }
    }
}

async fn receive(
    app: &App,
    headers: &hyper::HeaderMap,
    query: &[(String, String)],
    source: &mut Source,
) -> Result<Vec<UploadedFile>, RestError> {
    let user = super::user(app, query_value(query, "username"))?;
    let metadata = metadata::from_headers(headers)?;
    let asked = query_value(query, "path").filter(|path| !path.is_empty());
    let asked = asked
        .map(|path| super::resolve(app, &user, path))
        .transpose()?;
    let content_type = header(headers, CONTENT_TYPE).unwrap_or("");
    let media_type = content_type
        .split(';')
        .next()
        .unwrap_or("")
        .trim()
        .to_ascii_lowercase();
    match media_type.as_str() {
        "application/octet-stream" => {
            let path = asked.ok_or_else(|| bad("an application/octet-stream upload needs the query parameter path"))?;
            let mut sink = Sink::new(app, user, path.clone(), metadata.clone());
            while let Some(bytes) = source.next().await? {
                sink.write(bytes).await?;
            }
            sink.finish().await?;
            Ok(vec![UploadedFile::new(&path, metadata)])
        }
        "multipart/form-data" => receive_parts(app, &user, Multipart::new(source, content_type)?, asked, &metadata).await,
        _ => Err(bad(format!("content type '{content_type}' is not supported; send multipart/form-data or application/octet-stream"))),
    }
}

async fn receive_parts(
    app: &App,
    user: &User,
    mut parts: Multipart<'_>,
    asked: Option<PathBuf>,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<UploadedFile>, RestError> {
    let mut seen = HashSet::new();
    let mut files = Vec::new();
    while let Some(part) = parts.next_part().await? {
        if part.name != "file" {
            continue;
        }
        let path = match (&asked, part.filename) {
            (Some(path), _) => path.clone(),
            (None, Some(filename)) if !filename.is_empty() => super::resolve(app, user, &filename)?,
            (None, _) => {
                return Err(bad(
                    "a part has no filename and the query has no path; give one of them",
                ))
            }
        };
        if !seen.insert(path.clone()) {
            return Err(bad(format!(
                "path '{}' is given twice; upload each file once",
                path.display()
            )));
        }
        let mut sink = Sink::new(app, user.clone(), path.clone(), metadata.clone());
        while let Some(bytes) = parts.next_chunk().await? {
            sink.write(bytes).await?;
        }
        sink.finish().await?;
        files.push(UploadedFile::new(&path, metadata.clone()));
    }
    if files.is_empty() {
        return Err(bad("the upload holds no part named 'file'"));
    }
    Ok(files)
}

/// A file being written, in pieces of [`FILE_CHUNK_BYTES`] on worker threads.
struct Sink {
    turns: Arc<Turns>,
    turn: Option<Arc<Turn>>,
    user: User,
    path: PathBuf,
    metadata: BTreeMap<String, String>,
    file: Option<Arc<File>>,
    waiting: Vec<Bytes>,
    waiting_bytes: usize,
}

impl Sink {
    fn new(app: &App, user: User, path: PathBuf, metadata: BTreeMap<String, String>) -> Self {
        Self {
            turns: app.uploads.clone(),
            turn: None,
            user,
            path,
            metadata,
            file: None,
            waiting: Vec::new(),
            waiting_bytes: 0,
        }
    }

    async fn write(&mut self, bytes: Bytes) -> Result<(), RestError> {
        self.waiting_bytes += bytes.len();
        self.waiting.push(bytes);
        if self.waiting_bytes >= FILE_CHUNK_BYTES {
            self.flush().await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), RestError> {
        if self.turn.is_none() {
            self.turn = Some(Arc::new(self.turns.take(&self.path).await?));
        }
        // The worker holds the turn too: a client that leaves does not let the next one in early.
        let turn = self.turn.clone();
        let pieces = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        let failed = |error| super::failed(&self.path, &error);
        let file = match &self.file {
            Some(file) => file.clone(),
            None => {
                let held = (self.metadata.clone(), turn.clone());
                let opened = open(self.path.clone(), self.user.clone(), held).await;
                self.file.insert(Arc::new(opened.map_err(failed)?)).clone()
            }
        };
        let work = move || -> io::Result<()> {
            for piece in pieces {
                (&*file).write_all(&piece)?;
            }
            drop(turn);
            Ok(())
        };
        let written = as_user(self.user.clone(), work).await;
        written.and_then(|result| result).map_err(failed)
    }

    /// Writes the rest; makes the file if nothing came.
    async fn finish(mut self) -> Result<(), RestError> {
        if self.file.is_none() || !self.waiting.is_empty() {
            self.flush().await?;
        }
        Ok(())
    }
}

/// [`create`] as the user and, where they may not, at the same place [`Pinned`] for the agent. What comes
/// with the metadata is held until the file is open.
pub async fn open<T: Clone + Send + 'static>(
    path: PathBuf,
    user: User,
    (metadata, held): (BTreeMap<String, String>, T),
) -> io::Result<File> {
    let first = {
        let (path, owner, metadata, held) =
            (path.clone(), user.clone(), metadata.clone(), held.clone());
        move || (create(&path, &owner, &metadata, 0), held).0
    };
    match as_user(user.clone(), first).await? {
        Err(error) if pinned::is_denied(&error) => {
            as_agent(move || {
                let place = Pinned::reach(&path, Some(&user))?;
                place.refuse_special()?;
                (
                    create(&place.path(), &user, &metadata, libc::O_NOFOLLOW),
                    held,
                )
                    .0
            })
            .await?
        }
        opened => opened,
    }
}

/// Opens a file for writing from its start, with the parents it needs and with more `flags` of open(2). A new
/// file belongs to the user; an old one keeps its owner and mode.
pub fn create(
    path: &Path,
    user: &User,
    metadata: &BTreeMap<String, String>,
    flags: i32,
) -> io::Result<File> {
    if let Some(parent) = path.parent().filter(|parent| !parent.exists()) {
        make_parents(parent)?;
    }
    let mut options = File::options();
    options
        .write(true)
        .mode(0o666)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | flags);
    let file = match options.clone().create_new(true).open(path) {
        Ok(file) => {
            // A no-op for ownership, which the kernel set, but watchers are promised this event.
            std::os::unix::fs::fchown(&file, Some(user.uid), Some(user.gid))?;
            file
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            options.create(true).truncate(true).open(path)?
        }
        Err(error) => return Err(error),
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    metadata::write(&file, metadata)?;
    Ok(file)
}
