//! What a registry wants to see before it answers: `WWW-Authenticate`, tokens, and the
//! logins they are bought with.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use parking_lot::Mutex;
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
/// Largest docker config read.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// What docker's config calls its own registry, and the host that serves it.
const HUB: (&str, &str) = ("index.docker.io", "registry-1.docker.io");

/// User and password for one registry. Never shown.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Login {
    /// Who.
    pub username: String,
    /// The proof.
    pub password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Login({:?})", self.username)
    }
}

impl Login {
    /// The value of an `Authorization` header.
    pub fn basic(&self) -> String {
        let both = format!("{}:{}", self.username, self.password);
        format!("Basic {}", STANDARD.encode(both))
    }
}

/// Logins: those given by callers, else those of a docker config file.
#[derive(Default)]
pub struct Logins {
    given: Mutex<HashMap<String, Login>>,
    docker_config: Option<PathBuf>,
}

impl Logins {
    /// No login is known yet but those of the file, which is read at each use.
    pub fn new(docker_config: Option<PathBuf>) -> Logins {
        Logins {
            given: Mutex::default(),
            docker_config,
        }
    }

    /// Remembers a login for all blobs below an address, until the process ends.
    pub fn give(&self, blobs_url: &str, login: Login) {
        self.given.lock().insert(blobs_url.to_owned(), login);
    }

    /// The login for blobs below an address.
    pub fn find(&self, blobs_url: &str) -> Option<Login> {
        if let Some(login) = self.given.lock().get(blobs_url) {
            return Some(login.clone());
        }
        let file = self.docker_config.as_ref()?;
        if std::fs::metadata(file).ok()?.len() > MAX_CONFIG_BYTES {
            return None;
        }
        from_docker_config(&std::fs::read(file).ok()?, &address::parse(blobs_url)?)
    }
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: HashMap<String, DockerAuth>,
}

#[derive(Deserialize)]
struct DockerAuth {
    #[serde(default)]
    auth: String,
}

/// The login of the longest key that is the host, or the host and the start of the
/// repository's name.
fn from_docker_config(text: &[u8], blobs: &Address) -> Option<Login> {
    let config: DockerConfig = serde_json::from_slice(text).ok()?;
    let path = blobs.path.strip_prefix("/v2").unwrap_or(&blobs.path);
    let place = format!("{}{path}/", blobs.host);
    let fits = |key: &str| {
        let bare = key.split_once("://").map_or(key, |(_, rest)| rest);
        let bare = bare.trim_end_matches('/');
        let bare = bare
            .strip_suffix("/v1")
            .or(bare.strip_suffix("/v2"))
            .unwrap_or(bare);
        let bare = if bare == HUB.0 || bare == "docker.io" {
            HUB.1
        } else {
            bare
        };
        place.starts_with(&format!("{bare}/")).then_some(bare.len())
    };
    let found = config
        .auths
        .iter()
        .filter_map(|(key, entry)| Some((fits(key)?, entry)));
    let (_, entry) = found.max_by_key(|(length, _)| *length)?;
    let both = String::from_utf8(STANDARD.decode(entry.auth.trim()).ok()?).ok()?;
    let (username, password) = both.split_once(':')?;
    Some(Login {
        username: username.to_owned(),
        password: password.to_owned(),
    })
}

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
    fn the_longest_key_of_a_docker_config_counts() {
        let auth = |both: &str| STANDARD.encode(both);
        let text = format!(
            r#"{{"auths": {{"r:5000": {{"auth": "{}"}}, "https://r:5000/team": {{"auth": "{}"}},
                "https://index.docker.io/v1/": {{"auth": "{}"}}, "r": {{"auth": "!"}}}}}}"#,
            auth("a:1"),
            auth("b:2:3"),
            auth("hub:4")
        );
        let find = |url: &str| {
            from_docker_config(text.as_bytes(), &address::parse(url).unwrap())
                .map(|login| (login.username, login.password))
        };
        let pair = |a: &str, b: &str| Some((a.to_owned(), b.to_owned()));
        assert_eq!(find("http://r:5000/v2/other/x/blobs"), pair("a", "1"));
        assert_eq!(find("http://r:5000/v2/team/x/blobs"), pair("b", "2:3"));
        assert_eq!(find("http://r:5000/v2/teams/x/blobs"), pair("a", "1"));
        assert_eq!(
            find("https://registry-1.docker.io/v2/library/x/blobs"),
            pair("hub", "4")
        );
        assert_eq!(find("https://r/v2/x/blobs"), None);
        assert_eq!(find("https://evil/v2/r:5000/blobs"), None);
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

    #[test]
    fn a_login_is_never_shown() {
        let login = Login {
            username: "u".into(),
            password: "secret".into(),
        };
        assert!(!format!("{login:?}").contains("secret"));
    }
}
