//! Enveloped messages of streams (contract section 3.3).
//!
//! ```text
//! flags u8 | length u32 big endian | message (length bytes)
//! flags: 0x01 message is compressed (not offered), 0x02 end of stream
//! ```

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use serde::Serialize;

use super::{Code, Codec, ConnectError};
use crate::limits::{MESSAGE_MAX_BYTES, REQUEST_END_MAX};

const HEADER_BYTES: usize = 5;
const FLAG_COMPRESSED: u8 = 0x01;
const FLAG_END: u8 = 0x02;

/// One message, framed.
pub fn message<T: Serialize>(codec: Codec, value: &T) -> Result<Bytes, ConnectError> {
    let mut out = vec![0; HEADER_BYTES];
    codec.encode(value, &mut out)?;
    Ok(finish(out, 0))
}

/// The frame that ends a stream, with the error if there is one. Always JSON.
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
    codec: Codec,
    done: bool,
}

impl<B> FrameReader<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    /// Reader of `body`.
    pub fn new(body: B, codec: Codec) -> Self {
        Self {
            body,
            buffer: BytesMut::new(),
            codec,
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
            while !self.done && seen < MESSAGE_MAX_BYTES {
                self.buffer.clear();
                match self.fill().await {
                    Ok(true) => seen += self.buffer.len(),
                    Ok(false) | Err(_) => break,
                }
            }
        };
        // Past the deadline the connection ends with the answer: the client broke the protocol.
        let _ = tokio::time::timeout(REQUEST_END_MAX, rest).await;
    }

    /// The next message, or None after the last one.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ConnectError> {
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
                if flags & FLAG_COMPRESSED != 0 {
                    return Err(ConnectError::new(
                        Code::Unimplemented,
                        "compressed messages are not supported; send identity",
                    ));
                }
                if self.buffer.len() >= HEADER_BYTES + length {
                    self.buffer.advance(HEADER_BYTES);
                    let payload = self.buffer.split_to(length);
                    if flags & FLAG_END != 0 {
                        return Ok(None);
                    }
                    return self.codec.decode(&payload).map(Some);
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

    #[test]
    fn frames_round_trip_and_a_cut_frame_is_an_error() {
        let one = message(Codec::Json, &serde_json::json!({"a": 1})).unwrap();
        let whole: Vec<u8> = [one.clone(), one.clone(), end(None)].concat();
        block_on(async {
            let mut reader = FrameReader::new(Full::new(Bytes::from(whole)), Codec::Json);
            for _ in 0..2 {
                let value: serde_json::Value = reader.next().await.unwrap().unwrap();
                assert_eq!(value["a"], 1);
            }
            assert!(reader.next::<serde_json::Value>().await.unwrap().is_none());
            let mut cut = FrameReader::new(Full::new(one.slice(..one.len() - 1)), Codec::Json);
            assert_eq!(
                cut.next::<serde_json::Value>().await.unwrap_err().code,
                Code::InvalidArgument
            );
            let mut huge = FrameReader::new(
                Full::new(Bytes::from_static(b"\0\xff\xff\xff\xff")),
                Codec::Json,
            );
            assert_eq!(
                huge.next::<serde_json::Value>().await.unwrap_err().code,
                Code::ResourceExhausted
            );
        });
    }
}
