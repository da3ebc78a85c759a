//! How messages become bytes. One variant per encoding; the services see only typed messages, so a
//! second encoding is one more variant here and nothing elsewhere.

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::Serialize;

use super::{Code, ConnectError};

/// Encoding of the messages of one call, chosen by its content type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// proto-JSON: lowerCamelCase names, base64 bytes (contract section 3.3).
    Json,
}

impl Codec {
    /// Codec of a unary request. Parameters such as a charset are allowed.
    pub fn unary(content_type: &str) -> Option<Self> {
        (media_type(content_type) == "application/json").then_some(Codec::Json)
    }

    /// Codec of a streaming request.
    pub fn streaming(content_type: &str) -> Option<Self> {
        (media_type(content_type) == "application/connect+json").then_some(Codec::Json)
    }

    /// Content type of unary answers.
    pub fn unary_type(self) -> &'static str {
        match self {
            Codec::Json => "application/json",
        }
    }

    /// Content type of streams; the clients compare it exactly.
    pub fn streaming_type(self) -> &'static str {
        match self {
            Codec::Json => "application/connect+json",
        }
    }

    /// Reads one message. Empty input is the message with all defaults.
    pub fn decode<T: DeserializeOwned>(self, bytes: &[u8]) -> Result<T, ConnectError> {
        match self {
            Codec::Json => {
                let bytes = if bytes.is_empty() { b"{}" } else { bytes };
                serde_json::from_slice(bytes).map_err(|error| {
                    ConnectError::new(
                        Code::InvalidArgument,
                        format_args!("cannot read the request message: {error}"),
                    )
                })
            }
        }
    }

    /// Writes one message after whatever `out` already holds.
    pub fn encode<T: Serialize>(self, message: &T, out: &mut Vec<u8>) -> Result<(), ConnectError> {
        match self {
            Codec::Json => serde_json::to_writer(out, message).map_err(|error| {
                ConnectError::new(
                    Code::Internal,
                    format_args!("cannot write the answer: {error}"),
                )
            }),
        }
    }

    /// One message as a unary body.
    pub fn encode_body<T: Serialize>(self, message: &T) -> Result<Bytes, ConnectError> {
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
