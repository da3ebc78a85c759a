//! State shared by all requests: what `/init` set, and the processes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::connect::{Code, ConnectError};
use crate::files::turns::Turns;
use crate::filesystem::watch::registry::Watchers;
use crate::metrics::CpuSample;
use crate::process::registry::Registry;
use crate::users::{Accounts, User};

/// Who may use the host-internal endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InternalAccess {
    /// Only this peer.
    Peer(IpAddr),
    /// Every peer (tests).
    Any,
    /// Nobody.
    Nobody,
}

impl InternalAccess {
    /// Whether `peer` is let in.
    pub fn allows(self, peer: IpAddr) -> bool {
        match self {
            InternalAccess::Peer(address) => address == peer,
            InternalAccess::Any => true,
            InternalAccess::Nobody => false,
        }
    }
}

/// What `/init` sets. Lives in memory only.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Token of the clients; None lets everyone in.
    pub access_token: Option<String>,
    /// Sandbox-wide environment.
    pub envs: BTreeMap<String, String>,
    /// User of requests that name none.
    pub default_user: String,
    /// Working directory of requests that name none.
    pub default_workdir: Option<PathBuf>,
}

/// The program's state.
pub struct App {
    settings: Mutex<Settings>,
    /// Processes started by clients.
    pub processes: Registry,
    /// Who may call `/init`.
    pub internal: InternalAccess,
    /// Uploads in progress.
    pub uploads: Arc<Turns>,
    /// Watched folders.
    pub watchers: Arc<Watchers>,
    /// Last reading of the CPU counters.
    pub cpu: Mutex<Option<CpuSample>>,
    /// When the root file system was frozen; None while it is not.
    pub frozen_since: Mutex<Option<Instant>>,
}

impl App {
    /// State before the first `/init`.
    pub fn new(default_user: String, internal: InternalAccess, processes: Registry) -> Self {
        let settings = Settings {
            access_token: None,
            envs: BTreeMap::new(),
            default_user,
            default_workdir: None,
        };
        Self {
            settings: Mutex::new(settings),
            processes,
            internal,
            uploads: Arc::default(),
            watchers: Arc::default(),
            cpu: Mutex::new(None),
            frozen_since: Mutex::new(None),
        }
    }

    /// The settings, locked. Never held across an await.
    pub fn settings(&self) -> MutexGuard<'_, Settings> {
        lock(&self.settings)
    }

    /// User by name, or the default one.
    pub fn find_user(&self, name: Option<&str>) -> Result<User, String> {
        let name = match name.filter(|name| !name.is_empty()) {
            Some(name) => name.to_owned(),
            None => self.settings().default_user.clone(),
        };
        Accounts::load().user(&name).ok_or(name)
    }

    /// User of an RPC (contract section 3.1).
    pub fn rpc_user(&self, name: Option<&str>) -> Result<User, ConnectError> {
        self.find_user(name).map_err(|name| {
            ConnectError::new(
                Code::Unauthenticated,
                format_args!("invalid username: '{name}'"),
            )
        })
    }
}

/// Locks, whatever a panicking holder left: every holder leaves valid data between statements.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
