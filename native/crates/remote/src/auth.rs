//! What a registry wants to see before it answers: `WWW-Authenticate` and tokens.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::address::{self, Address};

/// Lifetime of a token that states none (distribution's token specification).
const DEFAULT_LIFETIME: Duration = Duration::from_secs(60);
/// Longest time one is used without asking for another.
const MAX_LIFETIME: Duration = Duration::from_secs(3600);
/// A token is left alone this long before its end.
const MARGIN: Duration = Duration::from_secs(5);
/// Largest reply of a token server.
const MAX_TOKEN_BYTES: u64 = 1 << 20;

/// One way to prove oneself that a server offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Challenge {
    /// A token from the server named here.
    Bearer {
        /// Address of the token server.
        realm: String,
        /// What it calls the registry.
        service: Option<String>,
        /// What the token must permit.
        scope: Option<String>,
    },
    /// User and password.
    Basic,
}

/// Reads a `WWW-Authenticate` header, which may hold several challenges.
pub fn parse_challenges(header: &str) -> Vec<Challenge> {
    let mut found: Vec<(String, HashMap<String, String>)> = Vec::new();
    let mut rest = header.trim();
    while !rest.is_empty() {
        let end = rest.find([' ', '=', ',']).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if let Some(value) = after
            .trim_start()
            .strip_prefix('=')
            .filter(|_| !word.is_empty())
        {
            let (value, after) = take_value(value.trim_start());
            if let Some((_, parameters)) = found.last_mut() {
                parameters.insert(word.to_ascii_lowercase(), value);
            }
            rest = after;
        } else {
            if !word.is_empty() {
                found.push((word.to_ascii_lowercase(), HashMap::new()));
            }
            rest = after;
        }
        rest = rest.trim_start_matches([' ', ',', '\t']);
        // A stray sign must not hold the loop up.
        rest = rest.strip_prefix('=').unwrap_or(rest);
    }
    let known = found
        .into_iter()
        .filter_map(|(scheme, mut parameters)| match scheme.as_str() {
            "bearer" => Some(Challenge::Bearer {
                realm: parameters.remove("realm")?,
                service: parameters.remove("service"),
                scope: parameters.remove("scope"),
            }),
            "basic" => Some(Challenge::Basic),
            _ => None,
        });
    known.collect()
}

fn take_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([',', ' ']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut letters = quoted.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(letters.next().map(|(_, next)| next)),
            _ => value.push(letter),
        }
    }
    (value, "")
}

/// The address to ask for a token.
pub fn token_address(realm: &str, service: Option<&str>, scope: Option<&str>) -> Option<Address> {
    let mut text = realm.to_owned();
    for (name, value) in [("service", service), ("scope", scope)] {
        if let Some(value) = value {
            text.push(if text.contains('?') { '&' } else { '?' });
            text.push_str(&format!("{name}={}", escape(value)));
        }
    }
    address::parse(&text)
}

fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~:/,".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

/// What requests carry, and until when.
#[derive(Clone)]
pub struct Granted {
    /// Value of the `Authorization` header.
    pub header: String,
    /// When to ask anew.
    pub until: Instant,
}

#[derive(Deserialize)]
struct TokenReply {
    #[serde(default)]
    token: String,
    #[serde(default)]
    access_token: String,
    #[serde(default)]
    expires_in: Option<u64>,
}

/// Reads the reply of a token server.
pub fn read_token(body: impl std::io::Read) -> Result<Granted, String> {
    let reply: TokenReply =
        serde_json::from_reader(body.take(MAX_TOKEN_BYTES)).map_err(|error| error.to_string())?;
    let token = if reply.token.is_empty() {
        reply.access_token
    } else {
        reply.token
    };
    let is_plain = |byte: u8| byte.is_ascii_graphic();
    if token.is_empty() || !token.bytes().all(is_plain) {
        return Err("it sent no token".to_owned());
    }
    let lifetime = reply
        .expires_in
        .map_or(DEFAULT_LIFETIME, Duration::from_secs)
        .min(MAX_LIFETIME);
    Ok(Granted {
        header: format!("Bearer {token}"),
        until: Instant::now() + lifetime.saturating_sub(MARGIN),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(realm: &str, service: Option<&str>, scope: Option<&str>) -> Challenge {
        Challenge::Bearer {
            realm: realm.to_owned(),
            service: service.map(str::to_owned),
            scope: scope.map(str::to_owned),
        }
    }

    #[test]
    fn challenges_are_read_in_all_their_forms() {
        let text = r#"Bearer realm="https://a/t?x=1,2",service="s",scope="repository:x:pull""#;
        assert_eq!(
            parse_challenges(text),
            [bearer(
                "https://a/t?x=1,2",
                Some("s"),
                Some("repository:x:pull")
            )]
        );
        let text = r#"Basic realm="r e", bearer Realm=https://a/t , Negotiate"#;
        assert_eq!(
            parse_challenges(text),
            [Challenge::Basic, bearer("https://a/t", None, None)]
        );
        let text = r#"Bearer realm="a\"b""#;
        assert_eq!(parse_challenges(text), [bearer("a\"b", None, None)]);
    }

    #[test]
    fn no_challenge_holds_the_reader_up() {
        for text in [
            "",
            "=",
            "==,,= =",
            "\"",
            "Bearer realm",
            "Bearer =x",
            "Bearer realm=\"",
            ",",
            "a=b",
            "\\",
        ] {
            parse_challenges(text);
        }
    }

    #[test]
    fn a_token_reply_without_a_usable_token_is_refused() {
        assert_eq!(
            read_token(&br#"{"access_token": "t"}"#[..]).unwrap().header,
            "Bearer t"
        );
        for bad in ["{}", "x", r#"{"token": "a\r\nb: c"}"#, r#"{"token": 3}"#] {
            assert!(read_token(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
