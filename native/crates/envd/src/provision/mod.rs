//! `POST /provision/...`: what template builds do to a disk without any program of its image. Host-internal.
//!
//! An image may have no shell, no `mkdir`, no `tar` and no account files, and COPY, WORKDIR and USER work in it all
//! the same. All of it is done as root in a guest that belongs to whoever builds it. Only PID 1 does it: outside a
//! guest the root file system is not ours.
//!
//! | path | body | answer |
//! |---|---|---|
//! | `look` | `{"owner": "user[:group]", "path"}` | `{"uid", "gid", "isFolder"}`; 400: no such user or group |
//! | `user` | `{"name"}` | 204; the user is made if there is none of that name |
//! | `disk` | `{"sizeBytes"}` | 204; the disk has that size now, and the root file system takes all of it |
//! | `folder` | `{"path", "uid", "gid"}` | 204; with the folders that are missing above it |
//! | `pack` | `{"sources": [path, ...], "root", "parents"}` | a tar archive of what the disk has of them below `root`; see `pack` |
//! | `unpack?path=&uid=&gid=&apart=` | a tar archive | 204; what it holds is below the folder then, which is made as by `folder` |
//! | `mount` | see `mounts` | `{"made"}`: what it had to make for the target |
//! | `unmount` | see `mounts` | 204 |

mod accounts;
mod disk;
mod facts;
mod mounts;
mod pack;
mod unpack;
mod wildcard;

