//! `GET /files`: bytes of a file.

use std::fs::File;
use std::future::Future;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use flate2::write::GzEncoder;
use flate2::Compression;
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::header::{self, HeaderValue};
use hyper::{HeaderMap, Response, StatusCode};
use tokio::task::JoinHandle;

use super::ranges::{self, Encoding, Selection};
use crate::app::App;
use crate::clock;
use crate::filesystem::service::as_user;
use crate::filesystem::watch::mounts::is_made_up;
use crate::http::{self, query_value, Body, RestError};
use crate::limits::FILE_CHUNK_BYTES;

/// A file open for reading.
struct Opened {
    file: File,
    /// 0 where it is not known before the end: files of procfs say 0, those of sysfs a page, whatever
    /// they hold.
    size_bytes: u64,
    modified_seconds: i64,
}

/// Answers the request. `with_body` is false for HEAD.
pub async fn handle(
    app: Arc<App>,
    headers: &HeaderMap,
    query: &[(String, String)],
    with_body: bool,
) -> Response<Body> {
    match try_download(&app, headers, query, with_body).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn try_download(
    app: &App,
    headers: &HeaderMap,
    query: &[(String, String)],
    with_body: bool,
) -> Result<Response<Body>, RestError> {
    let user = super::user(app, query_value(query, "username"))?;
    let path = super::resolve(app, &user, query_value(query, "path").unwrap_or(""))?;
    let selective = ranges::is_selective(headers);
    let encoding = match ranges::negotiate(headers) {
        Some(encoding) if !selective => encoding,
        Some(_) => Encoding::Identity,
        None => {
            return Err(RestError::new(
                StatusCode::NOT_ACCEPTABLE,
                "no acceptable encoding; accept gzip or identity",
            ))
        }
    };
    let target = path.clone();
    let opened = as_user(user, move || open(&target))
        .await
        .map_err(|error| super::failed(&path, &error))??;
    respond(opened, &path, headers, encoding, with_body)
}

/// Opens a regular file. Anything that could block or is no file is refused.
fn open(path: &Path) -> Result<Opened, RestError> {
    let mut options = File::options();
    options
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options
        .open(path)
        .map_err(|error| super::failed(path, &error))?;
    let info = file
        .metadata()
        .map_err(|error| super::failed(path, &error))?;
    if info.is_dir() {
        return Err(super::failed(
            path,
            &io::Error::from_raw_os_error(libc::EISDIR),
        ));
    }
    if !info.is_file() {
        return Err(RestError::new(
            StatusCode::BAD_REQUEST,
            format!("path '{}' is not a regular file", path.display()),
        ));
    }
    let size_bytes = match is_made_up(&file) {
        true => 0,
        false => info.len(),
    };
    Ok(Opened {
        file,
        size_bytes,
        modified_seconds: info.mtime(),
    })
}

fn respond(
    mut opened: Opened,
    path: &Path,
    request: &HeaderMap,
    encoding: Encoding,
    with_body: bool,
) -> Result<Response<Body>, RestError> {
    let sized = opened.size_bytes > 0;
    let selection = if sized {
        ranges::select(request, opened.size_bytes, opened.modified_seconds)
    } else {
        Selection::Whole
    };
    let (status, start, length) = match selection {
        Selection::Whole => (StatusCode::OK, 0, opened.size_bytes),
        Selection::Part { start, length } => (StatusCode::PARTIAL_CONTENT, start, length),
        Selection::NotModified => (StatusCode::NOT_MODIFIED, 0, 0),
        Selection::PreconditionFailed => (StatusCode::PRECONDITION_FAILED, 0, 0),
        Selection::Unsatisfiable => {
            let mut response = RestError::new(
                StatusCode::RANGE_NOT_SATISFIABLE,
                "the range starts after the end of the file",
            )
            .into_response();
            set(
                response.headers_mut(),
                header::CONTENT_RANGE,
                &format!("bytes */{}", opened.size_bytes),
            );
            return Ok(response);
        }
    };
    let mut response = http::empty(status);
    let headers = response.headers_mut();
    set(headers, header::CONTENT_DISPOSITION, &disposition(path));
    set(
        headers,
        header::LAST_MODIFIED,
        &clock::format_http_date(opened.modified_seconds),
    );
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    if !status.is_success() {
        return Ok(response);
    }
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static(content_type(path)),
    );
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if status == StatusCode::PARTIAL_CONTENT {
        set(
            headers,
            header::CONTENT_RANGE,
            &format!("bytes {start}-{}/{}", start + length - 1, opened.size_bytes),
        );
        opened
            .file
            .seek(SeekFrom::Start(start))
            .map_err(|error| super::failed(path, &error))?;
    }
    let gzip = encoding == Encoding::Gzip;
    if gzip {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    } else if sized {
        set(headers, header::CONTENT_LENGTH, &length.to_string());
    }
    if with_body {
        *response.body_mut() =
            FileBody::new(opened.file, sized.then_some(length), gzip, path.to_owned())
                .boxed_unsync();
    }
    Ok(response)
}

