//! How messages become bytes. One variant per encoding; the services see only typed messages.

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::Serialize;

use super::{Code, ConnectError};

/// A message that comes in either encoding.
pub trait Request: DeserializeOwned + prost::Message + Default {}
impl<T: DeserializeOwned + prost::Message + Default> Request for T {}

/// A message that goes out in either encoding.
pub trait Answer: Serialize + prost::Message {}
impl<T: Serialize + prost::Message> Answer for T {}

/// Encoding of the messages of one call, chosen by its content type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// proto-JSON: lowerCamelCase names, base64 bytes (contract section 3.3).
    Json,
    /// Binary protobuf, by the field numbers of contract sections 3.4 and 3.6.
    Proto,
}

impl Codec {
    /// Codec of a unary request. Parameters such as a charset are allowed.
    pub fn unary(content_type: &str) -> Option<Self> {
        match media_type(content_type).as_str() {
            "application/json" => Some(Codec::Json),
            "application/proto" => Some(Codec::Proto),
            _ => None,
        }
    }

    /// Codec of a streaming request.
    pub fn streaming(content_type: &str) -> Option<Self> {
        match media_type(content_type).as_str() {
            "application/connect+json" => Some(Codec::Json),
            "application/connect+proto" => Some(Codec::Proto),
            _ => None,
        }
    }

    /// Content type of unary answers.
    pub fn unary_type(self) -> &'static str {
        match self {
            Codec::Json => "application/json",
            Codec::Proto => "application/proto",
        }
    }

    /// Content type of streams; the clients compare it exactly.
    pub fn streaming_type(self) -> &'static str {
        match self {
            Codec::Json => "application/connect+json",
            Codec::Proto => "application/connect+proto",
        }
    }

    /// Reads one message. Empty input is the message with all defaults.
    pub fn decode<T: Request>(self, bytes: &[u8]) -> Result<T, ConnectError> {
        let result = match self {
            Codec::Json if bytes.is_empty() => Ok(T::default()),
            Codec::Json => serde_json::from_slice(bytes).map_err(|error| error.to_string()),
            Codec::Proto => T::decode(bytes).map_err(|error| error.to_string()),
        };
        result.map_err(|cause| {
            ConnectError::new(
                Code::InvalidArgument,
                format_args!("cannot read the request message: {cause}"),
            )
        })
    }

    /// Writes one message after whatever `out` already holds.
    pub fn encode<T: Answer>(self, message: &T, out: &mut Vec<u8>) -> Result<(), ConnectError> {
        let result = match self {
            Codec::Json => serde_json::to_writer(out, message).map_err(|error| error.to_string()),
            Codec::Proto => message.encode(out).map_err(|error| error.to_string()),
        };
        result.map_err(|cause| {
            ConnectError::new(
                Code::Internal,
                format_args!("cannot write the answer: {cause}"),
            )
        })
    }

    /// One message as a unary body.
    pub fn encode_body<T: Answer>(self, message: &T) -> Result<Bytes, ConnectError> {
        let mut out = Vec::new();
        self.encode(message, &mut out)?;
        Ok(out.into())
    }
}

fn media_type(content_type: &str) -> String {
    content_type
        .split(';')
        .next()
        .unwrap_or("")
        .trim()
        .to_ascii_lowercase()
}
