//! Shape of a Connect call: read the request, call the service, write the answer or its error.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{HeaderValue, CONTENT_ENCODING, CONTENT_TYPE, VARY};
use hyper::{HeaderMap, Request, Response, StatusCode};

use crate::connect::compression::{compress, decompress};
use crate::connect::frames::{self, Format};
use crate::connect::{self, Answer, Code, Codec, Compression, ConnectError};
use crate::files::ranges::{self, Encoding};
use crate::http::{self, full, header, Body};
use crate::limits::{DEADLINE_MAX, FIRST_MESSAGE_WAIT, KEEPALIVE_DEFAULT, MESSAGE_MAX_BYTES};

/// Runs a unary call.
pub async fn unary<Q, A, F, W>(request: Request<Incoming>, handler: F) -> Response<Body>
where
    Q: connect::Request,
    A: Answer,
    F: FnOnce(Q) -> W,
    W: Future<Output = Result<A, ConnectError>>,
{
    let Some(codec) = Codec::unary(header(request.headers(), CONTENT_TYPE).unwrap_or("")) else {
        return unsupported("application/json, application/proto");
    };
    let answer_encoding = ranges::negotiate(request.headers());
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
        Ok(bytes) => unary_answer(codec, answer_encoding, bytes),
        Err(error) => unary_error(&error),
    }
}

async fn read(request: Request<Incoming>) -> Result<Bytes, ConnectError> {
    let compression = Compression::of_request(request.headers(), "content-encoding")?;
    let bytes = http::read_body(request.into_body(), MESSAGE_MAX_BYTES).await?;
    match compression {
        Compression::Gzip if !bytes.is_empty() => decompress(&bytes),
        _ => Ok(bytes),
    }
}

/// Answers are compressed by the same rule as downloads: when the client weighs gzip above identity.
fn unary_answer(codec: Codec, encoding: Option<Encoding>, bytes: Bytes) -> Response<Body> {
    let wanted = encoding == Some(Encoding::Gzip) && Compression::Gzip.pays_for(bytes.len());
    let mut packed = Vec::new();
    // Writing to memory does not fail; were it to, the answer goes as it is.
    let is_packed = wanted && compress(&bytes, &mut packed).is_ok();
    let bytes = if is_packed { packed.into() } else { bytes };
    let mut response = http::with_type(StatusCode::OK, Some(codec.unary_type()), bytes);
    if is_packed {
        let headers = response.headers_mut();
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        headers.insert(VARY, HeaderValue::from_static("Accept-Encoding"));
    }
    response
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

/// Format of a streaming call, or the answer that refuses it.
pub fn stream_format(headers: &HeaderMap) -> Result<Format, Box<Response<Body>>> {
    let codec = Codec::streaming(header(headers, CONTENT_TYPE).unwrap_or("")).ok_or_else(|| {
        Box::new(unsupported(
            "application/connect+json, application/connect+proto",
        ))
    })?;
    let plain = Format {
        codec,
        request: Compression::Identity,
        answer: Compression::Identity,
    };
    match Compression::of_request(headers, "connect-content-encoding") {
        Ok(request) => Ok(Format {
            request,
            answer: Compression::of_stream_answer(headers),
            ..plain
        }),
        Err(error) => Err(Box::new(stream_error(plain, &error))),
    }
}

fn unsupported(supported: &'static str) -> Response<Body> {
    let mut response = http::empty(StatusCode::UNSUPPORTED_MEDIA_TYPE);
    response
        .headers_mut()
        .insert("accept-post", HeaderValue::from_static(supported));
    response
}

/// The one message of a server-streaming request.
pub async fn single_message<T: connect::Request>(
    format: Format,
    body: Incoming,
) -> Result<T, ConnectError> {
    let mut reader = frames::FrameReader::new(body, format);
    let first = tokio::time::timeout(FIRST_MESSAGE_WAIT, reader.next()).await;
    // The answer starts now; the end of the request's body may come a little later.
    tokio::spawn(reader.discard_rest());
    let message = first.map_err(|_| {
        ConnectError::new(
            Code::DeadlineExceeded,
            format_args!(
                "the request's message did not arrive within {} s",
                FIRST_MESSAGE_WAIT.as_secs()
            ),
        )
    })??;
    message.ok_or_else(|| ConnectError::new(Code::InvalidArgument, "the request holds no message"))
}

/// A streaming answer; its HTTP status is always 200.
pub fn stream(format: Format, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static(format.codec.streaming_type()),
    );
    if format.answer == Compression::Gzip {
        headers.insert("connect-content-encoding", HeaderValue::from_static("gzip"));
    }
    response
}

/// A streaming answer that holds only an error.
pub fn stream_error(format: Format, error: &ConnectError) -> Response<Body> {
    stream(format, full(frames::end(Some(error))))
}

/// `Connect-Timeout-Ms`; absent means unlimited (contract section 3.3), and so does 0, which is how the
/// clients' own option says it.
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
    Ok((milliseconds > 0).then(|| Duration::from_millis(milliseconds).min(DEADLINE_MAX)))
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
