//! Offline tools: describe, flatten and check files without changing them.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context};
use lsmt::format::{flags, Block, Segment, BLOCK_BYTES, ENTRY_BYTES, SECTOR_BYTES};
use lsmt::lowers::Lowers;
use lsmt::{AppendUpper, RoLayer, Stack};
use serde::{Deserialize, Serialize};

/// Bytes written at a time by `cat`.
const CHUNK_BYTES: usize = 1 << 20;
/// Largest config file read.
const MAX_CONFIG_BYTES: u64 = 8 << 20;

/// A header or trailer as shown to people.
#[derive(Debug, Serialize)]
pub struct BlockReport {
    flags: Vec<&'static str>,
    index_offset: u64,
    index_size: u64,
    virtual_size_bytes: u64,
    uuid: String,
    parent_uuid: String,
    user_tag: String,
}

impl From<&Block> for BlockReport {
    fn from(block: &Block) -> BlockReport {
        let names = [
            (flags::HEADER, "header"),
            (flags::DATA, "data"),
            (flags::SEALED, "sealed"),
            (flags::SPARSE, "sparse"),
            (flags::HYBRID, "hybrid"),
        ];
        let set = names.iter().filter(|(bit, _)| block.flags & bit != 0);
        BlockReport {
            flags: set.map(|(_, name)| *name).collect(),
            index_offset: block.index_offset,
            index_size: block.index_size,
            virtual_size_bytes: block.virtual_size_bytes,
            uuid: block.uuid.clone(),
            parent_uuid: block.parent_uuid.clone(),
            user_tag: block.user_tag.clone(),
        }
    }
}

/// What `inspect` prints.
#[derive(Debug, Serialize)]
pub struct Report {
    kind: &'static str,
    size_bytes: u64,
    header: BlockReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    trailer: Option<BlockReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    entries: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    zeroed_entries: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mapped_bytes: Option<u64>,
}

/// Describes a sealed layer, or the data or index file of an upper.
pub fn inspect(path: &Path) -> anyhow::Result<Report> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let size_bytes = file.metadata()?.len();
    let mut bytes = [0; BLOCK_BYTES];
    file.read_exact_at(&mut bytes, 0)
        .with_context(|| format!("{} is too short for an LSMT header", path.display()))?;
    let header = Block::decode(&bytes, "header").with_context(|| format!("{}", path.display()))?;
    let mut report = Report {
        kind: "upper data",
        size_bytes,
        header: (&header).into(),
        trailer: None,
        entries: None,
        zeroed_entries: None,
        mapped_bytes: None,
    };
    if header.flags & flags::DATA == 0 {
        report.kind = "upper index";
        report.entries = Some((size_bytes - BLOCK_BYTES as u64) / ENTRY_BYTES as u64);
        return Ok(report);
    }
    if header.flags & flags::SEALED == 0 && !has_trailer(&file, size_bytes) {
        return Ok(report);
    }
    let (layer, entries) = RoLayer::open(path)?;
    let zeroed = entries.iter().filter(|entry| entry.is_zeroed()).count();
    report.kind = "sealed layer";
    report.trailer = Some(layer.trailer().into());
    report.entries = Some(entries.len() as u64);
    report.zeroed_entries = Some(zeroed as u64);
    report.mapped_bytes = Some(mapped_bytes(&entries));
    Ok(report)
}

fn has_trailer(file: &File, size_bytes: u64) -> bool {
    let mut bytes = [0; BLOCK_BYTES];
    let offset = size_bytes.saturating_sub(BLOCK_BYTES as u64);
    offset >= BLOCK_BYTES as u64
        && file.read_exact_at(&mut bytes, offset).is_ok()
        && Block::decode(&bytes, "trailer").is_ok()
}

fn mapped_bytes(entries: &[Segment]) -> u64 {
    let data = entries.iter().filter(|entry| !entry.is_zeroed());
    data.map(Segment::length).sum::<u64>() * SECTOR_BYTES
}

/// The parts of an overlaybd config.v1.json that name local files.
#[derive(Debug, Deserialize)]
struct ImageConfig {
    #[serde(default)]
    lowers: Vec<LowerConfig>,
    upper: Option<UpperConfig>,
}

