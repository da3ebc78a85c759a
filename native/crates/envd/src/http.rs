//! Body types and small helpers shared by the handlers.

use std::io;

use base64::Engine;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::{HeaderName, HeaderValue, AUTHORIZATION, CONTENT_TYPE};
use hyper::{HeaderMap, Response, StatusCode};

use crate::connect::lenient::BASE64;
use crate::limits::{REFUSED_BODY_MAX_BYTES, REFUSED_BODY_WAIT};

/// Body of every answer.
pub type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, io::Error>;

/// An answer of the REST endpoints that is not a success: `{"code","message"}` (contract section 3.2).
#[derive(Debug, thiserror::Error)]
#[error("{status}: {message}")]
pub struct RestError {
    /// HTTP status, repeated in the body.
    pub status: StatusCode,
    /// Cause.
    pub message: String,
}

impl RestError {
    /// Builds an error.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    /// Turns the error into its answer.
    pub fn into_response(self) -> Response<Body> {
        json(
            self.status,
            serde_json::json!({"code": self.status.as_u16(), "message": self.message}).to_string(),
        )
    }
}

/// A body held in memory.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// An answer without a body.
pub fn empty(status: StatusCode) -> Response<Body> {
    with_type(status, None, Bytes::new())
}

/// A JSON answer.
pub fn json(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    with_type(status, Some("application/json"), text.into())
}

/// An answer of a fixed content type.
pub fn with_type(
    status: StatusCode,
    content_type: Option<&'static str>,
    bytes: Bytes,
) -> Response<Body> {
    let mut response = Response::new(full(bytes));
    *response.status_mut() = status;
    if let Some(content_type) = content_type {
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    }
    response
}

/// A header as text; absent or not ASCII is None.
pub fn header(headers: &HeaderMap, name: impl AsName) -> Option<&str> {
    headers
        .get(name.as_name())
        .and_then(|value| value.to_str().ok())
}

/// Header names given as constants or text.
pub trait AsName {
    /// The name.
    fn as_name(&self) -> HeaderName;
}

impl AsName for HeaderName {
    fn as_name(&self) -> HeaderName {
        self.clone()
    }
}

impl AsName for &'static str {
    fn as_name(&self) -> HeaderName {
        HeaderName::from_static(self)
    }
}

/// Reads a whole body of at most `limit_bytes`. None when it is larger.
pub async fn read_body(body: Incoming, limit_bytes: usize) -> io::Result<Option<Bytes>> {
    match Limited::new(body, limit_bytes).collect().await {
        Ok(collected) => Ok(Some(collected.to_bytes())),
        Err(error) if error.is::<LengthLimitError>() => Ok(None),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Reads a body nobody wants, within limits. A connection closed with unread data is reset, and the
/// reset can overtake the answer that tells why.
pub async fn discard(mut body: Incoming) {
    let read = async {
        let mut left = REFUSED_BODY_MAX_BYTES;
        while let Some(Ok(frame)) = body.frame().await {
            left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
            if left == 0 {
                break;
            }
        }
    };
    let _slow = tokio::time::timeout(REFUSED_BODY_WAIT, read).await;
}

/// User name of a Basic authorization header; it never carries a credential (contract section 3.1).
pub fn basic_user(headers: &HeaderMap) -> Option<String> {
    let value = header(headers, AUTHORIZATION)?;
    let (scheme, rest) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = BASE64.decode(rest.trim()).ok()?;
    let text = String::from_utf8(decoded).ok()?;
    let name = text.split(':').next().unwrap_or("");
    (!name.is_empty()).then(|| name.to_owned())
}

/// Decoded pairs of a query string, in order.
pub fn query_pairs(query: Option<&str>) -> Vec<(String, String)> {
    let pairs = query
        .unwrap_or("")
        .split('&')
        .filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (percent_decode(name, true), percent_decode(value, true))
        })
        .collect()
}

/// First value of a name.
pub fn query_value<'a>(pairs: &'a [(String, String)], name: &str) -> Option<&'a str> {
    pairs
        .iter()
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.as_str())
}

fn percent_decode(text: &str, plus_is_space: bool) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while index < bytes.len() {
        match bytes[index] {
            b'%' if index + 2 < bytes.len() => {
                let digits = std::str::from_utf8(&bytes[index + 1..index + 3]).ok();
                match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
                    Some(byte) => {
                        out.push(byte);
                        index += 3;
                        continue;
                    }
                    None => out.push(b'%'),
                }
            }
            b'+' if plus_is_space => out.push(b' '),
            byte => out.push(byte),
        }
        index += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_decode_once() {
        let pairs = query_pairs(Some("path=%2Fa%20b%2Bc+d&x=%252e&flag&bad=%zz%"));
        assert_eq!(query_value(&pairs, "path"), Some("/a b+c d"));
        assert_eq!(query_value(&pairs, "x"), Some("%2e"));
        assert_eq!(query_value(&pairs, "flag"), Some(""));
        assert_eq!(query_value(&pairs, "bad"), Some("%zz%"));
        assert_eq!(query_value(&pairs, "none"), None);
    }

    #[test]
    fn basic_names_only_the_user() {
        let headers = |value: &str| {
            HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_str(value).unwrap())])
        };
        assert_eq!(
            basic_user(&headers("Basic dXNlcjo=")).as_deref(),
            Some("user")
        );
        assert_eq!(
            basic_user(&headers("basic cm9vdDpwdw")).as_deref(),
            Some("root")
        );
        assert_eq!(basic_user(&headers("Basic Og==")), None);
        assert_eq!(basic_user(&headers("Bearer dXNlcjo=")), None);
    }
}
