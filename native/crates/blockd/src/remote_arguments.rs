//! The flags of `serve` about layers that are in registries.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use remote::download::DownloadOptions;
use remote::{HttpOptions, RemoteOptions};

/// What `serve` takes for remote layers.
#[derive(Debug, Args)]
pub struct RemoteArguments {
    /// Folder for blocks of remote layers; without one, remote layers are refused.
    #[arg(long)]
    remote_cache: Option<PathBuf>,
    /// Most disk those blocks take.
    #[arg(long, default_value_t = 10_240)]
    remote_cache_mib: u32,
    /// Free disk that those blocks and downloads leave alone.
    #[arg(long, default_value_t = 1024)]
    remote_reserve_mib: u32,
    /// Connections to one registry at a time.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    remote_connections: u16,
    /// Download layers in use as a whole, at this rate in MiB a second; 0 does not.
    #[arg(long, default_value_t = 0)]
    download_mib_per_s: u32,
    /// How long a layer is in use before that begins, in seconds.
    #[arg(long, default_value_t = 60)]
    download_delay_s: u32,
    /// How long reads of the first stack on a remote disk are recorded, in seconds, to be
    /// fetched ahead for later ones; 0 does neither.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=3600))]
    trace_s: u32,
    /// Docker's config.json with logins for registries (repeatable: the first that has a login counts).
    #[arg(long = "docker-config")]
    docker_configs: Vec<PathBuf>,
    /// Authorities of single registries: <host[:port]>/*.crt in this folder.
    #[arg(long)]
    certs_dir: Option<PathBuf>,
}

impl RemoteArguments {
    /// How long a first stack is recorded.
    pub fn trace_window(&self) -> Duration {
        Duration::from_secs(u64::from(self.trace_s))
    }

    /// The same for the library; `None` when remote layers are not wanted.
    pub fn options(self) -> Option<RemoteOptions> {
        Some(RemoteOptions {
            cache_folder: self.remote_cache?,
            cache_bytes: u64::from(self.remote_cache_mib) << 20,
            reserve_bytes: u64::from(self.remote_reserve_mib) << 20,
            docker_configs: self.docker_configs,
            http: HttpOptions {
                connections: usize::from(self.remote_connections),
                certs_dir: self.certs_dir,
            },
            download: DownloadOptions {
                bytes_per_s: u64::from(self.download_mib_per_s) << 20,
                delay: Duration::from_secs(u64::from(self.download_delay_s)),
            },
        })
    }
}
