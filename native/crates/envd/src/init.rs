//! `POST /init` (contract section 3.2): makes a restored guest itself. Host-internal, idempotent.
//!
//! It is on the path of every restore, so it does only what differs from the state it finds.
//! Fields that are absent change nothing; `envVars` replaces the whole set; an empty `accessToken`
//! opens the agent. Beyond the contract: `hostname`, `machineId` (32 hexadecimal digits),
//! `entropySeed` (base64, 32 to 4096 bytes), `dnsServers` (addresses).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::{Request, Response, StatusCode};
use rustix::fs::{Mode, OFlags};
use rustix::time::{ClockId, Timespec};
use serde::Deserialize;

use crate::app::App;
use crate::clock;
use crate::connect::{error::cause, lenient};
use crate::http::{self, Body, RestError};
use crate::identity;
use crate::limits::{CLOCK_TOLERANCE_NS, ENTROPY_MAX_BYTES, ENTROPY_MIN_BYTES, ENVD_VERSION};
use crate::metrics;
use crate::sys;
use crate::volumes::{self, VolumeMount};

/// Folder of the files that tell programs about their sandbox.
const FACTS_FOLDER: &str = "/run/e2b";
const FACTS: [&str; 3] = ["E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEMPLATE_ID"];

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct InitRequest {
    env_vars: Option<BTreeMap<String, String>>,
    access_token: Option<String>,
    timestamp: Option<String>,
    default_user: Option<String>,
    default_workdir: Option<String>,
    hostname: Option<String>,
    machine_id: Option<String>,
    #[serde(deserialize_with = "lenient::optional_bytes")]
    entropy_seed: Option<Bytes>,
    dns_servers: Option<Vec<IpAddr>>,
    volume_mounts: Option<Vec<VolumeMount>>,
}

/// Answers the call.
pub async fn handle(app: Arc<App>, request: Request<Incoming>) -> Response<Body> {
    match try_init(&app, request).await {
        Ok(()) => {
            let mut response = http::empty(StatusCode::NO_CONTENT);
            response
                .headers_mut()
                .insert("x-envd-version", HeaderValue::from_static(ENVD_VERSION));
            response
        }
        Err(error) => error.into_response(),
    }
}

async fn try_init(app: &App, request: Request<Incoming>) -> Result<(), RestError> {
    let mut request: InitRequest = http::read_json(request.into_body()).await?;
    let time = check(&request)?;
    let mounts = request.volume_mounts.take();
    apply(app, request, time)?;
    match mounts {
        Some(mounts) => volumes::set(mounts).await,
        None => Ok(()),
    }
}

fn bad(message: String) -> RestError {
    RestError::new(StatusCode::BAD_REQUEST, message)
}

/// Checks everything before anything is changed. Returns the time to set, in nanoseconds since 1970.
fn check(request: &InitRequest) -> Result<Option<i128>, RestError> {
    if let Some(name) = request
        .hostname
        .as_deref()
        .filter(|name| !identity::is_hostname(name))
    {
        return Err(bad(format!(
            "hostname '{name}' is not valid; use letters, digits, dashes and dots"
        )));
    }
    if let Some(id) = request
        .machine_id
        .as_deref()
        .filter(|id| !identity::is_machine_id(id))
    {
        return Err(bad(format!(
            "machineId '{id}' is not valid; use 32 lowercase hexadecimal digits"
        )));
    }
    if let Some(seed) = request
        .entropy_seed
        .as_ref()
        .filter(|seed| !(ENTROPY_MIN_BYTES..=ENTROPY_MAX_BYTES).contains(&seed.len()))
    {
        return Err(bad(format!(
            "entropySeed has {} bytes; use {ENTROPY_MIN_BYTES} to {ENTROPY_MAX_BYTES}",
            seed.len()
        )));
    }
    let invalid = |name: &&String| name.is_empty() || name.contains(['=', '\0']);
    if let Some(name) = request
        .env_vars
        .iter()
        .flat_map(BTreeMap::keys)
        .find(invalid)
    {
        return Err(bad(format!(
            "'{name}' is not a name for an environment variable"
        )));
    }
    match request.timestamp.as_deref().filter(|text| !text.is_empty()) {
        None => Ok(None),
        Some(text) => clock::parse_rfc3339(text)
            .map(Some)
            .ok_or_else(|| bad(format!("timestamp '{text}' is not an RFC 3339 time"))),
    }
}

fn apply(app: &App, request: InitRequest, time: Option<i128>) -> Result<(), RestError> {
    // Time and randomness first: nothing after this should see the old ones.
    step("set the clock", time.map_or(Ok(()), set_clock))?;
    if let Some(seed) = &request.entropy_seed {
        step("reseed the random generator", reseed(seed))?;
    }
    {
        let mut settings = app.settings();
        if let Some(token) = request.access_token {
            settings.access_token = (!token.is_empty()).then_some(token);
        }
        if let Some(user) = request.default_user.filter(|user| !user.is_empty()) {
            settings.default_user = user;
        }
        if let Some(folder) = request.default_workdir {
            settings.default_workdir = (!folder.is_empty()).then(|| PathBuf::from(folder));
        }
        if let Some(envs) = &request.env_vars {
            settings.envs.clone_from(envs);
        }
    }
    metrics::begin(app);
    if let Some(name) = &request.hostname {
        step("set the hostname", identity::set_hostname(name))?;
    }
    if let Some(id) = &request.machine_id {
        step("set the machine id", identity::set_machine_id(id))?;
    }
    if let Some(servers) = &request.dns_servers {
        step("write /etc/resolv.conf", identity::set_dns_servers(servers))?;
    }
    if let Some(envs) = &request.env_vars {
        step("write the facts of the sandbox", write_facts(envs))?;
    }
    Ok(())
}

fn step(what: &str, result: io::Result<()>) -> Result<(), RestError> {
    result.map_err(|error| {
        RestError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("cannot {what}: {}", cause(&error)),
        )
    })
}

fn set_clock(nanos: i128) -> io::Result<()> {
    if (nanos - clock::unix_nanos()).abs() <= CLOCK_TOLERANCE_NS {
        return Ok(());
    }
    let seconds = i64::try_from(nanos.div_euclid(1_000_000_000)).map_err(io::Error::other)?;
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: nanos.rem_euclid(1_000_000_000) as _,
    };
    Ok(rustix::time::clock_settime(ClockId::Realtime, time)?)
}

fn reseed(seed: &[u8]) -> io::Result<()> {
    use std::os::fd::AsFd;
    let device = rustix::fs::open(
        "/dev/urandom",
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    sys::add_entropy(device.as_fd(), seed)
}

/// `/run/e2b/.E2B_SANDBOX` and the like (contract section 2.5).
fn write_facts(envs: &BTreeMap<String, String>) -> io::Result<()> {
    for name in FACTS {
        let path = Path::new(FACTS_FOLDER).join(format!(".{name}"));
        match envs.get(name) {
            Some(value) => identity::write_if_changed(&path, value)?,
            None => match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            },
        }
    }
    Ok(())
}
