//! Web addresses, as far as registries need them.

use ureq::http::Uri;

/// The parts that decide who is talked to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Whether it is `https`.
    pub is_secure: bool,
    /// Host and port as written, lower case.
    pub host: String,
    /// Path and query.
    pub path: String,
}

impl Address {
    /// Whether a secret for one may go to the other: scheme, host and port agree.
    pub fn same_origin(&self, other: &Address) -> bool {
        let port = |address: &Address| if address.is_secure { 443 } else { 80 };
        let full = |address: &Address| match split_port(&address.host) {
            (host, Some(given)) => (host.to_owned(), given.to_owned()),
            (host, None) => (host.to_owned(), port(address).to_string()),
        };
        self.is_secure == other.is_secure && full(self) == full(other)
    }

    /// The address in one piece.
    pub fn text(&self) -> String {
        let scheme = if self.is_secure { "https" } else { "http" };
        format!("{scheme}://{}{}", self.host, self.path)
    }
}

fn split_port(host: &str) -> (&str, Option<&str>) {
    match host.rsplit_once(':') {
        Some((name, port))
            if port.bytes().all(|byte| byte.is_ascii_digit()) && !port.is_empty() =>
        {
            (name, Some(port))
        }
        _ => (host, None),
    }
}

/// Reads an absolute address; `None` unless it is http or https without a user.
pub fn parse(text: &str) -> Option<Address> {
    let uri: Uri = text.parse().ok()?;
    let is_secure = match uri.scheme_str()? {
        "https" => true,
        "http" => false,
        _ => return None,
    };
    let authority = uri.authority()?.as_str();
    if authority.contains('@') || uri.host()?.is_empty() {
        return None;
    }
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    Some(Address {
        is_secure,
        host: authority.to_ascii_lowercase(),
        path: path.to_owned(),
    })
}

/// Where a `Location` header leads from `base`.
pub fn join(base: &Address, location: &str) -> Option<Address> {
    let location = location.split('#').next()?.trim();
    if location.contains("://") {
        return parse(location);
    }
    let scheme = if base.is_secure { "https" } else { "http" };
    if location.starts_with("//") {
        return parse(&format!("{scheme}:{location}"));
    }
    let path = base.path.split('?').next().unwrap_or("/");
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let path = if location.starts_with('/') {
        location.to_owned()
    } else {
        format!("{folder}/{location}")
    };
    parse(&format!("{scheme}://{}{path}", base.host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_lead_where_a_browser_would_go() {
        let base = parse("http://a:5000/v2/x/blobs/d?q=1").unwrap();
        for (location, expected) in [
            ("https://b/y?z=1", "https://b/y?z=1"),
            ("//b/y", "http://b/y"),
            ("/y", "http://a:5000/y"),
            ("e#part", "http://a:5000/v2/x/blobs/e"),
        ] {
            assert_eq!(
                join(&base, location).unwrap().text(),
                expected,
                "{location}"
            );
        }
        for bad in ["ftp://b/y", "http://user@b/y", "http:///y"] {
            assert_eq!(join(&base, bad), None, "{bad}");
        }
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = |a: &str, b: &str| parse(a).unwrap().same_origin(&parse(b).unwrap());
        assert!(same("https://A/x", "https://a:443/y"));
        assert!(same("http://a:80/x", "http://a/y"));
        assert!(!same("http://a/x", "https://a/x"));
        assert!(!same("http://a:1/x", "http://a:2/x"));
        assert!(!same("http://a/x", "http://b/x"));
    }
}
