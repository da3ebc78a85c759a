//! Shape of a Connect call: read the request, call the service, write the answer or its error.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::{HeaderMap, Request, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde::Serialize;

use crate::connect::{frames, Code, Codec, ConnectError};
use crate::http::{self, full, header, Body};
use crate::limits::{DEADLINE_MAX, KEEPALIVE_DEFAULT, MESSAGE_MAX_BYTES};

/// Runs a unary call.
pub async fn unary<Q, A, F, W>(request: Request<Incoming>, handler: F) -> Response<Body>
where
    Q: DeserializeOwned,
    A: Serialize,
    F: FnOnce(Q) -> W,
    W: Future<Output = Result<A, ConnectError>>,
{
    let Some(codec) = Codec::unary(header(request.headers(), CONTENT_TYPE).unwrap_or("")) else {
        return unsupported("application/json");
    };
    let deadline = match deadline(request.headers()) {
        Ok(deadline) => deadline,
        Err(error) => return unary_error(&error),
    };
    let call = async move {
        let query = codec.decode(&read(request).await?)?;
        codec.encode_body(&handler(query).await?)
    };
    let answer = match deadline {
        None => call.await,
        Some(limit) => tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            Err(ConnectError::new(
                Code::DeadlineExceeded,
                "the deadline of the request passed",
            ))
        }),
    };
    match answer {
        Ok(bytes) => http::with_type(StatusCode::OK, Some(codec.unary_type()), bytes),
        Err(error) => unary_error(&error),
    }
}

async fn read(request: Request<Incoming>) -> Result<Bytes, ConnectError> {
    if let Some(encoding) = header(request.headers(), "content-encoding")
        .filter(|encoding| !encoding.eq_ignore_ascii_case("identity"))
    {
        return Err(ConnectError::new(
            Code::Unimplemented,
            format_args!("content encoding '{encoding}' is not supported; send identity"),
        ));
    }
    match http::read_body(request.into_body(), MESSAGE_MAX_BYTES).await {
        Ok(Some(bytes)) => Ok(bytes),
        Ok(None) => Err(ConnectError::new(
            Code::ResourceExhausted,
            format_args!("the request is larger than {MESSAGE_MAX_BYTES} bytes"),
        )),
        Err(error) => Err(ConnectError::new(
            Code::InvalidArgument,
            format_args!("cannot read the request: {error}"),
        )),
    }
}

fn unary_error(error: &ConnectError) -> Response<Body> {
    let text = serde_json::json!({"code": error.code.name(), "message": error.message}).to_string();
    http::json(error.code.status(), text)
}

/// Answer to an unknown method of a known service.
pub fn unimplemented(path: &str) -> Response<Body> {
    unary_error(&ConnectError::new(
        Code::Unimplemented,
        format_args!("{path} is not implemented"),
    ))
}

/// Codec of a streaming call, or the answer that refuses it.
pub fn streaming_codec(headers: &HeaderMap) -> Result<Codec, Box<Response<Body>>> {
    Codec::streaming(header(headers, CONTENT_TYPE).unwrap_or(""))
        .ok_or_else(|| Box::new(unsupported("application/connect+json")))
}

fn unsupported(supported: &'static str) -> Response<Body> {
    let mut response = http::empty(StatusCode::UNSUPPORTED_MEDIA_TYPE);
    response.headers_mut().insert(
        "accept-post",
        hyper::header::HeaderValue::from_static(supported),
    );
    response
}

/// The one message of a server-streaming request.
pub async fn single_message<T: DeserializeOwned>(
    codec: Codec,
    body: Incoming,
) -> Result<T, ConnectError> {
    let mut reader = frames::FrameReader::new(body, codec);
    let message = reader
        .next()
        .await?
        .ok_or_else(|| ConnectError::new(Code::InvalidArgument, "the request holds no message"))?;
    // The answer starts now; the end of the request's body may come a little later.
    tokio::spawn(reader.discard_rest());
    Ok(message)
}

/// A streaming answer; its HTTP status is always 200.
pub fn stream(codec: Codec, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(
        CONTENT_TYPE,
        hyper::header::HeaderValue::from_static(codec.streaming_type()),
    );
    response
}

/// A streaming answer that holds only an error.
pub fn stream_error(codec: Codec, error: &ConnectError) -> Response<Body> {
    stream(codec, full(frames::end(Some(error))))
}

/// `Connect-Timeout-Ms`; absent means unlimited (contract section 3.3).
pub fn deadline(headers: &HeaderMap) -> Result<Option<Duration>, ConnectError> {
    let Some(text) = header(headers, "connect-timeout-ms") else {
        return Ok(None);
    };
    let milliseconds: u64 = text.trim().parse().map_err(|_| {
        ConnectError::new(
            Code::InvalidArgument,
            format_args!("Connect-Timeout-Ms '{text}' is not a number of milliseconds"),
        )
    })?;
    Ok(Some(Duration::from_millis(milliseconds).min(DEADLINE_MAX)))
}

/// `Keepalive-Ping-Interval` in seconds.
pub fn keepalive(headers: &HeaderMap) -> Duration {
    match header(headers, "keepalive-ping-interval")
        .and_then(|text| text.trim().parse::<u64>().ok())
    {
        Some(seconds @ 1..) => Duration::from_secs(seconds).min(DEADLINE_MAX),
        _ => KEEPALIVE_DEFAULT,
    }
}
