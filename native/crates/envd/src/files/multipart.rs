//! Streaming reader of multipart/form-data: holds one piece of one part at a time.

use bytes::{Buf, Bytes, BytesMut};
use hyper::StatusCode;
use memchr::memmem;

use super::upload::Source;
use crate::http::RestError;
use crate::limits::{PARTS_MAX, PART_HEADERS_MAX_BYTES};

/// Headers of one part, as far as they matter.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Form field.
    pub name: String,
    /// File name, possibly a whole path.
    pub filename: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the first boundary or inside a part.
    Inside,
    /// Right after a boundary.
    Boundary,
    /// After the last boundary.
    End,
}

/// Reader of one body.
pub struct Multipart<'a> {
    source: &'a mut Source,
    buffer: BytesMut,
    /// Line break, two dashes, boundary.
    delimiter: Vec<u8>,
    state: State,
    parts: usize,
}

fn bad(message: impl Into<String>) -> RestError {
    RestError::new(StatusCode::BAD_REQUEST, message)
}

impl<'a> Multipart<'a> {
    /// Reader for a body of this content type.
    pub fn new(source: &'a mut Source, content_type: &str) -> Result<Self, RestError> {
        let boundary = parameters(content_type)
            .find(|(name, _)| name == "boundary")
            .map(|(_, value)| value);
        let boundary = boundary
            .filter(|boundary| (1..=200).contains(&boundary.len()))
            .ok_or_else(|| bad("the content type has no usable boundary"))?;
        // The line break that belongs to the first boundary may be missing at the start of the body.
        Ok(Self {
            source,
            buffer: BytesMut::from(&b"\r\n"[..]),
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            state: State::Inside,
            parts: 0,
        })
    }

    /// Skips to the next part. None after the last one.
    pub async fn next_part(&mut self) -> Result<Option<Part>, RestError> {
        while self.state == State::Inside {
            self.next_chunk().await?;
        }
        if self.state == State::End {
            return Ok(None);
        }
        self.need(2).await?;
        if self.buffer.starts_with(b"--") {
            self.state = State::End;
            // What follows the last boundary is read so that the connection can be used again.
            while self.source.next().await?.is_some() {}
            return Ok(None);
        }
        self.parts += 1;
        if self.parts > PARTS_MAX {
            return Err(bad(format!(
                "more than {PARTS_MAX} parts; split the upload"
            )));
        }
        let end = loop {
            if let Some(end) = memmem::find(&self.buffer, b"\r\n\r\n") {
                break end;
            }
            if self.buffer.len() > PART_HEADERS_MAX_BYTES {
                return Err(bad(format!(
                    "the headers of a part are larger than {PART_HEADERS_MAX_BYTES} bytes"
                )));
            }
            self.need(self.buffer.len() + 1).await?;
        };
        let headers = self.buffer.split_to(end);
        // The second line break stays: it may be the start of the boundary of an empty part.
        self.buffer.advance(2);
        let part = parse_headers(&headers)?;
        if !self.buffer.starts_with(&self.delimiter) {
            self.need(self.delimiter.len()).await?;
        }
        if !self.buffer.starts_with(&self.delimiter) {
            self.buffer.advance(2);
        }
        self.state = State::Inside;
        Ok(Some(part))
    }

    /// The next bytes of the current part. None at its end.
    pub async fn next_chunk(&mut self) -> Result<Option<Bytes>, RestError> {
        if self.state != State::Inside {
            return Ok(None);
        }
        loop {
            if let Some(at) = memmem::find(&self.buffer, &self.delimiter) {
                if at > 0 {
                    return Ok(Some(self.buffer.split_to(at).freeze()));
                }
                self.buffer.advance(self.delimiter.len());
                self.state = State::Boundary;
                return Ok(None);
            }
            // All but what could be the start of a boundary is certain.
            let certain = self.buffer.len().saturating_sub(self.delimiter.len() - 1);
            if certain > 0 {
                return Ok(Some(self.buffer.split_to(certain).freeze()));
            }
            self.need(self.buffer.len() + 1).await?;
        }
    }

    async fn need(&mut self, length: usize) -> Result<(), RestError> {
        while self.buffer.len() < length {
            match self.source.next().await? {
                Some(bytes) => self.buffer.extend_from_slice(&bytes),
                None => return Err(bad("the multipart body ended before its last boundary")),
            }
        }
        Ok(())
    }
}

