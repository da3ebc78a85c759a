//! Body types and small helpers shared by the handlers.

use std::io;

use base64::Engine;
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{HeaderName, HeaderValue, AUTHORIZATION, CONTENT_TYPE};
use hyper::{HeaderMap, Response, StatusCode};
use serde::de::DeserializeOwned;

use crate::connect::lenient::BASE64;
use crate::connect::{Code, ConnectError};
use crate::limits::{
    BODY_IDLE_MAX, CONTROL_BODY_MAX_BYTES, REFUSED_BODY_MAX_BYTES, REFUSED_BODY_WAIT,
};

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

/// Why a body could not be read.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// It does not end at the limit.
    #[error("the request is larger than {limit_bytes} bytes")]
    TooLarge {
        /// The limit.
        limit_bytes: usize,
    },
    /// The client left, or broke the protocol.
    #[error("cannot read the request: {0}")]
    Broken(String),
    /// Nothing came for [`BODY_IDLE_MAX`].
    #[error("the request stood still for {} s", BODY_IDLE_MAX.as_secs())]
    Stalled,
}

impl From<BodyError> for RestError {
    fn from(error: BodyError) -> Self {
        let status = match error {
            BodyError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::Broken(_) => StatusCode::BAD_REQUEST,
            BodyError::Stalled => StatusCode::REQUEST_TIMEOUT,
        };
        Self::new(status, error.to_string())
    }
}

impl From<BodyError> for ConnectError {
    fn from(error: BodyError) -> Self {
        let code = match error {
            BodyError::TooLarge { .. } => Code::ResourceExhausted,
            BodyError::Broken(_) => Code::InvalidArgument,
            BodyError::Stalled => Code::DeadlineExceeded,
        };
        Self::new(code, error)
    }
}

/// Reads a whole body of at most `limit_bytes`.
pub async fn read_body(mut body: Incoming, limit_bytes: usize) -> Result<Bytes, BodyError> {
    let mut all = BytesMut::new();
    loop {
        let frame = tokio::time::timeout(BODY_IDLE_MAX, body.frame())
            .await
            .map_err(|_| BodyError::Stalled)?;
        let data = match frame {
            None => return Ok(all.freeze()),
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
            Some(Err(error)) => return Err(BodyError::Broken(error.to_string())),
        };
        if data.len() > limit_bytes - all.len() {
            tokio::spawn(discard(body));
            return Err(BodyError::TooLarge { limit_bytes });
        }
        all.extend_from_slice(&data);
    }
}

/// Reads the JSON body of a REST call; white space alone is the value with all defaults.
pub async fn read_json<T: DeserializeOwned + Default>(body: Incoming) -> Result<T, RestError> {
    let bytes = read_body(body, CONTROL_BODY_MAX_BYTES).await?;
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    serde_json::from_slice(&bytes).map_err(|error| {
        RestError::new(
            StatusCode::BAD_REQUEST,
            format!("cannot read the request: {error}"),
        )
    })
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

/// User name of a Basic authorization header; it never carries a credential (contract section 3.1). Beyond the contract,
/// `X-User-Group` names the group to be of, as in `user:group`.
pub fn basic_user(headers: &HeaderMap) -> Option<String> {
    let name = basic_name(headers)?;
    match header(headers, "x-user-group") {
        Some(group) => Some(format!("{name}:{group}")),
        None => Some(name),
    }
}

fn basic_name(headers: &HeaderMap) -> Option<String> {
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

/// Decoded pairs of a query string, in order. Names of files that are not UTF-8 exist, but answers could
/// not tell them, and a name made up in their place would be another file: such a query is refused.
pub fn query_pairs(query: Option<&str>) -> Result<Vec<(String, String)>, RestError> {
    let pairs = query
        .unwrap_or("")
        .split('&')
        .filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = percent_decode(&name.replace('+', " "));
            Some((name?, percent_decode(&value.replace('+', " "))?))
        })
        .collect::<Option<_>>()
        .ok_or_else(|| {
            RestError::new(
                StatusCode::BAD_REQUEST,
                "the query is not UTF-8 once decoded; only names in UTF-8 can be used here",
            )
        })
}

/// First value of a name.
pub fn query_value<'a>(pairs: &'a [(String, String)], name: &str) -> Option<&'a str> {
    pairs
        .iter()
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.as_str())
}

/// Decodes once; a percent sign without two digits is itself. None when the result is not UTF-8.
pub fn percent_decode(text: &str) -> Option<String> {
    let digit = |byte: Option<&u8>| char::from(*byte?).to_digit(16);
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while let Some(byte) = bytes.get(index) {
        let digits = (*byte == b'%')
            .then(|| digit(bytes.get(index + 1)).zip(digit(bytes.get(index + 2))))
            .flatten();
        match digits {
            Some((high, low)) => {
                out.push((high * 16 + low) as u8);
                index += 3;
            }
            None => {
                out.push(*byte);
                index += 1;
            }
        }
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_decode_once() {
        let pairs = query_pairs(Some("path=%2Fa%20b%2Bc+d&x=%252e&flag&bad=%zz%+%%2b1")).unwrap();
        assert_eq!(query_value(&pairs, "path"), Some("/a b+c d"));
        assert_eq!(query_value(&pairs, "x"), Some("%2e"));
        assert_eq!(query_value(&pairs, "flag"), Some(""));
        assert_eq!(query_value(&pairs, "bad"), Some("%zz% %+1"));
        assert_eq!(query_value(&pairs, "none"), None);
        assert_eq!(percent_decode("%+1"), Some("%+1".into()));
        assert!(query_pairs(Some("path=%ff")).is_err());
        let mut noise = crate::fuzz::Noise::new(1);
        for _ in 0..20_000 {
            let text = noise.text(&["path=%2Fa%20b%2Bc+d&x=%252e", "a=%e6%97%a5&%"]);
            let _refused = query_pairs(Some(&text));
        }
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
        let mut grouped = headers("Basic dXNlcjo=");
        grouped.insert("x-user-group", HeaderValue::from_static("staff"));
        assert_eq!(basic_user(&grouped).as_deref(), Some("user:staff"));
    }
}
