//! The methods of `filesystem.Filesystem`; those that watch are in [`super::watch`].

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, Response};
use serde::{Deserialize, Serialize};

use super::entry::EntryInfo;
use super::paths;
use super::pinned::Pinned;
use super::remove::remove_tree;
use super::watch::service as watch;
use crate::app::App;
use crate::connect::{lenient, Code, ConnectError};
use crate::http::{basic_user, Body};
use crate::limits::{LIST_DEPTH_MAX, LIST_ENTRIES_MAX};
use crate::process::messages::Empty;
use crate::rpc;
use crate::sys;
use crate::users::{Accounts, Names, User};

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
struct PathRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "lenient::or_default")]
    path: String,
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
struct ListRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "lenient::or_default")]
    path: String,
    #[prost(uint32, tag = "2")]
    #[serde(deserialize_with = "lenient::unsigned")]
    depth: u32,
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
struct MoveRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "lenient::or_default")]
    source: String,
    #[prost(string, tag = "2")]
    #[serde(deserialize_with = "lenient::or_default")]
    destination: String,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
struct EntryResponse {
    #[prost(message, optional, tag = "1")]
    entry: Option<EntryInfo>,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<EntryInfo>,
}

/// Who asks and how their paths are read.
pub struct Caller {
    /// The user.
    pub user: User,
    workdir: Option<PathBuf>,
}

impl Caller {
    /// The caller of an RPC by the user name it gives, if any.
    pub fn of(app: &App, user_name: Option<&str>) -> Result<Self, ConnectError> {
        Ok(Self {
            user: app.rpc_user(user_name)?,
            workdir: app.settings().default_workdir.clone(),
        })
    }

    /// Absolute path for a path of the request.
    pub fn resolve(&self, path: &str) -> Result<PathBuf, ConnectError> {
        paths::resolve(path, &self.user, self.workdir.as_deref())
    }
}

/// Runs `work` on a worker thread with the identity of `user`.
pub async fn as_user<T: Send + 'static>(
    user: User,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let task = tokio::task::spawn_blocking(move || {
        sys::with_file_identity(user.uid, user.gid, &user.groups, work)
    });
    task.await
        .map_err(|error| io::Error::other(format!("worker failed: {error}")))
}

/// Runs `work` on a worker thread with the agent's own identity; for [`super::pinned`] places alone.
pub async fn as_agent<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| io::Error::other(format!("worker failed: {error}")))
}

/// Answers one call.
pub async fn handle(app: Arc<App>, method: &str, request: Request<Incoming>) -> Response<Body> {
    let user_name = basic_user(request.headers());
    match method {
        "Stat" => {
            rpc::unary(request, |query: PathRequest| {
                call(app, user_name, move |caller| stat(caller, &query))
            })
            .await
        }
        "MakeDir" => {
            rpc::unary(request, |query: PathRequest| {
                call_twice(app, user_name, query, make_dir, make_dir_pinned)
            })
            .await
        }
        "Move" => {
            rpc::unary(request, |query: MoveRequest| {
                call_twice(app, user_name, query, rename, rename_pinned)
            })
            .await
        }
        "ListDir" => {
            rpc::unary(request, |query: ListRequest| {
                call(app, user_name, move |caller| list(caller, &query))
            })
            .await
        }
        "Remove" => {
            rpc::unary(request, |query: PathRequest| {
                call_twice(app, user_name, query, remove, remove_pinned)
            })
            .await
        }
        "WatchDir" => watch::watch_dir(app, request).await,
        "CreateWatcher" => watch::create_watcher(app, request).await,
        "GetWatcherEvents" => watch::watcher_events(app, request).await,
        "RemoveWatcher" => watch::remove_watcher(app, request).await,
        _ => rpc::unimplemented(request.uri().path()),
    }
}

async fn call<A: Send + 'static>(
    app: Arc<App>,
    user_name: Option<String>,
    work: impl FnOnce(&Caller) -> Result<A, ConnectError> + Send + 'static,
) -> Result<A, ConnectError> {
    let caller = Caller::of(&app, user_name.as_deref())?;
    as_user(caller.user.clone(), move || work(&caller))
        .await
        .map_err(|error| ConnectError::new(Code::Internal, error))?
}

