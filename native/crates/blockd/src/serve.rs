//! The daemon: mount, socket, and an orderly end.
//!
//! Invariant at exit by signal or request: no new requests, every upper
//! flushed, nothing mounted, no socket left.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, Context};
use fuser::{BackgroundSession, Config, Session, SessionACL};
use lsmt::Opener;
use remote::{RemoteOptions, Remotes};
use tokio::net::UnixListener;
use tokio::signal::unix::{signal, SignalKind};
use tokio::sync::watch;

use crate::api::{self, App};
use crate::fuse::StackFs;
use crate::stacks::Registry;
use crate::sys::{self, MountState};
use crate::traces::Traces;
use crate::ublk::Devices;

/// Threads for blocking API work.
const MAX_BLOCKING_THREADS: usize = 32;
/// How long requests under way may take to finish at the end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Unflushed records become durable at the latest after this time.
const FLUSH_INTERVAL: Duration = Duration::from_secs(30);
/// Dead mounts removed from one folder before giving up.
const MAX_DEAD_MOUNTS: usize = 16;
/// Only root talks to the daemon.
const SOCKET_MODE: u32 = 0o600;

/// What `blockd serve` was told.
pub struct ServeOptions {
    /// Where the API listens.
    pub socket: PathBuf,
    /// Where stacks appear as files.
    pub mount: PathBuf,
    /// Threads that serve file requests.
    pub threads: usize,
    /// Memory for decompressed blocks of all layers together.
    pub cache_bytes: u64,
    /// How long reads of the first stack on a remote disk are recorded.
    pub trace_window: Duration,
    /// How to read layers that are in registries, if at all.
    pub remote: Option<RemoteOptions>,
    /// Where the records of ublk devices are, if there are to be any.
    pub ublk_state: Option<PathBuf>,
}

/// Runs the daemon until a signal or a request ends it.
pub fn run(options: &ServeOptions) -> anyhow::Result<()> {
    if let Err(error) = sys::protect_from_oom() {
        tracing::warn!(%error, "cannot lower the out-of-memory score");
    }
    match sys::raise_open_files() {
        Ok(limit) => tracing::debug!(limit, "open files limit"),
        Err(error) => tracing::warn!(%error, "cannot raise the limit of open files"),
    }
    let mount = prepare_mount(&options.mount)?;
    check_socket(&options.socket)?;
    let remotes = open_remotes(options.remote.as_ref())?;
    let mut opener = Opener::new(options.cache_bytes);
    if let Some(remotes) = &remotes {
        opener = opener.with_elsewhere(remotes.clone());
    }
    let registry = Arc::new(Registry::new(
        &mount,
        opener,
        Traces::new(options.trace_window),
    ));
    let session = start_session(&mount, registry.clone(), options.threads)?;
    registry.set_notifier(session.notifier());
    if let Some(state) = &options.ublk_state {
        let devices = Devices::open(state);
        if let Err(reason) = &devices {
            tracing::info!(%reason, "no ublk devices; stacks are files");
        }
        registry.set_devices(devices);
        registry.recover();
    }
    let result = serve_api(&options.socket, &mount, registry.clone(), remotes);
    // Best effort: the next start removes a stale socket itself.
    let _ = std::fs::remove_file(&options.socket);
    let failed_flushes =
        registry.end_devices() + registry.flush_all() + finish_mount(&mount, &registry);
    result?;
    if failed_flushes > 0 {
        bail!("{failed_flushes} stacks could not be flushed; see the log above");
    }
    tracing::info!("stopped");
    Ok(())
}

/// Makes the folder ready to mount at: removes what dead daemons left, and
/// refuses a folder that another one serves.
fn prepare_mount(directory: &Path) -> anyhow::Result<PathBuf> {
    let shown = directory.display();
    for _ in 0..MAX_DEAD_MOUNTS {
        let state = sys::mount_state(directory).with_context(|| format!("cannot use {shown}"))?;
        match state {
            MountState::Alive => bail!(
                "{shown} is inside a FUSE mount that is in use; choose another folder or stop \
                 the process that serves it"
            ),
            MountState::Dead => {
                tracing::warn!(mount = %shown, "removing the mount of a dead daemon");
                sys::unmount(directory, true).with_context(|| format!("cannot unmount {shown}"))?;
            }
            MountState::Free => {
                std::fs::create_dir_all(directory)
                    .with_context(|| format!("cannot create {shown}"))?;
                return directory
                    .canonicalize()
                    .with_context(|| format!("cannot resolve {shown}"));
            }
        }
    }
    bail!("more than {MAX_DEAD_MOUNTS} dead mounts are stacked at {shown}; unmount them by hand")
}

