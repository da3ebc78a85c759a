//! REST files: download, upload, compose (contract section 3.2).
//!
//! Invariants: no file is ever in memory as a whole; every access has the identity of the user; an
//! upload is answered with success only after its last byte was written.

pub mod compose;
pub mod download;
pub mod metadata;
pub mod multipart;
pub mod ranges;
pub mod turns;
pub mod upload;

use std::io;
use std::path::{Path, PathBuf};

use hyper::StatusCode;

use crate::app::App;
use crate::connect::error::cause;
use crate::filesystem::paths;
use crate::http::RestError;
use crate::users::User;

/// User of a request by its `username`, else the default one.
fn user(app: &App, name: Option<&str>) -> Result<User, RestError> {
    app.find_user(name).map_err(|name| {
        RestError::new(
            StatusCode::UNAUTHORIZED,
            format!("error looking up user '{name}': no such user"),
        )
    })
}

/// Absolute path for a path of the request.
fn resolve(app: &App, user: &User, path: &str) -> Result<PathBuf, RestError> {
    let workdir = app.settings().default_workdir.clone();
    paths::resolve(path, user, workdir.as_deref())
        .map_err(|error| RestError::new(StatusCode::BAD_REQUEST, error.message))
}

/// Answer for a failed system call on `path`.
fn failed(path: &Path, error: &io::Error) -> RestError {
    let shown = path.display();
    let with = |status, text: String| RestError::new(status, text);
    match error.raw_os_error() {
        Some(libc::ENOENT) => with(
            StatusCode::NOT_FOUND,
            format!("path '{shown}' does not exist"),
        ),
        Some(libc::EISDIR) => with(
            StatusCode::BAD_REQUEST,
            format!("path '{shown}' is a directory"),
        ),
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => with(
            StatusCode::FORBIDDEN,
            format!("path '{shown}': {}", cause(error)),
        ),
        Some(libc::E2BIG) => with(
            StatusCode::BAD_REQUEST,
            format!("path '{shown}': its file system has no room for this metadata; use less"),
        ),
        Some(libc::EOPNOTSUPP) => with(
            StatusCode::BAD_REQUEST,
            format!("path '{shown}': its file system keeps no metadata; upload without"),
        ),
        Some(libc::ENOSPC | libc::EDQUOT) => with(
            StatusCode::INSUFFICIENT_STORAGE,
            format!("path '{shown}': no space left on device; free some or use a larger disk"),
        ),
        Some(
            libc::ENOTDIR
            | libc::ENAMETOOLONG
            | libc::ELOOP
            | libc::EINVAL
            | libc::ENXIO
            | libc::ETXTBSY,
        ) => with(
            StatusCode::BAD_REQUEST,
            format!("path '{shown}': {}", cause(error)),
        ),
        _ => with(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("path '{shown}': {}", cause(error)),
        ),
    }
}
