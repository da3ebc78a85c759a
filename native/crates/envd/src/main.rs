//! Guest agent of a sandbox: PID 1, commands, files and health on one port.
//!
//! It is one static program that needs nothing from the image it runs in. `boot` brings the guest up,
//! `server` answers requests, `process` and `filesystem` and `files` do what they ask, `init` makes a
//! restored guest itself, `reaper` collects what ended.
#![cfg_attr(not(test), no_main)]

mod app;
mod auth;
mod boot;
mod clock;
mod connect;
mod files;
mod filesystem;
mod freeze;
#[cfg(test)]
mod fuzz;
mod http;
mod identity;
mod init;
mod limits;
mod metrics;
mod options;
mod process;
mod provision;
mod reaper;
mod rpc;
mod server;
mod signature;
mod sys;
mod users;
mod volumes;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};

use tokio::net::TcpListener;
use tokio::signal::unix::{signal, SignalKind};

use crate::app::{App, InternalAccess};
use crate::boot::settings::{BootSettings, ExitAction};
use crate::boot::BootError;
use crate::options::Options;
use crate::process::cgroup::CgroupRoot;
use crate::process::registry::Registry;

/// Parent of the per-process cgroups in a guest.
const GUEST_CGROUP: &str = "/sys/fs/cgroup/aenv";

/// Entry from the C runtime. Rust's own start-up would end the program when the kernel started it
/// without standard streams and the initramfs has no /dev/null yet.
#[cfg_attr(not(test), export_name = "main")]
#[cfg_attr(test, allow(dead_code))]
extern "C" fn entry(_argc: i32, _argv: *const *const u8) -> i32 {
    sys::ignore_sigpipe();
    if std::process::id() == 1 {
        run_as_init();
    }
    match options::parse(std::env::args().skip(1)) {
        Ok(options) => match run_ordinary(options) {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("envd: {error}");
                1
            }
        },
        Err(mistake) => {
            eprint!(
                "{}{}",
                if mistake.is_empty() {
                    String::new()
                } else {
                    format!("envd: {mistake}\n\n")
                },
                options::USAGE
            );
            2
        }
    }
}

/// The event loop and its workers. Workers are never given back, and the first ones are there from the
/// start: when the guest is out of processes or memory no new one can be made, and the work waits for
/// those there are.
fn runtime() -> io::Result<tokio::runtime::Runtime> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(limits::FILE_THREADS_MAX)
        .thread_keep_alive(limits::FILE_THREADS_KEPT)
        .build()?;
    let all_there = Arc::new(Barrier::new(limits::FILE_THREADS_MIN));
    for _ in 0..limits::FILE_THREADS_MIN {
        let all_there = all_there.clone();
        runtime.spawn_blocking(move || all_there.wait());
    }
    Ok(runtime)
}

fn run_as_init() -> ! {
    let settings = match boot::boot() {
        Ok(settings) => settings,
        Err(error) => {
            let text = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
            boot::fail(&error, ExitAction::of(&text))
        }
    };
    let exit = settings.exit;
    let outcome = runtime().and_then(|runtime| runtime.block_on(serve_guest(settings)));
    let cause = outcome.map_or_else(
        |error| error.to_string(),
        |()| "the server ended".to_owned(),
    );
    boot::fail(&BootError::new("serve", cause), exit)
}

async fn serve_guest(settings: BootSettings) -> io::Result<()> {
    let internal = settings.gateway.map_or(InternalAccess::Nobody, |gateway| {
        InternalAccess::Peer(IpAddr::V4(gateway))
    });
    let cgroups = match CgroupRoot::create(Path::new(GUEST_CGROUP)) {
        Ok(mut root) => {
            if let Err(error) = root.set_apart() {
                boot::say(&format!(
                    "limit {GUEST_CGROUP}: {error} (a fork bomb may stop other commands)"
                ));
            }
            Some(root)
        }
        Err(error) => {
            boot::say(&format!(
                "prepare {GUEST_CGROUP}: {error} (trees are killed by walking /proc)"
            ));
            None
        }
    };
    let app = Arc::new(App::new(settings.user, internal, Registry::new(cgroups)));
    let listener = TcpListener::bind((IpAddr::from([0, 0, 0, 0]), settings.port)).await?;
    reaper::start(app.clone())?;
    let mut terminate = signal(SignalKind::terminate())?;
    // Ctrl-Alt-Del, which is how some hosts ask a guest to end.
    let mut interrupt = signal(SignalKind::interrupt())?;
    // `halt` and `poweroff` of small userlands.
    let mut halt = signal(SignalKind::user_defined1())?;
    let mut power_off = signal(SignalKind::user_defined2())?;
    tokio::select! {
        ended = server::serve(app, listener) => return ended.map(|never| match never {}),
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = halt.recv() => {}
        _ = power_off.recv() => {}
    }
    boot::shut_down(settings.exit).await
}

fn run_ordinary(options: Options) -> io::Result<()> {
    sys::become_subreaper()?;
    runtime()?.block_on(async {
        let cgroups = options
            .cgroup
            .as_ref()
            .map(|path: &PathBuf| CgroupRoot::create(path))
            .transpose()?;
        let app = Arc::new(App::new(
            options.default_user,
            options.internal,
            Registry::new(cgroups),
        ));
        let address = SocketAddr::from((options.bind, options.port));
        let listener = TcpListener::bind(address).await.map_err(|error| {
            io::Error::new(error.kind(), format!("cannot serve {address}: {error}"))
        })?;
        eprintln!("envd: serving {}", listener.local_addr()?);
        reaper::start(app.clone())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            ended = server::serve(app, listener) => ended.map(|never| match never {}),
            _ = terminate.recv() => Ok(()),
        }
    })
}