/// Refuses to take over the socket of a living daemon; removes a stale one.
fn check_socket(socket: &Path) -> anyhow::Result<()> {
    match UnixStream::connect(socket) {
        Ok(_) => bail!(
            "another process serves {}; stop it or choose another socket",
            socket.display()
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(socket)
                .with_context(|| format!("cannot remove the stale socket {}", socket.display()))
        }
        Err(error) => Err(error).with_context(|| format!("cannot use {}", socket.display())),
    }
}

fn start_session(
    mount: &Path,
    registry: Arc<Registry>,
    threads: usize,
) -> anyhow::Result<BackgroundSession> {
    let hint = "run as root on a kernel with FUSE (modprobe fuse)";
    let device = sys::mount_fuse(mount)
        .with_context(|| format!("cannot mount FUSE at {}: {hint}", mount.display()))?;
    let mut config = Config::default();
    config.n_threads = Some(threads);
    config.clone_fd = true;
    let filesystem = StackFs::new(registry);
    let started = Session::from_fd(filesystem, device, SessionACL::All, config)
        .and_then(Session::spawn)
        .context("cannot start the FUSE session");
    if started.is_err() {
        // Best effort: the error of the session is what matters.
        let _ = sys::unmount(mount, true);
    }
    started
}

/// Unmounts; returns how many stacks failed their last flush.
fn finish_mount(mount: &Path, registry: &Registry) -> usize {
    if let Err(error) = sys::unmount(mount, false) {
        tracing::warn!(%error, "files are in use; they fail from now on");
        if let Err(error) = sys::unmount(mount, true) {
            tracing::error!(%error, mount = %mount.display(), "cannot unmount");
        }
    }
    // Writes may have come between the first flush and the unmount.
    registry.flush_all()
}

fn open_remotes(options: Option<&RemoteOptions>) -> anyhow::Result<Option<Arc<Remotes>>> {
    let Some(options) = options else {
        return Ok(None);
    };
    let remotes = Remotes::new(options.clone()).with_context(|| {
        format!(
            "cannot use the block cache in {}",
            options.cache_folder.display()
        )
    })?;
    Ok(Some(Arc::new(remotes)))
}

fn serve_api(
    socket: &Path,
    mount: &Path,
    registry: Arc<Registry>,
    remotes: Option<Arc<Remotes>>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .build()
        .context("cannot start the runtime")?;
    let result = runtime.block_on(serve_until_stopped(socket, mount, registry, remotes));
    runtime.shutdown_timeout(DRAIN_TIMEOUT);
    result
}

async fn serve_until_stopped(
    socket: &Path,
    mount: &Path,
    registry: Arc<Registry>,
    remotes: Option<Arc<Remotes>>,
) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot catch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot catch SIGINT")?;
    let listener = UnixListener::bind(socket)
        .with_context(|| format!("cannot listen on {}", socket.display()))?;
    let mode = std::fs::Permissions::from_mode(SOCKET_MODE);
    std::fs::set_permissions(socket, mode).context("cannot protect the socket")?;
    let (stop, mut stopped) = watch::channel(false);
    let app = App::new(registry.clone(), remotes, mount, stop.clone())
        .context("cannot stat the mount")?;
    let mut seen_by_server = stop.subscribe();
    let server =
        axum::serve(listener, api::router(Arc::new(app))).with_graceful_shutdown(async move {
            // An error means that every sender is gone, which is an end too.
            let _ = seen_by_server.wait_for(|is_set| *is_set).await;
        });
    let server = tokio::spawn(async move { server.await });
    let flusher = tokio::spawn(flush_regularly(registry));
    tracing::info!(socket = %socket.display(), mount = %mount.display(), "serving");
    tokio::select! {
        _ = terminate.recv() => tracing::info!("SIGTERM"),
        _ = interrupt.recv() => tracing::info!("SIGINT"),
        _ = stopped.wait_for(|is_set| *is_set) => tracing::info!("asked to stop"),
    }
    stop.send_replace(true);
    flusher.abort();
    match tokio::time::timeout(DRAIN_TIMEOUT, server).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => return Err(error).context("the API server failed"),
        Ok(Err(error)) => return Err(error).context("the API server failed"),
        Err(_) => tracing::warn!("a connection did not end in time and was dropped"),
    }
    Ok(())
}

/// The time bound on records that no guest ever flushes.
async fn flush_regularly(registry: Arc<Registry>) {
    loop {
        tokio::time::sleep(FLUSH_INTERVAL).await;
        let registry = registry.clone();
        // Failures are logged there, and met again by the next flush.
        let _ = tokio::task::spawn_blocking(move || registry.flush_all()).await;
    }
}
