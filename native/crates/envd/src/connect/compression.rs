//! Compression of messages: named by `Content-Encoding` for unary calls and by
//! `Connect-Content-Encoding` for streams, where it applies to each message by itself.
//!
//! Invariant: an answer is compressed only when the client asks for it in the header of its kind of
//! call; what a library always sends in `Accept-Encoding` never compresses a stream (contract
//! section 1.5).

use std::io::{self, Read, Write};

use bytes::Bytes;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use hyper::HeaderMap;

use super::{Code, ConnectError};
use crate::http::header;
use crate::limits::{COMPRESS_MIN_BYTES, MESSAGE_MAX_BYTES};

/// Compression of messages in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// None.
    Identity,
    /// gzip.
    Gzip,
}

impl Compression {
    /// What the client used for its messages, by the header `name`.
    pub fn of_request(headers: &HeaderMap, name: &'static str) -> Result<Self, ConnectError> {
        match header(headers, name)
            .map(|text| text.trim().to_ascii_lowercase())
            .as_deref()
        {
            None | Some("" | "identity") => Ok(Compression::Identity),
            Some("gzip") => Ok(Compression::Gzip),
            Some(other) => Err(ConnectError::new(
                Code::Unimplemented,
                format_args!("compression '{other}' is not supported; use gzip or identity"),
            )),
        }
    }

    /// What the client takes in a stream: the first of its `Connect-Accept-Encoding` that is known here.
    pub fn of_stream_answer(headers: &HeaderMap) -> Self {
        let names = header(headers, "connect-accept-encoding").unwrap_or("");
        let known =
            names
                .split(',')
                .find_map(|name| match name.trim().to_ascii_lowercase().as_str() {
                    "gzip" => Some(Compression::Gzip),
                    "identity" => Some(Compression::Identity),
                    _ => None,
                });
        known.unwrap_or(Compression::Identity)
    }

    /// Whether a message of this size is sent compressed.
    pub fn pays_for(self, size_bytes: usize) -> bool {
        self == Compression::Gzip && size_bytes >= COMPRESS_MIN_BYTES
    }
}

/// Compresses with gzip, after whatever `out` already holds.
pub fn compress(bytes: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
    let mut encoder = GzEncoder::new(out, flate2::Compression::fast());
    encoder.write_all(bytes)?;
    encoder.finish()?;
    Ok(())
}

/// Decompresses one message of at most [`MESSAGE_MAX_BYTES`], whatever it claims to be.
pub fn decompress(bytes: &[u8]) -> Result<Bytes, ConnectError> {
    let mut out = Vec::new();
    MultiGzDecoder::new(bytes)
        .take(MESSAGE_MAX_BYTES as u64 + 1)
        .read_to_end(&mut out)
        .map_err(|error| {
            ConnectError::new(
                Code::InvalidArgument,
                format_args!("the message is not valid gzip: {error}"),
            )
        })?;
    if out.len() > MESSAGE_MAX_BYTES {
        return Err(ConnectError::new(
            Code::ResourceExhausted,
            format_args!(
                "the message is larger than the limit of {MESSAGE_MAX_BYTES} bytes once decompressed"
            ),
        ));
    }
    Ok(out.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_static(value));
        headers
    }

    #[test]
    fn clients_choose_by_the_header_of_their_call() {
        let answer =
            |value| Compression::of_stream_answer(&headers("connect-accept-encoding", value));
        assert_eq!(answer("gzip"), Compression::Gzip);
        assert_eq!(answer("zstd, gzip, br"), Compression::Gzip);
        assert_eq!(answer("identity"), Compression::Identity);
        assert_eq!(answer("br"), Compression::Identity);
        let stream = headers("accept-encoding", "gzip");
        assert_eq!(
            Compression::of_stream_answer(&stream),
            Compression::Identity
        );
        let request = |value| {
            Compression::of_request(&headers("content-encoding", value), "content-encoding")
        };
        assert_eq!(request("gzip").unwrap(), Compression::Gzip);
        assert_eq!(request("identity").unwrap(), Compression::Identity);
        assert_eq!(request("zstd").unwrap_err().code, Code::Unimplemented);
    }

    #[test]
    fn messages_round_trip_and_bombs_do_not() {
        let text = b"again and again ".repeat(1000);
        let mut packed = Vec::new();
        compress(&text, &mut packed).unwrap();
        assert!(packed.len() < text.len() / 10);
        assert_eq!(decompress(&packed).unwrap(), text);
        assert_eq!(
            decompress(&packed[..packed.len() - 9]).unwrap_err().code,
            Code::InvalidArgument
        );
        assert_eq!(
            decompress(b"no gzip").unwrap_err().code,
            Code::InvalidArgument
        );
        let mut bomb = Vec::new();
        compress(&vec![0; MESSAGE_MAX_BYTES + 1], &mut bomb).unwrap();
        assert_eq!(decompress(&bomb).unwrap_err().code, Code::ResourceExhausted);
    }
}