/// As the user and, where they may not, at the same place [`super::pinned`] for the agent.
async fn call_twice<Q: Send + Sync + 'static, A: Send + 'static>(
    app: Arc<App>,
    user_name: Option<String>,
    query: Q,
    as_user: fn(&Caller, &Q) -> Result<A, ConnectError>,
    pinned: fn(&Caller, &Q) -> Result<A, ConnectError>,
) -> Result<A, ConnectError> {
    let query = Arc::new(query);
    let asked = query.clone();
    let first = call(app.clone(), user_name.clone(), move |caller| {
        as_user(caller, &asked)
    });
    match first.await {
        Err(error) if error.code == Code::PermissionDenied => {
            let caller = Caller::of(&app, user_name.as_deref())?;
            as_agent(move || pinned(&caller, &query))
                .await
                .map_err(|error| ConnectError::new(Code::Internal, error))?
        }
        other => other,
    }
}

/// The error of a system call on a path.
pub fn failed(path: &Path, error: &io::Error) -> ConnectError {
    if error.raw_os_error() == Some(libc::ENOENT) {
        return ConnectError::new(
            Code::NotFound,
            format_args!("path '{}' does not exist", path.display()),
        );
    }
    ConnectError::from_io(format_args!("path '{}'", path.display()), error)
}

fn entry(path: &Path) -> Result<EntryResponse, ConnectError> {
    let names = Accounts::load().names();
    Ok(EntryResponse {
        entry: Some(EntryInfo::read(path, &names).map_err(|error| failed(path, &error))?),
    })
}

fn stat(caller: &Caller, query: &PathRequest) -> Result<EntryResponse, ConnectError> {
    entry(&caller.resolve(&query.path)?)
}

fn make_dir(caller: &Caller, query: &PathRequest) -> Result<EntryResponse, ConnectError> {
    let path = caller.resolve(&query.path)?;
    match fs::metadata(&path) {
        Ok(info) if info.is_dir() => {
            return Err(ConnectError::new(
                Code::AlreadyExists,
                format_args!("directory '{}' already exists", path.display()),
            ));
        }
        Ok(_) => {
            return Err(ConnectError::new(
                Code::InvalidArgument,
                format_args!("path '{}' exists and is not a directory", path.display()),
            ))
        }
        Err(_) => make_parents(&path).map_err(|error| failed(&path, &error))?,
    }
    entry(&path)
}

fn make_dir_pinned(caller: &Caller, query: &PathRequest) -> Result<EntryResponse, ConnectError> {
    let path = caller.resolve(&query.path)?;
    let made = Pinned::reach(&path, Some(&caller.user)).and_then(|it| it.make_dir(&caller.user));
    match made {
        // It may be there where the user cannot see it; what it is decides about the answer.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => make_dir(caller, query),
        made => made
            .map_err(|error| failed(&path, &error))
            .and_then(|()| entry(&path)),
    }
}

