//! Who asks a registry: logins given by callers, else those in files in the form of docker's config.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use parking_lot::Mutex;
use serde::Deserialize;

use crate::address::{self, Address};

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

/// Logins: those given by callers, else those of files, of which the first that has one counts.
#[derive(Default)]
pub struct Logins {
    given: Mutex<HashMap<String, Login>>,
    docker_configs: Vec<PathBuf>,
}

impl Logins {
    /// No login is known yet but those of the files, which are read at each use.
    pub fn new(docker_configs: Vec<PathBuf>) -> Logins {
        Logins {
            given: Mutex::default(),
            docker_configs,
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
        let blobs = address::parse(blobs_url)?;
        self.docker_configs.iter().find_map(|file| {
            if std::fs::metadata(file).ok()?.len() > MAX_CONFIG_BYTES {
                return None;
            }
            from_docker_config(&std::fs::read(file).ok()?, &blobs)
        })
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

#[cfg(test)]
mod tests {
    use super::*;

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
    fn the_first_file_with_a_login_counts_as_it_is_now() {
        let folder = std::env::temp_dir().join(format!("remote-logins-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (first, second) = (folder.join("helpers.json"), folder.join("config.json"));
        let write = |file: &PathBuf, host: &str, user: &str| {
            let auth = STANDARD.encode(format!("{user}:x"));
            let text = format!(r#"{{"auths": {{"{host}": {{"auth": "{auth}"}}}}}}"#);
            std::fs::write(file, text).unwrap();
        };
        let logins = Logins::new(vec![first.clone(), second.clone()]);
        let user = || {
            let found = logins.find("http://r:5000/v2/x/blobs");
            found.map(|login| login.username)
        };
        assert_eq!(user(), None);
        write(&second, "r:5000", "second");
        assert_eq!(user().as_deref(), Some("second"));
        write(&first, "other", "first");
        assert_eq!(user().as_deref(), Some("second"));
        write(&first, "r:5000", "first");
        assert_eq!(user().as_deref(), Some("first"));
        std::fs::write(&first, "torn {").unwrap();
        assert_eq!(user().as_deref(), Some("second"));
        std::fs::remove_dir_all(folder).unwrap();
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
