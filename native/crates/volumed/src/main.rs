//! Serves the volumes of one sandbox to its guest, by NFS version 3 over TCP.
//!
//! One process per sandbox that mounts volumes. It is started inside the sandbox's network namespace, where
//! only the guest can reach it, holds nothing but the volumes that this sandbox mounts, and lives as long
//! as the sandbox's VM. The guest is hostile: what it breaks is its own server.

mod export;
mod handle;
mod nfs;
mod replies;
mod rpc;
mod sys;
mod xdr;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use rustix::thread::{CapabilitySet, CapabilitySets};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::export::Export;
use crate::nfs::Server;
use crate::replies::{CallKey, Replies};

/// Most connections of one guest: its kernel uses one for each server.
const CONNECTIONS_MAX: usize = 16;

/// Serve volumes to one guest.
#[derive(Parser)]
struct Options {
    /// Address to listen on.
    #[arg(long)]
    listen: SocketAddr,
    /// File with the volumes: `[{"name", "folder", "key"}]`, the key in hexadecimal.
    #[arg(long)]
    exports: PathBuf,
    /// Free space that must stay on the disk, MiB.
    #[arg(long, default_value_t = 0)]
    reserve_mb: u64,
}

#[derive(Deserialize)]
struct Entry {
    name: String,
    folder: PathBuf,
    key: String,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let text = std::fs::read_to_string(&options.exports)
        .with_context(|| format!("cannot read {}", options.exports.display()))?;
    let entries: Vec<Entry> =
        serde_json::from_str(&text).context("the list of volumes is malformed")?;
    let mut exports = Vec::new();
    for entry in entries {
        let folder = entry.folder;
        // A key in text is as good as in bytes; HMAC takes any.
        let export = Export::new(
            entry.name,
            entry.key.into_bytes(),
            &folder,
            options.reserve_mb << 20,
        )
        .with_context(|| format!("cannot serve {}", folder.display()))?;
        let root = export
            .root_node()
            .map_err(|status| anyhow::anyhow!("cannot serve {}: {status}", folder.display()))?;
        export.seal(root.fd.as_fd()).map_err(|_| {
            anyhow::anyhow!(
                "the file system of {} has no file handles; use ext4, xfs or btrfs",
                folder.display()
            )
        })?;
        exports.push(export);
    }
    let boot =
        std::fs::read("/proc/sys/kernel/random/boot_id").context("cannot read the boot id")?;
    let boot = Sha256::digest(boot)[..8]
        .iter()
        .fold(0_u64, |sum, byte| (sum << 8) | u64::from(*byte));
    let listener = TcpListener::bind(options.listen)
        .with_context(|| format!("cannot listen on {}", options.listen))?;
    rustix::process::umask(rustix::fs::Mode::empty()); // the guest's kernel applies the guest's own
    drop_privileges().context("cannot give up privileges")?;
    eprintln!(
        "volumed: serving {} volume(s) on {}",
        exports.len(),
        options.listen
    );
    serve(&listener, Server::new(exports, boot))
}

/// Keeps what acting on files for many users needs, for good.
fn drop_privileges() -> rustix::io::Result<()> {
    let kept = CapabilitySet::CHOWN
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::DAC_READ_SEARCH
        | CapabilitySet::FOWNER
        | CapabilitySet::FSETID
        | CapabilitySet::SETGID
        | CapabilitySet::SETUID;
    rustix::thread::set_no_new_privs(true)?;
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        },
    )
}

fn serve(listener: &TcpListener, server: Server) -> anyhow::Result<()> {
    let server = Arc::new(server);
    let replies = Arc::new(Replies::default());
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                eprintln!("volumed: accept: {error}");
                std::thread::sleep(std::time::Duration::from_millis(100)); // out of descriptors: let some close
                continue;
            }
        };
        if open.load(Ordering::Relaxed) >= CONNECTIONS_MAX {
            continue; // closes it
        }
        open.fetch_add(1, Ordering::Relaxed);
        let (server, replies, open_here) = (server.clone(), replies.clone(), open.clone());
        let work = move || {
            // An error ends the connection: the guest's kernel makes another and repeats its calls.
            let _ended = converse(stream, &server, &replies);
            open_here.fetch_sub(1, Ordering::Relaxed);
        };
        if std::thread::Builder::new().spawn(work).is_err() {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Answers the calls of one connection, one after the other. No deadline: an idle guest keeps its connection,
/// and their number has a limit.
fn converse(mut stream: TcpStream, server: &Server, replies: &Replies) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut record = Vec::new();
    while rpc::read_record(&mut stream, &mut record)? {
        let call = rpc::parse(&record).map_err(std::io::Error::other)?;
        let xid = call.xid;
        let key = CallKey::of(call.program, call.procedure, xid, &record);
        if let Some(reply) = key.and_then(|key| replies.find(key)) {
            rpc::write_record(&mut stream, &reply)?;
            continue;
        }
        let reply = rpc::reply(xid, server.answer(call));
        if let Some(key) = key {
            replies.keep(key, &reply);
        }
        rpc::write_record(&mut stream, &reply)?;
    }
    Ok(())
}