fn parse_headers(bytes: &[u8]) -> Result<Part, RestError> {
    let text =
        std::str::from_utf8(bytes).map_err(|_| bad("the headers of a part are not UTF-8"))?;
    let mut part = Part::default();
    for line in text.split("\r\n") {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        if !name.trim().eq_ignore_ascii_case("content-disposition") {
            continue;
        }
        for (name, value) in parameters(value) {
            match name.as_str() {
                "name" => part.name = unescape(&value),
                // The extended form wins, whatever the order.
                "filename" if part.filename.is_none() => part.filename = Some(unescape(&value)),
                "filename*" => {
                    let encoded = value.splitn(3, '\'').nth(2).unwrap_or("");
                    let decoded = crate::http::percent_decode(encoded);
                    part.filename =
                        Some(decoded.ok_or_else(|| bad("the file name of a part is not UTF-8"))?);
                }
                _ => {}
            }
        }
    }
    Ok(part)
}

/// The three escapes browsers and clients use inside quoted names; every other percent sign is itself.
fn unescape(text: &str) -> String {
    text.replace("%22", "\"")
        .replace("%0D", "\r")
        .replace("%0A", "\n")
}

/// `; name="value"` pairs of a header value, names in lower case. Inside quotes a backslash escapes a
/// quote or a backslash and is itself otherwise.
fn parameters(value: &str) -> impl Iterator<Item = (String, String)> + '_ {
    let mut rest = value.split_once(';').map_or("", |(_, rest)| rest);
    std::iter::from_fn(move || loop {
        rest = rest.trim_start_matches([' ', '\t', ';']);
        if rest.is_empty() {
            return None;
        }
        let Some((name, after)) = rest.split_once('=') else {
            rest = "";
            return None;
        };
        let name = name.trim().to_ascii_lowercase();
        let (value, remaining) = parameter_value(after.trim_start());
        rest = remaining;
        if !name.is_empty() {
            return Some((name, value));
        }
    })
}

fn parameter_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(';').unwrap_or(text.len());
        return (text[..end].trim().to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut letters = quoted.char_indices().peekable();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => match letters.next_if(|(_, next)| matches!(next, '"' | '\\')) {
                Some((_, next)) => value.push(next),
                None => value.push('\\'),
            },
            other => value.push(other),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(line: &str) -> Part {
        parse_headers(format!("Content-Type: text/plain\r\ncontent-disposition: {line}").as_bytes())
            .unwrap()
    }

    #[test]
    fn names_survive_the_escapes_of_the_clients() {
        for (line, expected) in [
            (
                r#"form-data; name="file"; filename="/a b/c;d=e.txt""#,
                "/a b/c;d=e.txt",
            ),
            (r#"form-data; name="file"; filename="a%22b""#, "a\"b"),
            (r#"form-data; name="file"; filename="a\"b""#, "a\"b"),
            (r#"form-data; name="file"; filename="a\\b""#, "a\\b"),
            (r#"form-data; name="file"; filename="a\b""#, "a\\b"),
            (r#"form-data; name="file"; filename="%2e%2e""#, "%2e%2e"),
            (r#"form-data; name="file"; filename="a%0Ab""#, "a\nb"),
            (r#"form-data; name="file"; filename="日本""#, "日本"),
            (r#"form-data; name=file; filename=plain"#, "plain"),
            (
                r#"form-data; name="file"; filename="x"; filename*=UTF-8''%E6%97%A5+"#,
                "日+",
            ),
        ] {
            assert_eq!(
                part(line),
                Part {
                    name: "file".into(),
                    filename: Some(expected.into())
                },
                "{line}"
            );
        }
        assert_eq!(part(r#"form-data; name="file""#).filename, None);
        assert_eq!(part(r#"form-data; =; name="f"#).name, "f");
    }

    #[test]
    fn noise_in_headers_is_a_part_or_a_refusal() {
        let mut noise = crate::fuzz::Noise::new(7);
        let seeds = [
            "Content-Disposition: form-data; name=\"file\"; filename=\"a%22b\\\"c\"",
            "content-disposition: form-data; name=file; filename*=UTF-8''%E6%97%A5",
            "multipart/form-data; boundary=\"x\"; charset=utf-8",
        ];
        for _ in 0..20_000 {
            let bytes = noise.mutate(&seeds);
            let _part = parse_headers(&bytes);
            let text = String::from_utf8_lossy(&bytes);
            // Each pair takes at least its equals sign.
            assert!(parameters(&text).count() <= text.len());
        }
    }
}
