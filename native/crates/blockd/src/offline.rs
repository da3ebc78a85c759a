//! `commit` and `config`: make layers and configs without a daemon.

use std::path::{Path, PathBuf};

use anyhow::{bail, Context};
use clap::Args;
use lsmt::format::parse_uuid;
use lsmt::lowers::Lowers;
use lsmt::{CommitOptions, Encoding, LayerInfo, Opener, RoLayer, Upper};

use crate::api::models::{AlgorithmName, CompressLayer};
use crate::config::{ImageConfig, LowerConfig, Resolved, UpperConfig};

/// An upper to read above the given layers.
#[derive(Debug, Args)]
pub struct UpperArguments {
    /// Data file of an upper above the layers.
    #[arg(long, requires = "index")]
    data: Option<PathBuf>,
    /// Index file of that upper.
    #[arg(long, requires = "data")]
    index: Option<PathBuf>,
}

/// What `commit` takes.
#[derive(Debug, Args)]
pub struct CommitArguments {
    /// Layer file to write.
    output: PathBuf,
    /// Layers, bottom first; or one config.v1.json, whose upper counts as a layer.
    layers: Vec<PathBuf>,
    #[command(flatten)]
    upper: UpperArguments,
    /// Compress the layer.
    #[arg(long, value_enum)]
    compression: Option<AlgorithmName>,
    /// Size of the blocks compressed each by itself, a power of two from 4 to 64.
    #[arg(long, default_value_t = 4, requires = "compression")]
    block_size_kib: u32,
    /// Wrap the layer in a tar archive, as layers of OCI images are.
    #[arg(long)]
    tar: bool,
    /// Identity of the layer; a random one when absent.
    #[arg(long)]
    uuid: Option<String>,
    /// Identity of the layer below; that of the bottom layer's when absent.
    #[arg(long)]
    parent_uuid: Option<String>,
    /// Free text kept in the layer.
    #[arg(long, default_value = "")]
    tag: String,
}

/// What `config` takes.
#[derive(Debug, Args)]
pub struct ConfigArguments {
    /// The config.v1.json to write.
    output: PathBuf,
    /// Layers, bottom first.
    layers: Vec<PathBuf>,
    #[command(flatten)]
    upper: UpperArguments,
    /// Where the one who opens the config tells the outcome.
    #[arg(long)]
    result_file: Option<PathBuf>,
}

/// Opens the layers of a config, its upper as one more layer. No file is changed.
pub fn open_config(opener: &Opener, config: &Resolved) -> anyhow::Result<Lowers> {
    let mut layers = Vec::new();
    for lower in &config.lowers {
        if let Some(stub) = &lower.remote {
            let address = stub.address();
            bail!("{address} is in a registry only; the daemon reads it, or download it first");
        }
        layers.push(RoLayer::open(opener, &lower.path)?);
    }
    if let Some(upper) = &config.upper {
        layers.push(Upper::open_read_only(&upper.data, &upper.index)?);
    }
    Ok(Lowers::from_layers(layers)?)
}

/// Flattens layers into one.
pub fn commit(arguments: &CommitArguments) -> anyhow::Result<LayerInfo> {
    let opener = Opener::default();
    let upper = &arguments.upper;
    let lowers = match arguments.layers.as_slice() {
        [config] if is_config(config) => {
            if upper.data.is_some() {
                bail!("a config names its upper itself; leave --data and --index out");
            }
            let config_path = config;
            let config = ImageConfig::read(config_path)?.resolve(config_path)?;
            open_config(&opener, &config)?
        }
        paths => {
            let mut layers = Vec::new();
            for path in paths {
                layers.push(RoLayer::open(&opener, path)?);
            }
            if let (Some(data), Some(index)) = (&upper.data, &upper.index) {
                layers.push(Upper::open_read_only(data, index)?);
            }
            Lowers::from_layers(layers)?
        }
    };
    if lowers.layers().is_empty() {
        bail!("there is nothing to commit; give layers, a config, or --data and --index");
    }
    let options = CommitOptions {
        uuid: arguments.uuid.as_deref().map(checked_uuid).transpose()?,
        parent_uuid: (arguments.parent_uuid.as_deref())
            .map(checked_uuid)
            .transpose()?,
        user_tag: arguments.tag.clone(),
        encoding: encoding(arguments)?,
        sync: true,
    };
    Ok(lsmt::commit(&lowers, &arguments.output, &options)?)
}

fn encoding(arguments: &CommitArguments) -> anyhow::Result<Encoding> {
    let mut compression = None;
    if let Some(name) = arguments.compression {
        let wanted = CompressLayer {
            algorithm: name,
            block_bytes: arguments.block_size_kib.saturating_mul(1024),
        };
        compression = wanted.checked();
        compression.context("--block-size-kib must be a power of two from 4 to 64")?;
    }
    Ok(Encoding {
        compression,
        tar: arguments.tar,
    })
}

fn checked_uuid(text: &str) -> anyhow::Result<String> {
    parse_uuid(text).with_context(|| format!("{text:?} is not a UUID"))
}

/// Writes a config after a look at each of its files.
pub fn write_config(arguments: &ConfigArguments) -> anyhow::Result<()> {
    let text = |path: &Path| match path.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => bail!("{} is not valid UTF-8, which JSON needs", path.display()),
    };
    let mut config = ImageConfig::default();
    for layer in &arguments.layers {
        config.lowers.push(LowerConfig::of_file(&text(layer)?));
    }
    if let (Some(data), Some(index)) = (&arguments.upper.data, &arguments.upper.index) {
        config.upper = UpperConfig {
            data: text(data)?,
            index: text(index)?,
        };
    }
    if let Some(path) = &arguments.result_file {
        config.result_file = text(path)?;
    }
    let resolved = config.resolve(&arguments.output)?;
    let opener = Opener::default();
    for lower in &resolved.lowers {
        RoLayer::open(&opener, &lower.path)?;
    }
    if let Some(upper) = &resolved.upper {
        Upper::check(&upper.data, &upper.index)?;
    }
    Ok(config.write(&arguments.output)?)
}

/// Whether a path names a config, by its ending.
pub fn is_config(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "json")
}
