//! What a download request asks for: part of the file, a condition, an encoding. Pure functions.

use hyper::HeaderMap;

use crate::clock;
use crate::http::header;

/// Outcome of the conditional and range headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection {
    /// Everything.
    Whole,
    /// `length` bytes from `start`, status 206.
    Part {
        /// First byte.
        start: u64,
        /// Number of bytes.
        length: u64,
    },
    /// Status 304.
    NotModified,
    /// Status 412.
    PreconditionFailed,
    /// Status 416.
    Unsatisfiable,
}

/// Whether the request has headers that need exact bytes, so no compression.
pub fn is_selective(headers: &HeaderMap) -> bool {
    [
        "range",
        "if-modified-since",
        "if-unmodified-since",
        "if-none-match",
        "if-match",
        "if-range",
    ]
    .iter()
    .any(|name| headers.contains_key(*name))
}

/// Decides by size in bytes and modification time in seconds. There are no entity tags, so `If-Match`
/// holds for `*` only and `If-None-Match` fails for `*` only.
pub fn select(headers: &HeaderMap, size: u64, modified_seconds: i64) -> Selection {
    if let Some(tags) = header(headers, "if-match") {
        if tags.trim() != "*" {
            return Selection::PreconditionFailed;
        }
    } else if header(headers, "if-unmodified-since")
        .and_then(clock::parse_http_date)
        .is_some_and(|limit| modified_seconds > limit)
    {
        return Selection::PreconditionFailed;
    }
    if let Some(tags) = header(headers, "if-none-match") {
        if tags.trim() == "*" {
            return Selection::NotModified;
        }
    } else if header(headers, "if-modified-since")
        .and_then(clock::parse_http_date)
        .is_some_and(|limit| modified_seconds <= limit)
    {
        return Selection::NotModified;
    }
    let Some(range) = header(headers, "range") else {
        return Selection::Whole;
    };
    if let Some(condition) = header(headers, "if-range") {
        if clock::parse_http_date(condition) != Some(modified_seconds) {
            return Selection::Whole;
        }
    }
    parse_range(range, size)
}

/// One range of bytes. Several ranges, or an unknown unit, are answered with everything.
fn parse_range(text: &str, size: u64) -> Selection {
    let Some(spec) = text.trim().strip_prefix("bytes=") else {
        return Selection::Whole;
    };
    let Some((first, last)) = spec.split_once('-').filter(|_| !spec.contains(',')) else {
        return Selection::Whole;
    };
    let (first, last) = (first.trim(), last.trim());
    let number = |text: &str| {
        text.parse::<u64>()
            .ok()
            .filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let (start, end) = match (first.is_empty(), last.is_empty()) {
        (true, false) => match number(last) {
            Some(count) => (size.saturating_sub(count), size),
            None => return Selection::Whole,
        },
        (false, true) => match number(first) {
            Some(start) => (start, size),
            None => return Selection::Whole,
        },
        (false, false) => match (number(first), number(last)) {
            (Some(start), Some(end)) if start <= end => (start, end.saturating_add(1).min(size)),
            _ => return Selection::Whole,
        },
        (true, true) => return Selection::Whole,
    };
    if start >= size {
        return Selection::Unsatisfiable;
    }
    Selection::Part {
        start,
        length: end - start,
    }
}

/// How the answer is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// As it is.
    Identity,
    /// gzip.
    Gzip,
}