fn set(headers: &mut HeaderMap, name: header::HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// `inline` with the file's name, in both spellings where it is not plain ASCII.
fn disposition(path: &Path) -> String {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&+-.^_`|~ ".contains(&byte);
    if name.bytes().all(plain) {
        return format!("inline; filename=\"{name}\"");
    }
    let ascii: String = name
        .chars()
        .map(|letter| {
            if letter.is_ascii() && plain(letter as u8) {
                letter
            } else {
                '_'
            }
        })
        .collect();
    let mut encoded = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(byte as char);
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    format!("inline; filename=\"{ascii}\"; filename*=UTF-8''{encoded}")
}

/// What a browser needs to show a file; all else is bytes.
fn content_type(path: &Path) -> &'static str {
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or("")
        .to_ascii_lowercase();
    match extension.as_str() {
        "txt" | "log" | "md" | "py" | "sh" => "text/plain; charset=utf-8",
        "html" | "htm" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "csv" => "text/csv; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" => "application/json",
        "xml" => "text/xml; charset=utf-8",
        "pdf" => "application/pdf",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "svg" => "image/svg+xml",
        "webp" => "image/webp",
        "mp4" => "video/mp4",
        "wasm" => "application/wasm",
        _ => "application/octet-stream",
    }
}

/// Where the bytes come from.
struct Reader {
    file: File,
    /// Bytes still to read; None reads to the end.
    left: Option<u64>,
    encoder: Option<GzEncoder<Vec<u8>>>,
    path: PathBuf,
}

impl Reader {
    /// The next piece; None at the end. A file that shrank under us is an error, not a short answer.
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            let want = self.left.map_or(FILE_CHUNK_BYTES, |left| {
                left.min(FILE_CHUNK_BYTES as u64) as usize
            });
            let mut buffer = vec![0u8; want];
            let count = if want == 0 {
                0
            } else {
                self.file.read(&mut buffer)?
            };
            buffer.truncate(count);
            if count == 0 {
                if self.left.is_some_and(|left| left > 0) {
                    return Err(io::Error::other(format!(
                        "'{}' became shorter while it was read",
                        self.path.display()
                    )));
                }
                let rest = self.encoder.take().map(GzEncoder::finish).transpose()?;
                return Ok(rest.filter(|rest| !rest.is_empty()).map(Bytes::from));
            }
            self.left = self.left.map(|left| left - count as u64);
            let Some(encoder) = &mut self.encoder else {
                return Ok(Some(buffer.into()));
            };
            encoder.write_all(&buffer)?;
            let ready = std::mem::take(encoder.get_mut());
            if !ready.is_empty() {
                return Ok(Some(ready.into()));
            }
        }
    }
}

enum State {
    Idle(Reader),
    Reading(JoinHandle<(Reader, io::Result<Option<Bytes>>)>),
    Done,
}

/// Body that reads one piece at a time on a worker thread, when the connection asks for it.
struct FileBody {
    state: State,
}

impl FileBody {
    fn new(file: File, left: Option<u64>, gzip: bool, path: PathBuf) -> Self {
        let encoder = gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast()));
        Self {
            state: State::Idle(Reader {
                file,
                left,
                encoder,
                path,
            }),
        }
    }
}

impl http_body::Body for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            match std::mem::replace(&mut self.state, State::Done) {
                State::Done => return Poll::Ready(None),
                State::Idle(mut reader) => {
                    let read = move || {
                        let piece = reader.next();
                        (reader, piece)
                    };
                    self.state = State::Reading(tokio::task::spawn_blocking(read));
                }
                State::Reading(mut task) => match Pin::new(&mut task).poll(context) {
                    Poll::Pending => {
                        self.state = State::Reading(task);
                        return Poll::Pending;
                    }
                    Poll::Ready(Ok((reader, Ok(Some(bytes))))) => {
                        self.state = State::Idle(reader);
                        return Poll::Ready(Some(Ok(Frame::data(bytes))));
                    }
                    Poll::Ready(Ok((_, Ok(None)))) => return Poll::Ready(None),
                    Poll::Ready(Ok((_, Err(error)))) => return Poll::Ready(Some(Err(error))),
                    Poll::Ready(Err(error)) => {
                        return Poll::Ready(Some(Err(io::Error::other(error))))
                    }
                },
            }
        }
    }
}
