//! Enveloped messages of streams (contract section 3.3).
//!
//! ```text
//! flags u8 | length u32 big endian | message (length bytes)
//! flags: 0x01 message is compressed, 0x02 end of stream
//! ```

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;

use super::compression::{compress, decompress};
use super::{Answer, Code, Codec, Compression, ConnectError, Request};
use crate::limits::{MESSAGE_MAX_BYTES, REFUSED_BODY_MAX_BYTES, REQUEST_END_MAX};

const HEADER_BYTES: usize = 5;
const FLAG_COMPRESSED: u8 = 0x01;
const FLAG_END: u8 = 0x02;

/// How the messages of a stream are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    /// Encoding, the same in both directions.
    pub codec: Codec,
    /// Compression of the client's messages.
    pub request: Compression,
    /// Compression of ours.
    pub answer: Compression,
}

/// One message, framed.
pub fn message<T: Answer>(format: Format, value: &T) -> Result<Bytes, ConnectError> {
    let mut out = vec![0; HEADER_BYTES];
    format.codec.encode(value, &mut out)?;
    if !format.answer.pays_for(out.len() - HEADER_BYTES) {
        return Ok(finish(out, 0));
    }
    let mut packed = vec![0; HEADER_BYTES];
    compress(&out[HEADER_BYTES..], &mut packed).map_err(|error| {
        ConnectError::new(
            Code::Internal,
            format_args!("cannot compress the answer: {error}"),
        )
    })?;
    Ok(finish(packed, FLAG_COMPRESSED))
}

/// The frame that ends a stream, with the error if there is one. Always JSON, never compressed.
pub fn end(error: Option<&ConnectError>) -> Bytes {
    let mut out = vec![0; HEADER_BYTES];
    match error {
        None => out.extend_from_slice(b"{}"),
        Some(error) => {
            let value = serde_json::json!({"error": {"code": error.code.name(), "message": error.message}, "metadata": {}});
            out.extend_from_slice(value.to_string().as_bytes());
        }
    }
    finish(out, FLAG_END)
}

fn finish(mut out: Vec<u8>, flags: u8) -> Bytes {
    let length = (out.len() - HEADER_BYTES) as u32;
    out[0] = flags;
    out[1..HEADER_BYTES].copy_from_slice(&length.to_be_bytes());
    out.into()
}

/// Reads the frames of a request body one by one, holding at most one message.
pub struct FrameReader<B> {
    body: B,
    buffer: BytesMut,
    format: Format,
    done: bool,
}