/// Encoding by `Accept-Encoding`; None when the client accepts neither of ours (406).
///
/// gzip is used when the client weighs it above identity. A list that also names other codings without
/// weights is only what a library always sends; there the bytes go as they are, which costs the guest
/// no CPU and is as acceptable.
pub fn negotiate(headers: &HeaderMap) -> Option<Encoding> {
    let Some(text) = header(headers, "accept-encoding") else {
        return Some(Encoding::Identity);
    };
    let (mut gzip, mut identity, mut any) = (None, None, None);
    let mut codings = 0;
    for item in text.split(',') {
        let mut parts = item.split(';');
        let name = parts.next().unwrap_or("").trim().to_ascii_lowercase();
        if name.is_empty() {
            continue;
        }
        codings += 1;
        let quality = parts
            .find_map(|part| part.trim().strip_prefix("q="))
            .and_then(|value| value.trim().parse::<f32>().ok());
        let slot = match name.as_str() {
            "gzip" | "x-gzip" => &mut gzip,
            "identity" => &mut identity,
            "*" => &mut any,
            _ => continue,
        };
        *slot = Some(quality.unwrap_or(1.0));
    }
    let gzip_quality = gzip.or(any).unwrap_or(0.0);
    // Identity is acceptable unless it is ruled out by name or by *.
    let identity_quality = identity.unwrap_or(if any == Some(0.0) {
        0.0
    } else {
        f32::MIN_POSITIVE
    });
    if gzip_quality <= 0.0 && identity_quality <= 0.0 {
        return None;
    }
    let asked_for = gzip.is_some() && (codings == 1 || identity.is_some());
    let preferred = gzip_quality > identity_quality && (asked_for || identity_quality <= 0.0);
    Some(if preferred {
        Encoding::Gzip
    } else {
        Encoding::Identity
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::{HeaderName, HeaderValue};

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_str(value).unwrap(),
                )
            })
            .collect()
    }

    #[test]
    fn ranges() {
        let at = |range: &str| select(&headers(&[("range", range)]), 10, 0);
        assert_eq!(
            at("bytes=0-0"),
            Selection::Part {
                start: 0,
                length: 1
            }
        );
        assert_eq!(
            at("bytes=4-"),
            Selection::Part {
                start: 4,
                length: 6
            }
        );
        assert_eq!(
            at("bytes=-3"),
            Selection::Part {
                start: 7,
                length: 3
            }
        );
        assert_eq!(
            at("bytes=-30"),
            Selection::Part {
                start: 0,
                length: 10
            }
        );
        assert_eq!(
            at("bytes=5-99"),
            Selection::Part {
                start: 5,
                length: 5
            }
        );
        assert_eq!(at("bytes=10-"), Selection::Unsatisfiable);
        assert_eq!(at("bytes=-0"), Selection::Unsatisfiable);
        for ignored in [
            "bytes=5-4",
            "bytes=1-2,4-5",
            "lines=1-2",
            "bytes=a-b",
            "bytes=+1-2",
        ] {
            assert_eq!(at(ignored), Selection::Whole, "{ignored}");
        }
    }

    #[test]
    fn conditions() {
        let date = "Sun, 06 Nov 1994 08:49:37 GMT";
        let at =
            |name: &'static str, modified: i64| select(&headers(&[(name, date)]), 10, modified);
        assert_eq!(at("if-modified-since", 784_111_777), Selection::NotModified);
        assert_eq!(at("if-modified-since", 784_111_778), Selection::Whole);
        assert_eq!(
            at("if-unmodified-since", 784_111_778),
            Selection::PreconditionFailed
        );
        assert_eq!(at("if-unmodified-since", 784_111_777), Selection::Whole);
        let both = headers(&[("range", "bytes=1-1"), ("if-range", date)]);
        assert_eq!(
            select(&both, 10, 784_111_777),
            Selection::Part {
                start: 1,
                length: 1
            }
        );
        assert_eq!(select(&both, 10, 5), Selection::Whole);
    }

    #[test]
    fn encodings() {
        let at = |value: &str| negotiate(&headers(&[("accept-encoding", value)]));
        assert_eq!(negotiate(&HeaderMap::new()), Some(Encoding::Identity));
        assert_eq!(at("gzip"), Some(Encoding::Gzip));
        assert_eq!(at("gzip;q=0"), Some(Encoding::Identity));
        assert_eq!(at("gzip, deflate"), Some(Encoding::Identity));
        assert_eq!(at("gzip;q=0.9, identity;q=0.5"), Some(Encoding::Gzip));
        assert_eq!(at("gzip;q=0.5, identity"), Some(Encoding::Identity));
        assert_eq!(at("identity;q=0, gzip"), Some(Encoding::Gzip));
        assert_eq!(at("identity;q=0, br"), None);
        assert_eq!(at("*;q=0"), None);
        assert_eq!(at("br, identity;q=0, *"), Some(Encoding::Gzip));
        assert_eq!(at(""), Some(Encoding::Identity));
    }

    #[test]
    fn noise_selects_nothing_outside_the_file() {
        let mut noise = crate::fuzz::Noise::new(5);
        let names = [
            "range",
            "if-range",
            "if-match",
            "if-none-match",
            "if-modified-since",
            "accept-encoding",
        ];
        let seeds = [
            "bytes=0-9",
            "bytes=-18446744073709551615",
            "bytes=9-18446744073709551615",
            "Sun, 06 Nov 1994 08:49:37 GMT",
            "gzip;q=0.5, identity;q=0, *;q=1",
        ];
        for _ in 0..20_000 {
            let size = noise.pick(&[0, 1, 10, u64::MAX]);
            let mut all = HeaderMap::new();
            for _ in 0..3 {
                let name = noise.pick(&names);
                if let Ok(value) = HeaderValue::from_bytes(&noise.mutate(&seeds)) {
                    all.insert(name, value);
                }
            }
            if let Selection::Part { start, length } = select(&all, size, 784_111_777) {
                assert!(length > 0 && start.checked_add(length).is_some_and(|end| end <= size));
            }
            let _any = negotiate(&all);
        }
    }
}
