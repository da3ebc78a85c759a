//! HTTP requests with a bound on connections and on time. Redirects are left to the
//! caller, who knows which secrets may follow them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ureq::http::HeaderMap;
use ureq::tls::{parse_pem, Certificate, PemItem, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::address::Address;

/// Time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest silence of a server.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(15);
/// One exchange, body included; bodies are a few MiB.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Idle connections are closed after this time.
const IDLE_AGE: Duration = Duration::from_secs(30);
/// Headers of a reply.
const MAX_HEADER_BYTES: usize = 64 << 10;
/// Where systems keep the authorities they trust.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// How to reach registries.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// Connections to one server at a time: one that hangs takes none from others.
    pub connections: usize,
    /// Authorities of single registries: `<host[:port]>/*.crt` in this folder.
    pub certs_dir: Option<PathBuf>,
}

/// A client for all registries. Connections are kept for reuse.
pub struct Http {
    options: HttpOptions,
    agents: Mutex<HashMap<(String, bool), Agent>>,
    in_use: Mutex<HashMap<String, usize>>,
    freed: Condvar,
}

/// One reply; the connection is counted until it is dropped.
pub struct Reply<'a> {
    /// Status code.
    pub status: u16,
    /// Headers.
    pub headers: HeaderMap,
    /// Body, not read yet.
    pub body: Body,
    _permit: Permit<'a>,
}

impl Reply<'_> {
    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// Why no reply came.
#[derive(Debug)]
pub struct NoReply {
    /// What was met.
    pub reason: String,
    /// Whether asking again may help: the server is not who it should be, or our own
    /// files about it are of no use.
    pub is_final: bool,
}

impl From<ureq::Error> for NoReply {
    fn from(error: ureq::Error) -> NoReply {
        let is_final = match &error {
            // What the TLS library says of a certificate arrives as such an error.
            ureq::Error::Io(cause) => cause.kind() == std::io::ErrorKind::InvalidData,
            ureq::Error::Rustls(_) | ureq::Error::Tls(_) | ureq::Error::BadUri(_) => true,
            _ => false,
        };
        NoReply {
            reason: error.to_string(),
            is_final,
        }
    }
}

struct Permit<'a> {
    http: &'a Http,
    host: String,
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut in_use = self.http.in_use.lock();
        if let Some(count) = in_use.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                in_use.remove(&self.host);
            }
        }
        self.http.freed.notify_all();
    }
}

impl Http {
    /// A client; nothing is connected yet.
    pub fn new(options: HttpOptions) -> Http {
        Http {
            options,
            in_use: Mutex::default(),
            agents: Mutex::default(),
            freed: Condvar::new(),
        }
    }

    /// Sends one GET and reads the head of the reply. Any status is a reply; an error
    /// is what kept it from coming.
    pub fn get(
        &self,
        address: &Address,
        headers: &[(&str, String)],
        check_certificate: bool,
    ) -> Result<Reply<'_>, NoReply> {
        let Some(permit) = self.permit(&address.host) else {
            let reason = "all connections to it are busy".to_owned();
            return Err(NoReply {
                reason,
                is_final: false,
            });
        };
        let agent = self.agent(&address.host, check_certificate);
        let agent = agent.map_err(|reason| NoReply {
            reason,
            is_final: true,
        })?;
        let mut request = agent.get(address.text());
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let (parts, body) = request.call()?.into_parts();
        Ok(Reply {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body,
            _permit: permit,
        })
    }

    /// Waits for one of the server's connections, as long as an exchange may take.
    fn permit(&self, host: &str) -> Option<Permit<'_>> {
        let end = Instant::now() + EXCHANGE_TIMEOUT;
        let mut in_use = self.in_use.lock();
        while in_use
            .get(host)
            .is_some_and(|count| *count >= self.options.connections.max(1))
        {
            if self.freed.wait_until(&mut in_use, end).timed_out() {
                return None;
            }
        }
        *in_use.entry(host.to_owned()).or_default() += 1;
        let host = host.to_owned();
        Some(Permit { http: self, host })
    }

    fn agent(&self, host: &str, check_certificate: bool) -> Result<Agent, String> {
        let key = (host.to_owned(), check_certificate);
        if let Some(agent) = self.agents.lock().get(&key) {
            return Ok(agent.clone());
        }
        let agent = self.new_agent(host, check_certificate)?;
        Ok(self.agents.lock().entry(key).or_insert(agent).clone())
    }

    fn new_agent(&self, host: &str, check_certificate: bool) -> Result<Agent, String> {
        let mut authorities = Vec::new();
        for bundle in BUNDLES
            .map(Path::new)
            .into_iter()
            .filter(|path| path.is_file())
            .take(1)
        {
            authorities.extend(read_certificates(bundle)?);
        }
        for file in self.extra_authorities(host) {
            authorities.extend(read_certificates(&file)?);
        }
        let roots = if authorities.is_empty() {
            RootCerts::WebPki
        } else {
            RootCerts::new_with_certs(&authorities)
        };
        let tls = TlsConfig::builder()
            .root_certs(roots)
            .disable_verification(!check_certificate)
            .build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .user_agent(concat!("agentenv-blockd/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .max_response_header_size(MAX_HEADER_BYTES)
            .max_idle_connections_per_host(self.options.connections)
            .max_idle_connections(self.options.connections)
            .max_idle_age(IDLE_AGE)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(SILENCE_TIMEOUT))
            .timeout_per_read(Some(SILENCE_TIMEOUT))
            .timeout_global(Some(EXCHANGE_TIMEOUT))
            .build();
        Ok(config.new_agent())
    }

    fn extra_authorities(&self, host: &str) -> Vec<PathBuf> {
        let Some(folder) = &self.options.certs_dir else {
            return Vec::new();
        };
        // A host is checked by the address parser: it holds no slash.
        let Ok(entries) = std::fs::read_dir(folder.join(host)) else {
            return Vec::new();
        };
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        paths
            .filter(|path| path.extension().is_some_and(|extension| extension == "crt"))
            .collect()
    }
}

fn read_certificates(path: &Path) -> Result<Vec<Certificate<'static>>, String> {
    let fail = |reason: String| {
        format!(
            "cannot read the certificates in {}: {reason}",
            path.display()
        )
    };
    let text = std::fs::read(path).map_err(|error| fail(error.to_string()))?;
    let mut found = Vec::new();
    for item in parse_pem(&text) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| fail(error.to_string()))? {
            found.push(certificate);
        }
    }
    Ok(found)
}
