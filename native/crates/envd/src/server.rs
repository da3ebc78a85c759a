//! The listener and the routes.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{HeaderName, HeaderValue, CACHE_CONTROL, ORIGIN};
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::app::App;
use crate::auth;
use crate::files;
use crate::filesystem;
use crate::freeze;
use crate::http::{self, query_pairs, Body, RestError};
use crate::init;
use crate::limits::{ACCEPT_RETRY, CONNECTIONS_MAX, IDLE_TIMEOUT};
use crate::metrics;
use crate::process;
use crate::provision;

/// Serves connections until the program ends.
pub async fn serve(app: Arc<App>, listener: TcpListener) -> io::Result<Infallible> {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let (socket, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) if error.raw_os_error() == Some(libc::ECONNABORTED) => continue,
            Err(error) => {
                // Out of descriptors or memory: those in use will come back.
                eprintln!("envd: accept: {error}");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let slot = slots.clone().try_acquire_owned().ok();
        if slot.is_none() && !app.internal.allows(peer.ip()) {
            // Closing says it at once; the clients retry.
            continue;
        }
        // Frames are small and each one counts.
        let _closed = socket.set_nodelay(true);
        let app = app.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(app.clone(), peer, request));
            let mut builder = auto::Builder::new(TokioExecutor::new());
            builder
                .http1()
                .timer(TokioTimer::new())
                .header_read_timeout(IDLE_TIMEOUT);
            builder.http2().timer(TokioTimer::new());
            // A broken connection concerns its client only.
            let _broken = builder
                .serve_connection(TokioIo::new(socket), service)
                .await;
            drop(slot);
        });
    }
}

async fn answer(
    app: Arc<App>,
    peer: SocketAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let cross_origin = request.headers().contains_key(ORIGIN);
    let mut response = if request.method() == Method::OPTIONS {
        preflight(request.headers())
    } else {
        route(app, peer.ip(), request).await
    };
    if cross_origin {
        let headers = response.headers_mut();
        headers.insert(
            HeaderName::from_static("access-control-allow-origin"),
            HeaderValue::from_static("*"),
        );
        headers.insert(
            HeaderName::from_static("access-control-expose-headers"),
            HeaderValue::from_static("*"),
        );
    }
    Ok(response)
}

/// CORS for any origin and header (contract section 1.6).
fn preflight(request: &HeaderMap) -> Response<Body> {
    let mut response = http::empty(StatusCode::NO_CONTENT);
    let headers = response.headers_mut();
    headers.insert(
        "access-control-allow-methods",
        HeaderValue::from_static("HEAD, GET, POST, PUT, PATCH, DELETE"),
    );
    // A star would leave out Authorization, so the asked-for names are repeated.
    let asked = request
        .get("access-control-request-headers")
        .cloned()
        .unwrap_or(HeaderValue::from_static("*"));
    headers.insert("access-control-allow-headers", asked);
    headers.insert("access-control-max-age", HeaderValue::from_static("7200"));
    response
}

fn not_found(path: &str) -> Response<Body> {
    RestError::new(StatusCode::NOT_FOUND, format!("no such endpoint: {path}")).into_response()
}

async fn route(app: Arc<App>, peer: IpAddr, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    match (&method, path.as_str()) {
        (&Method::GET | &Method::HEAD, "/health") => {
            let mut response = http::empty(StatusCode::NO_CONTENT);
            response
                .headers_mut()
                .insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            return response;
        }
        (_, "/init" | "/fsfreeze" | "/fsthaw") if !app.internal.allows(peer) => {
            return not_found(&path)
        }
        _ if path.starts_with("/provision/") && !app.internal.allows(peer) => {
            return not_found(&path)
        }
        (&Method::POST, "/init") => return init::handle(app, request).await,
        (_, "/fsfreeze") => return freeze::handle(app, &method, true).await,
        (_, "/fsthaw") => return freeze::handle(app, &method, false).await,
        _ => {}
    }
    let query = match query_pairs(request.uri().query()) {
        Ok(query) => query,
        Err(refusal) => {
            tokio::spawn(http::discard(request.into_body()));
            return refusal.into_response();
        }
    };
    if let Some(call) = path.strip_prefix("/provision/") {
        return provision::handle(&method, call, &query, request).await;
    }
    if let Err(refusal) = auth::check(&app, &method, &path, request.headers(), &query) {
        tokio::spawn(http::discard(request.into_body()));
        return refusal.into_response();
    }
    if let Some((service, call)) = path.strip_prefix('/').and_then(|path| path.split_once('/')) {
        let known = matches!(service, "process.Process" | "filesystem.Filesystem");
        if known && method != Method::POST {
            return RestError::new(StatusCode::METHOD_NOT_ALLOWED, "calls are made by POST")
                .into_response();
        }
        match service {
            "process.Process" => return process::service::handle(app, call, request).await,
            "filesystem.Filesystem" => {
                return filesystem::service::handle(app, call, request).await
            }
            _ => {}
        }
    }
    rest(app, &method, &path, &query, request).await
}

async fn rest(
    app: Arc<App>,
    method: &Method,
    path: &str,
    query: &[(String, String)],
    request: Request<Incoming>,
) -> Response<Body> {
    match (method, path) {
        (&Method::GET, "/files") => {
            files::download::handle(app, request.headers(), query, true).await
        }
        (&Method::HEAD, "/files") => {
            files::download::handle(app, request.headers(), query, false).await
        }
        (&Method::POST, "/files") => files::upload::handle(app, request, query).await,
        (&Method::POST, "/files/compose") => files::compose::handle(app, request).await,
        (&Method::GET, "/metrics") => http::json(
            StatusCode::OK,
            serde_json::json!(metrics::read(&app)).to_string(),
        ),
        (&Method::GET, "/envs") => http::json(
            StatusCode::OK,
            serde_json::json!(app.settings().envs).to_string(),
        ),
        (_, "/health" | "/init" | "/files" | "/files/compose" | "/metrics" | "/envs") => {
            RestError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("{method} is not allowed on {path}"),
            )
            .into_response()
        }
        _ => not_found(path),
    }
}