/// Makes a folder and what is missing above it, 0755.
pub fn make_parents(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

fn rename(caller: &Caller, query: &MoveRequest) -> Result<EntryResponse, ConnectError> {
    let source = caller.resolve(&query.source)?;
    let destination = caller.resolve(&query.destination)?;
    fs::symlink_metadata(&source).map_err(|error| failed(&source, &error))?;
    if let Some(parent) = destination.parent() {
        make_parents(parent).map_err(|error| failed(parent, &error))?;
    }
    fs::rename(&source, &destination)
        .map_err(|error| cannot_move(&source, &destination, &error))?;
    entry(&destination)
}

fn rename_pinned(caller: &Caller, query: &MoveRequest) -> Result<EntryResponse, ConnectError> {
    let source = caller.resolve(&query.source)?;
    let destination = caller.resolve(&query.destination)?;
    let from = Pinned::reach(&source, None).map_err(|error| failed(&source, &error))?;
    fs::symlink_metadata(from.path()).map_err(|error| failed(&source, &error))?;
    let to = Pinned::reach(&destination, Some(&caller.user))
        .map_err(|error| failed(&destination, &error))?;
    fs::rename(from.path(), to.path())
        .map_err(|error| cannot_move(&source, &destination, &error))?;
    entry(&destination)
}

fn cannot_move(source: &Path, destination: &Path, error: &io::Error) -> ConnectError {
    let (source, destination) = (source.display(), destination.display());
    ConnectError::from_io(
        format_args!("cannot move '{source}' to '{destination}'"),
        error,
    )
}

fn remove(caller: &Caller, query: &PathRequest) -> Result<Empty, ConnectError> {
    let path = caller.resolve(&query.path)?;
    if path == Path::new("/") {
        return Err(ConnectError::new(
            Code::InvalidArgument,
            "the root folder cannot be removed; kill the sandbox instead",
        ));
    }
    removed(&path, remove_tree(&path))
}

fn remove_pinned(caller: &Caller, query: &PathRequest) -> Result<Empty, ConnectError> {
    let path = caller.resolve(&query.path)?;
    removed(
        &path,
        Pinned::reach(&path, None).and_then(|it| remove_tree(&it.path())),
    )
}

/// What is not there is as good as removed.
fn removed(path: &Path, result: io::Result<()>) -> Result<Empty, ConnectError> {
    match result {
        Err(error) if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => {
            Err(failed(path, &error))
        }
        _ => Ok(Empty {}),
    }
}

fn list(caller: &Caller, query: &ListRequest) -> Result<ListResponse, ConnectError> {
    let path = caller.resolve(&query.path)?;
    let info = fs::metadata(&path).map_err(|error| failed(&path, &error))?;
    if !info.is_dir() {
        return Err(ConnectError::new(
            Code::InvalidArgument,
            format_args!("path '{}' is not a directory", path.display()),
        ));
    }
    let depth = query.depth.max(1);
    if depth > LIST_DEPTH_MAX {
        return Err(ConnectError::new(
            Code::InvalidArgument,
            format_args!("depth {depth} is above the limit of {LIST_DEPTH_MAX}"),
        ));
    }
    let mut listing = Listing {
        names: Accounts::load().names(),
        entries: Vec::new(),
    };
    let top = read_names(&path).map_err(|error| failed(&path, &error))?;
    listing.walk(&path, top, depth)?;
    Ok(ListResponse {
        entries: listing.entries,
    })
}

struct Listing {
    names: Names,
    entries: Vec<EntryInfo>,
}

impl Listing {
    /// Depth first, names in order. Links below the top are not followed.
    fn walk(
        &mut self,
        top: &Path,
        names: Vec<std::ffi::OsString>,
        depth: u32,
    ) -> Result<(), ConnectError> {
        // An explicit stack: the depth of a tree is the guest's choice, ours is not.
        let mut stack = vec![(top.to_owned(), names.into_iter())];
        while let Some((folder, names)) = stack.last_mut() {
            let Some(name) = names.next() else {
                stack.pop();
                continue;
            };
            let path = folder.join(name);
            // What vanished meanwhile is not there.
            let Ok(entry) = EntryInfo::read(&path, &self.names) else {
                continue;
            };
            let descend = entry.kind() == super::entry::FileType::Directory
                && !entry.is_symlink
                && (stack.len() as u32) < depth;
            self.entries.push(entry);
            if self.entries.len() > LIST_ENTRIES_MAX {
                return Err(ConnectError::new(
                    Code::ResourceExhausted,
                    format_args!("more than {LIST_ENTRIES_MAX} entries below '{}'; list a smaller folder or depth", top.display()),
                ));
            }
            if descend {
                // A folder the user may not read is listed, its contents are not.
                let below = read_names(&path).unwrap_or_default();
                stack.push((path, below.into_iter()));
            }
        }
        Ok(())
    }
}

fn read_names(folder: &Path) -> io::Result<Vec<std::ffi::OsString>> {
    let mut names: Vec<_> = fs::read_dir(folder)?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<io::Result<_>>()?;
    names.sort_unstable();
    Ok(names)
}
