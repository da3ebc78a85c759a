//! Turns one layer of an OCI image into one layer of an ext4 disk.
//!
//! `imagefs convert` reads a tar archive (plain, gzip or zstd) on standard input, applies it to the file system in the
//! stack of layers below, and writes what has changed as a new sealed layer. It touches no other file: whatever the
//! archive says, it says it about the inside of that disk. The answer is one JSON
//! object on standard output: figures, or `error` with a code; the exit status is 0 for both.
//! It ends with whoever started it: nobody would record the layer, and the next server may make the same one.

mod apply;
mod ext4;
mod report;
mod source;

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use lsmt::commit::import_raw_as;
use rustix::process::Signal;
use serde_json::json;

use crate::ext4::{Disk, Ext4Error, Tree, Volume};
use crate::report::{Failure, Imported, Report};
use crate::source::{Limits, Source};
use tarstream::Archive;

#[derive(Parser)]
#[command(
    name = "imagefs",
    about = "Layers of images as layers of disks",
    disable_version_flag = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Apply the archive on standard input to a file system; write a layer.
    Convert(Convert),
    /// Make the layer that others are built upon of a raw image of an empty file system.
    Import(Import),
    /// Tell the checksum of the decompressed archive on standard input.
    Checksum(Checksum),
    /// Print the version.
    Version,
}

#[derive(Args)]
struct Convert {
    /// A layer below, bottom first (repeatable).
    #[arg(long = "lower", required = true)]
    lowers: Vec<PathBuf>,
    /// The layer to write.
    #[arg(long)]
    output: PathBuf,
    /// Identity of the new layer: a UUID.
    #[arg(long)]
    uuid: String,
    /// Checksum the decompressed archive must have, as `sha256:<hex>`.
    #[arg(long)]
    diff_id: Option<String>,
    /// Most bytes of the decompressed archive.
    #[arg(long)]
    max_bytes: u64,
    /// Most members of the archive.
    #[arg(long)]
    max_entries: u64,
    /// Most decompressed bytes for each compressed one.
    #[arg(long)]
    max_ratio: u64,
}

#[derive(Args)]
struct Checksum {
    /// Most bytes of the decompressed archive.
    #[arg(long)]
    max_bytes: u64,
    /// Most decompressed bytes for each compressed one.
    #[arg(long)]
    max_ratio: u64,
}

#[derive(Args)]
struct Import {
    /// The raw image.
    #[arg(long)]
    source: PathBuf,
    /// The layer to write.
    #[arg(long)]
    output: PathBuf,
    /// Identity of the new layer: a UUID.
    #[arg(long)]
    uuid: String,
}

fn main() {
    // Where the kernel refuses it, a killed server leaves one conversion that ends by itself.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let outcome = match Arguments::parse().command {
        Command::Convert(options) => convert(&options).map(|report| json!(report)),
        Command::Import(options) => import(&options).map(|report| json!(report)),
        Command::Checksum(options) => checksum(&options).map(|digest| json!({ "diff_id": digest })),
        Command::Version => Ok(json!({ "version": env!("CARGO_PKG_VERSION") })),
    };
    let answer = outcome.unwrap_or_else(|failure| json!({ "error": failure }));
    println!("{answer}");
}

fn import(options: &Import) -> Result<Imported, Failure> {
    let (source, output) = (&options.source, &options.output);
    let layer = import_raw_as(source, output, None, Some(options.uuid.clone()), true)
        .map_err(Ext4Error::from)?;
    Ok(Imported {
        size_bytes: layer.size_bytes,
    })
}

fn checksum(options: &Checksum) -> Result<String, Failure> {
    let limits = Limits {
        bytes: options.max_bytes,
        ratio: options.max_ratio,
    };
    let mut source = Source::open(io::stdin(), limits).map_err(Failure::from_io)?;
    io::copy(&mut source, &mut io::sink()).map_err(Failure::from_io)?;
    let digest = source.inner.borrow().digest();
    Ok(digest)
}

fn convert(options: &Convert) -> Result<Report, Failure> {
    let limits = Limits {
        bytes: options.max_bytes,
        ratio: options.max_ratio,
    };
    let source = Source::open(io::stdin(), limits).map_err(Failure::from_io)?;
    let (outer, inner) = (source.outer.clone(), source.inner.clone());
    let folder = options.output.parent().unwrap_or(Path::new("."));
    let volume = Volume::open(Disk::open(&options.lowers, folder)?)?;
    let mut tree = Tree::new(volume);
    let entries = apply::apply(&mut tree, &mut Archive::new(source), options.max_entries)?;
    let diff_id = inner.borrow().digest();
    if options
        .diff_id
        .as_ref()
        .is_some_and(|wanted| *wanted != diff_id)
    {
        return Err(Failure::wrong_digest(&diff_id));
    }
    let layer = tree.into_layer(&options.output, &options.uuid)?;
    let input_digest = Source::digest_of_input(&outer, &inner);
    let (outer, inner) = (outer.borrow(), inner.borrow());
    let report = Report {
        diff_id,
        input_digest,
        input_bytes: outer.bytes,
        archive_bytes: inner.bytes,
        entries,
        size_bytes: layer.size_bytes,
        stored_bytes: layer.stored_bytes,
    };
    Ok(report)
}
