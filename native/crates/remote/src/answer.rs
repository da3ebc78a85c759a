//! Checks an answer against what was asked for. No byte of a wrong one is used.

use std::io::Read;
use std::ops::Range;
use std::time::{Duration, SystemTime};

use crate::error::RemoteError;
use crate::http::Reply;
use crate::stub::Stub;

/// What one try came to.
pub enum Failure {
    /// Trying again is of no use.
    Final(RemoteError),
    /// It may work later: the cause, and the pause the server asks for.
    Again(String, Option<Duration>),
}

impl Failure {
    /// What came is not what was asked for.
    pub fn wrong(stub: &Stub, reason: String) -> Failure {
        let address = stub.address();
        Failure::Final(RemoteError::Wrong { address, reason })
    }

    /// The registry wants other credentials.
    pub fn denied(stub: &Stub, reason: String) -> Failure {
        let address = stub.address();
        Failure::Final(RemoteError::Denied { address, reason })
    }
}

/// Reads and checks the body of a final reply.
pub fn read(stub: &Stub, mut reply: Reply<'_>, range: &Range<u64>) -> Result<Vec<u8>, Failure> {
    let status = reply.status;
    match status {
        200 | 206 => {}
        401 | 403 => return Err(Failure::denied(stub, format!("status {status}"))),
        404 | 410 => {
            return Err(Failure::Final(RemoteError::Missing {
                address: stub.address(),
                reason: format!("status {status}"),
            }))
        }
        408 | 429 | 500.. => return Err(again(&reply)),
        416 => {
            return Err(Failure::wrong(
                stub,
                format!(
                    "it has no bytes {}-{}: it is another blob",
                    range.start, range.end
                ),
            ))
        }
        _ => {
            return Err(Failure::wrong(
                stub,
                format!("it answers with status {status}"),
            ))
        }
    }
    if reply
        .header("content-encoding")
        .is_some_and(|coding| coding != "identity")
    {
        return Err(Failure::wrong(
            stub,
            "it is sent compressed, which makes ranges meaningless".to_owned(),
        ));
    }
    let skip = if status == 206 {
        check_range(stub, &reply, range)?
    } else {
        check_whole(stub, &reply, range)?
    };
    let mut body = reply.body.as_reader();
    let cut =
        |error: std::io::Error| Failure::Again(format!("the answer broke off: {error}"), None);
    if std::io::copy(&mut (&mut body).take(skip), &mut std::io::sink()).map_err(cut)? < skip {
        return Err(Failure::Again("the answer was cut short".to_owned(), None));
    }
    let mut bytes = vec![0; (range.end - range.start) as usize];
    body.read_exact(&mut bytes).map_err(cut)?;
    if status == 206 && body.read(&mut [0]).map_err(cut)? != 0 {
        return Err(Failure::wrong(
            stub,
            "it sent more than was asked for".to_owned(),
        ));
    }
    Ok(bytes)
}

fn check_range(stub: &Stub, reply: &Reply<'_>, range: &Range<u64>) -> Result<u64, Failure> {
    let stated = reply.header("content-range").unwrap_or_default();
    let expected = format!("bytes {}-{}/", range.start, range.end - 1);
    let total = stated.strip_prefix(&expected);
    if total.is_some_and(|total| total == "*" || total.parse() == Ok(stub.size_bytes)) {
        return Ok(0);
    }
    Err(Failure::wrong(
        stub,
        format!(
            "it answers bytes {}-{} of {} with {stated:?}",
            range.start,
            range.end - 1,
            stub.size_bytes
        ),
    ))
}

/// A server that knows no ranges sends all: what comes before the range is passed
/// over.
fn check_whole(stub: &Stub, reply: &Reply<'_>, range: &Range<u64>) -> Result<u64, Failure> {
    let stated = reply
        .header("content-length")
        .and_then(|text| text.parse::<u64>().ok());
    if stated.is_some_and(|bytes| bytes != stub.size_bytes) {
        return Err(Failure::wrong(
            stub,
            format!(
                "it has {} bytes, not {}",
                stated.unwrap_or(0),
                stub.size_bytes
            ),
        ));
    }
    Ok(range.start)
}

/// A failure that passes, with the pause that the server asks for.
pub fn again(reply: &Reply<'_>) -> Failure {
    let wanted = reply.header("retry-after").and_then(|text| {
        let seconds = text.trim().parse().map(Duration::from_secs);
        let date = || {
            httpdate::parse_http_date(text)
                .ok()?
                .duration_since(SystemTime::now())
                .ok()
        };
        seconds.ok().or_else(date)
    });
    Failure::Again(format!("status {}", reply.status), wanted)
}