impl<B> FrameReader<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    /// Reader of `body`.
    pub fn new(body: B, format: Format) -> Self {
        Self {
            body,
            buffer: BytesMut::new(),
            format,
            done: false,
        }
    }

    /// Read and forget what the client still sends, within limits of time and size.
    ///
    /// A body that is dropped unread makes the server close the connection with data in its receive buffer, and the
    /// reset that follows destroys answers still on their way to the client.
    pub async fn discard_rest(mut self) {
        let rest = async {
            let mut seen = 0;
            while !self.done && seen < REFUSED_BODY_MAX_BYTES {
                self.buffer.clear();
                match self.fill().await {
                    Ok(true) => seen += self.buffer.len() as u64,
                    Ok(false) | Err(_) => break,
                }
            }
        };
        // Past the deadline the connection ends with the answer: the client broke the protocol.
        let _ = tokio::time::timeout(REQUEST_END_MAX, rest).await;
    }

    /// The next message, or None after the last one.
    pub async fn next<T: Request>(&mut self) -> Result<Option<T>, ConnectError> {
        loop {
            if self.buffer.len() >= HEADER_BYTES {
                let flags = self.buffer[0];
                let length = u32::from_be_bytes([
                    self.buffer[1],
                    self.buffer[2],
                    self.buffer[3],
                    self.buffer[4],
                ]) as usize;
                if length > MESSAGE_MAX_BYTES {
                    return Err(ConnectError::new(
                        Code::ResourceExhausted,
                        format_args!("message of {length} bytes is larger than the limit of {MESSAGE_MAX_BYTES}"),
                    ));
                }
                if flags & !(FLAG_COMPRESSED | FLAG_END) != 0 {
                    return Err(ConnectError::new(
                        Code::InvalidArgument,
                        format_args!(
                            "message flags {flags:#04x} are not known; this is no Connect stream"
                        ),
                    ));
                }
                if flags & FLAG_COMPRESSED != 0 && self.format.request == Compression::Identity {
                    return Err(ConnectError::new(
                        Code::InvalidArgument,
                        "a message is compressed, but the request names no Connect-Content-Encoding; name gzip",
                    ));
                }
                if self.buffer.len() >= HEADER_BYTES + length {
                    self.buffer.advance(HEADER_BYTES);
                    let payload = self.buffer.split_to(length).freeze();
                    if flags & FLAG_END != 0 {
                        return Ok(None);
                    }
                    let payload = if flags & FLAG_COMPRESSED != 0 && !payload.is_empty() {
                        decompress(&payload)?
                    } else {
                        payload
                    };
                    return self.format.codec.decode(&payload).map(Some);
                }
            }
            if self.done || !self.fill().await? {
                if self.buffer.is_empty() {
                    return Ok(None);
                }
                return Err(ConnectError::new(
                    Code::InvalidArgument,
                    "the request ended inside a message",
                ));
            }
        }
    }

    async fn fill(&mut self) -> Result<bool, ConnectError> {
        match self.body.frame().await {
            None => {
                self.done = true;
                Ok(false)
            }
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    self.buffer.extend_from_slice(&data);
                }
                Ok(true)
            }
            Some(Err(error)) => Err(ConnectError::new(
                Code::InvalidArgument,
                format_args!("cannot read the request: {error}"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::messages::ProcessConfig;
    use http_body_util::Full;

    #[test]
    fn end_frames_are_json_with_the_end_flag() {
        assert_eq!(&end(None)[..], b"\x02\0\0\0\x02{}");
        let error = ConnectError::new(Code::NotFound, "process with pid 7 not found");
        let frame = end(Some(&error));
        assert_eq!(frame[0], 2);
        let value: serde_json::Value = serde_json::from_slice(&frame[5..]).unwrap();
        assert_eq!(value["error"]["code"], "not_found");
        assert_eq!(value["error"]["message"], "process with pid 7 not found");
    }

    fn block_on<F: std::future::Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(future)
    }

    fn format(codec: Codec, compression: Compression) -> Format {
        Format {
            codec,
            request: compression,
            answer: compression,
        }
    }

    fn reader(bytes: impl Into<Bytes>, format: Format) -> FrameReader<Full<Bytes>> {
        FrameReader::new(Full::new(bytes.into()), format)
    }

    fn config(arguments: usize) -> ProcessConfig {
        ProcessConfig {
            cmd: "/bin/sh".into(),
            args: vec!["argument".into(); arguments],
            ..ProcessConfig::default()
        }
    }

    fn error_of(bytes: &'static [u8]) -> Code {
        let mut reader = reader(bytes, format(Codec::Json, Compression::Identity));
        block_on(reader.next::<ProcessConfig>()).unwrap_err().code
    }

    #[test]
    fn frames_round_trip_in_every_format() {
        for codec in [Codec::Json, Codec::Proto] {
            for compression in [Compression::Identity, Compression::Gzip] {
                let format = format(codec, compression);
                let (small, large) = (config(1), config(1000));
                let frames = [&small, &large].map(|config| message(format, config).unwrap());
                assert_eq!(frames[0][0], 0);
                assert_eq!(frames[1][0] == 1, compression == Compression::Gzip);
                let whole = [&frames[0][..], &frames[1], &end(None)].concat();
                block_on(async {
                    let mut reader = reader(whole, format);
                    assert_eq!(reader.next().await.unwrap(), Some(small));
                    assert_eq!(reader.next().await.unwrap(), Some(large));
                    assert!(reader.next::<ProcessConfig>().await.unwrap().is_none());
                });
            }
        }
    }

    #[test]
    fn what_breaks_the_framing_is_an_error() {
        assert_eq!(error_of(b"\0\0\0\0\x02{"), Code::InvalidArgument);
        assert_eq!(error_of(b"\0\0\0"), Code::InvalidArgument);
        assert_eq!(error_of(b"\0\xff\xff\xff\xff"), Code::ResourceExhausted);
        assert_eq!(error_of(b"\x01\0\0\0\x02{}"), Code::InvalidArgument);
        assert_eq!(error_of(b"\x40\0\0\0\x02{}"), Code::InvalidArgument);
    }

    /// Whatever arrives, in whatever pieces, is a message, an end or an error.
    #[test]
    fn noise_is_never_more_than_an_error() {
        let mut noise = crate::fuzz::Noise::new(3);
        let seeds: Vec<Vec<u8>> = [Codec::Json, Codec::Proto]
            .iter()
            .flat_map(|codec| [Compression::Identity, Compression::Gzip].map(|c| format(*codec, c)))
            .map(|format| [message(format, &config(200)).unwrap(), end(None)].concat())
            .collect();
        for _ in 0..4000 {
            let bytes = noise.mutate(&seeds);
            let codec = noise.pick(&[Codec::Json, Codec::Proto]);
            let compression = noise.pick(&[Compression::Identity, Compression::Gzip]);
            block_on(async {
                let mut reader = reader(bytes, format(codec, compression));
                while let Ok(Some(_)) = reader.next::<ProcessConfig>().await {}
            });
        }
    }
}