use std::io;
use std::path::{Path, PathBuf};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use rustix::fs::{chownat, AtFlags, Gid, Uid, CWD};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::connect::error::cause;
use crate::filesystem::paths::clean;
use crate::http::{self, query_value, Body, RestError};
use crate::limits::{BODY_IDLE_MAX, UNPACK_QUEUE_PIECES};
use crate::users::Accounts;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct LookRequest {
    owner: String,
    path: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct LookAnswer {
    uid: u32,
    gid: u32,
    is_folder: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct UserRequest {
    name: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct FolderRequest {
    path: String,
    uid: u32,
    gid: u32,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PackRequest {
    sources: Vec<String>,
    root: String,
    parents: bool,
}

/// Whose new files are.
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// Answers one call.
pub async fn handle(
    method: &Method,
    call: &str,
    query: &[(String, String)],
    request: Request<Incoming>,
) -> Response<Body> {
    let body = request.into_body();
    let refusal = if method != Method::POST {
        Some((StatusCode::METHOD_NOT_ALLOWED, "use POST"))
    } else if std::process::id() != 1 {
        let message = "the root file system is not this program's to change";
        Some((StatusCode::FORBIDDEN, message))
    } else {
        None
    };
    if let Some((status, message)) = refusal {
        tokio::spawn(http::discard(body));
        return RestError::new(status, message).into_response();
    }
    let answer = match call {
        "look" => look(body).await,
        "user" => user(body).await,
        "disk" => grow_disk(body).await,
        "folder" => folder(body).await,
        "pack" => pack_sources(body).await,
        "unpack" => unpack_body(query, body).await,
        "mount" => mount(body).await,
        "unmount" => unmount(body).await,
        _ => Err(RestError::new(
            StatusCode::NOT_FOUND,
            format!("no such endpoint: /provision/{call}"),
        )),
    };
    answer.unwrap_or_else(RestError::into_response)
}

async fn look(body: Incoming) -> Result<Response<Body>, RestError> {
    let request: LookRequest = http::read_json(body).await?;
    let path = absolute(&request.path)?;
    worker(move || {
        let user = Accounts::load().owner(&request.owner).ok_or_else(|| {
            let message = format!("'{}' is not a user of this image", request.owner);
            RestError::new(StatusCode::BAD_REQUEST, message)
        })?;
        let (uid, gid, is_folder) = (user.uid, user.gid, path.is_dir());
        let answer = serde_json::json!(LookAnswer {
            uid,
            gid,
            is_folder
        });
        Ok(http::json(StatusCode::OK, answer.to_string()))
    })
    .await
}

async fn user(body: Incoming) -> Result<Response<Body>, RestError> {
    let request: UserRequest = http::read_json(body).await?;
    worker(move || {
        accounts::ensure(Path::new("/"), &request.name)
            .map_err(|error| failed(Path::new("/etc/passwd"), &error))?;
        Ok(http::empty(StatusCode::NO_CONTENT))
    })
    .await
}

async fn grow_disk(body: Incoming) -> Result<Response<Body>, RestError> {
    let growth: disk::Growth = http::read_json(body).await?;
    worker(move || {
        disk::grow(&growth).map_err(|error| failed(Path::new("/"), &error))?;
        Ok(http::empty(StatusCode::NO_CONTENT))
    })
    .await
}

async fn folder(body: Incoming) -> Result<Response<Body>, RestError> {
    let request: FolderRequest = http::read_json(body).await?;
    let path = absolute(&request.path)?;
    let (uid, gid) = (request.uid, request.gid);
    worker(move || {
        make_folders(&path, Owner { uid, gid }).map_err(|error| failed(&path, &error))?;
        Ok(http::empty(StatusCode::NO_CONTENT))
    })
    .await
}

async fn pack_sources(body: Incoming) -> Result<Response<Body>, RestError> {
    let request: PackRequest = http::read_json(body).await?;
    let root = absolute(match request.root.as_str() {
        "" => "/",
        given => given,
    })?;
    let (mut sender, pieces) = pack::channel(UNPACK_QUEUE_PIECES);
    tokio::task::spawn_blocking(move || {
        let outcome = pack::pack(&root, &request.sources, request.parents, &mut sender);
        sender.finish(outcome);
    });
    Ok(Response::new(pieces.boxed_unsync()))
}

async fn mount(body: Incoming) -> Result<Response<Body>, RestError> {
    let request: mounts::Mount = http::read_json(body).await?;
    let target = absolute(&request.target)?;
    worker(move || {
        let made = mounts::mount(&request, &target).map_err(|error| failed(&target, &error))?;
        let answer = serde_json::json!({ "made": made });
        Ok(http::json(StatusCode::OK, answer.to_string()))
    })
    .await
}

async fn unmount(body: Incoming) -> Result<Response<Body>, RestError> {
    let request: mounts::Unmount = http::read_json(body).await?;
    let target = absolute(&request.target)?;
    worker(move || {
        mounts::unmount(&request, &target).map_err(|error| failed(&target, &error))?;
        Ok(http::empty(StatusCode::NO_CONTENT))
    })
    .await
}

async fn unpack_body(
    query: &[(String, String)],
    mut body: Incoming,
) -> Result<Response<Body>, RestError> {
    let number = |name: &str| query_value(query, name).and_then(|text| text.parse::<u32>().ok());
    let (Some(uid), Some(gid)) = (number("uid"), number("gid")) else {
        let message = "uid and gid must be numbers";
        return Err(RestError::new(StatusCode::BAD_REQUEST, message));
    };
    let path = absolute(query_value(query, "path").unwrap_or(""))?;
    let is_apart = query_value(query, "apart") == Some("true");
    let (sender, receiver) = mpsc::channel(UNPACK_QUEUE_PIECES);
    let work = tokio::task::spawn_blocking(move || {
        let pieces = unpack::Pieces::new(receiver);
        unpack::unpack(pieces, &path, Owner { uid, gid }, is_apart)
    });
    let feed = async {
        while let Some(frame) = tokio::time::timeout(BODY_IDLE_MAX, body.frame())
            .await
            .map_err(|_| "the archive stood still".to_owned())?
        {
            let frame = frame.map_err(|error| error.to_string())?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if sender.send(Ok(data)).await.is_err() {
                return Ok(()); // it has failed, and says why
            }
        }
        Ok::<(), String>(())
    };
    if let Err(reason) = feed.await {
        let _gone = sender.send(Err(io::Error::other(reason))).await;
    }
    drop(sender);
    let outcome = work.await.map_err(|error| {
        RestError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("worker failed: {error}"),
        )
    })?;
    tokio::spawn(http::discard(body));
    match outcome {
        Ok(()) => Ok(http::empty(StatusCode::NO_CONTENT)),
        Err(failure) => Err(failed(&failure.path, &failure.error)),
    }
}

async fn worker(
    work: impl FnOnce() -> Result<Response<Body>, RestError> + Send + 'static,
) -> Result<Response<Body>, RestError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| {
            Err(RestError::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("worker failed: {error}"),
            ))
        })
}

fn absolute(text: &str) -> Result<PathBuf, RestError> {
    if text.starts_with('/') && !text.contains('\0') {
        return Ok(clean(Path::new(text)));
    }
    let message = format!("path '{text}' is not absolute");
    Err(RestError::new(StatusCode::BAD_REQUEST, message))
}

fn failed(path: &Path, error: &io::Error) -> RestError {
    let status = match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => StatusCode::INSUFFICIENT_STORAGE,
        _ => StatusCode::BAD_REQUEST,
    };
    RestError::new(status, format!("'{}': {}", path.display(), cause(error)))
}

/// Makes a folder and those that are missing above it, 0755 and `owner`'s. Returns whether it was missing.
pub fn make_folders(path: &Path, owner: Owner) -> io::Result<bool> {
    let missing: Vec<&Path> = path
        .ancestors()
        .take_while(|place| !place.is_dir())
        .collect();
    for place in missing.iter().rev() {
        std::fs::create_dir(place)?;
        give(place, owner)?;
    }
    Ok(!missing.is_empty())
}

/// Changes the owner of what is at `path` itself, link or not.
pub fn give(path: &Path, owner: Owner) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    Ok(chownat(
        CWD,
        path,
        Some(uid),
        Some(gid),
        AtFlags::SYMLINK_NOFOLLOW,
    )?)
}
