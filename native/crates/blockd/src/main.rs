//! Serves layer stacks as files, captures guest memory, and looks into layers.

mod api;
mod capture;
mod config;
mod crew;
mod fuse;
mod inspect;
mod layers;
mod offline;
mod remote_arguments;
mod serve;
mod stacks;
mod sys;
mod traces;
mod ublk;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use api::models::WrittenLayer;
use clap::{Parser, Subcommand};
use offline::{CommitArguments, ConfigArguments};
use remote_arguments::RemoteArguments;

/// Default memory for decompressed blocks.
const DEFAULT_CACHE_MIB: u32 = (lsmt::block_cache::DEFAULT_BYTES >> 20) as u32;

#[derive(Parser)]
#[command(
    name = "blockd",
    about = "Layer stacks as block storage",
    disable_version_flag = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the daemon in the foreground.
    Serve {
        /// Unix socket of the API.
        #[arg(long)]
        socket: PathBuf,
        /// Folder where open stacks appear as files.
        #[arg(long)]
        mount: PathBuf,
        /// Threads that serve file requests.
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
        threads: u16,
        /// Memory for decompressed blocks of all layers together.
        #[arg(long, default_value_t = DEFAULT_CACHE_MIB)]
        block_cache_mib: u32,
        /// Folder for what a killed daemon's successor must know of ublk devices; without
        /// it there are none.
        #[arg(long)]
        ublk_state: Option<PathBuf>,
        #[command(flatten)]
        remote: RemoteArguments,
        /// Log more.
        #[arg(long, short)]
        verbose: bool,
    },
    /// Describe a layer file, or an upper's data and index files, as JSON.
    Inspect {
        /// A layer, data or index file.
        file: PathBuf,
    },
    /// Write the flat bytes of a stack to standard output.
    Cat {
        /// An overlaybd config.v1.json.
        config: PathBuf,
    },
    /// Check a layer file or all files of a config; exit code 1 on findings.
    Fsck {
        /// A layer file or a config.v1.json.
        file: PathBuf,
        /// Also check that each layer of a config names the one below as its parent.
        #[arg(long)]
        parents: bool,
    },
    /// Flatten layers, or all of a config, into one layer.
    Commit(CommitArguments),
    /// Write a config.v1.json for layers and an upper.
    Config(ConfigArguments),
    /// Print the version.
    Version,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("blockd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve {
            socket,
            mount,
            threads,
            block_cache_mib,
            ublk_state,
            remote,
            verbose,
        } => {
            start_log(verbose);
            let threads = usize::from(threads);
            serve::run(&serve::ServeOptions {
                socket,
                mount,
                threads,
                cache_bytes: u64::from(block_cache_mib) << 20,
                trace_window: remote.trace_window(),
                remote: remote.options(),
                ublk_state,
            })?;
        }
        Command::Inspect { file } => {
            let report = serde_json::to_string_pretty(&inspect::inspect(&file)?)?;
            writeln!(std::io::stdout(), "{report}")?;
        }
        Command::Cat { config } => inspect::cat(&config, &mut std::io::stdout().lock())?,
        Command::Fsck { file, parents } => {
            let findings = inspect::fsck(&file, parents);
            for finding in &findings {
                writeln!(std::io::stdout(), "{finding}")?;
            }
            if !findings.is_empty() {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Commit(arguments) => {
            let layer = offline::commit(&arguments)?;
            let written = WrittenLayer::describe(layer)?;
            writeln!(
                std::io::stdout(),
                "{}",
                serde_json::to_string_pretty(&written)?
            )?;
        }
        Command::Config(arguments) => offline::write_config(&arguments)?,
        Command::Version => {
            writeln!(std::io::stdout(), "blockd {}", env!("CARGO_PKG_VERSION"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn start_log(verbose: bool) {
    let level = if verbose {
        tracing::Level::DEBUG
    } else {
        tracing::Level::INFO
    };
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_max_level(level)
        .init();
}