#[derive(Debug, Deserialize)]
struct LowerConfig {
    file: PathBuf,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct UpperConfig {
    data: PathBuf,
    index: PathBuf,
}

impl ImageConfig {
    /// Reads a config; relative paths count from its folder.
    fn read(path: &Path) -> anyhow::Result<ImageConfig> {
        let describe = || format!("cannot read the config {}", path.display());
        if std::fs::metadata(path).with_context(describe)?.len() > MAX_CONFIG_BYTES {
            bail!("{} is too large for a config", path.display());
        }
        let text = std::fs::read(path).with_context(describe)?;
        let mut config: ImageConfig = serde_json::from_slice(&text).with_context(describe)?;
        let folder = path.parent().unwrap_or(Path::new("."));
        for lower in &mut config.lowers {
            lower.file = folder.join(&lower.file);
        }
        // The reference writes `"upper": {}` style blanks when there is none.
        config.upper = config
            .upper
            .filter(|upper| !upper.data.as_os_str().is_empty());
        if let Some(upper) = &mut config.upper {
            upper.data = folder.join(&upper.data);
            upper.index = folder.join(&upper.index);
        }
        Ok(config)
    }
}

/// Writes the flat bytes of a stack. The upper is replayed, not opened for
/// writing, so its files stay as they are.
pub fn cat(config: &Path, output: &mut impl Write) -> anyhow::Result<()> {
    let config = ImageConfig::read(config)?;
    let mut layers = Vec::new();
    for lower in &config.lowers {
        layers.push(RoLayer::open(&lower.file)?);
    }
    if let Some(upper) = &config.upper {
        layers.push(AppendUpper::open_read_only(&upper.data, &upper.index)?);
    }
    let lowers = Lowers::from_layers(layers)?;
    let size_bytes = lowers.virtual_size_bytes();
    if size_bytes == 0 {
        bail!("no layer states a virtual size");
    }
    let stack = Stack::from_lowers(lowers, size_bytes);
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut offset = 0;
    loop {
        let count = stack.read_at(&mut buffer, offset)?;
        if count == 0 {
            return output.flush().context("cannot write the output");
        }
        output
            .write_all(&buffer[..count])
            .context("cannot write the output")?;
        offset += count as u64;
    }
}

/// Checks a layer, or every file of a config; returns the findings.
pub fn fsck(path: &Path) -> Vec<String> {
    let is_json = path
        .extension()
        .is_some_and(|extension| extension == "json");
    if !is_json {
        return fsck_layer(path).into_iter().collect();
    }
    let config = match ImageConfig::read(path) {
        Ok(config) => config,
        Err(error) => return vec![format!("{error:#}")],
    };
    let lowers = config.lowers.iter();
    let mut findings: Vec<String> = lowers.filter_map(|lower| fsck_layer(&lower.file)).collect();
    if let Some(upper) = &config.upper {
        findings.extend(fsck_upper(upper));
    }
    findings
}

fn fsck_layer(path: &Path) -> Option<String> {
    let (layer, entries) = match RoLayer::open(path) {
        Ok(opened) => opened,
        Err(error) => return Some(error.to_string()),
    };
    // The index was checked by the open; now every data sector must be readable.
    let mut buffer = vec![0; CHUNK_BYTES];
    for entry in entries.iter().filter(|entry| !entry.is_zeroed()) {
        let mut offset = entry.moffset() * SECTOR_BYTES;
        let end = entry.mend() * SECTOR_BYTES;
        while offset < end {
            let length = (end - offset).min(CHUNK_BYTES as u64);
            let bytes = &mut buffer[..length as usize];
            if let Err(error) = layer.blob().read_exact_at(bytes, offset) {
                let shown = path.display();
                return Some(format!(
                    "layer {shown}: byte {offset} is unreadable: {error}"
                ));
            }
            offset += length;
        }
    }
    None
}

fn fsck_upper(upper: &UpperConfig) -> Option<String> {
    match AppendUpper::check(&upper.data, &upper.index) {
        Ok(0) => None,
        Ok(dropped_bytes) => Some(format!(
            "upper {}: the last {dropped_bytes} bytes are torn or point past the data; \
             opening the upper for writing cuts them off",
            upper.index.display()
        )),
        Err(error) => Some(error.to_string()),
    }
}
