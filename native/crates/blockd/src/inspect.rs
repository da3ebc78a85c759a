//! Offline tools: describe, flatten and check files without changing them.

use std::io::Write;
use std::path::Path;

use anyhow::{bail, Context};
use lsmt::format::{flags, Block, Segment, BLOCK_BYTES, ENTRY_BYTES, SECTOR_BYTES};
use lsmt::zfile::{self, format::Head};
use lsmt::{Blob, Opener, RoLayer, Stack, Upper, UpperPaths};
use serde::Serialize;

use crate::config::{ImageConfig, ResolvedLower};
use crate::layers::sha256_hex;
use crate::offline::{is_config, open_config};

/// Bytes written at a time by `cat`.
const CHUNK_BYTES: usize = 1 << 20;

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
    #[serde(skip_serializing_if = "Option::is_none")]
    tar_offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    zfile: Option<ZFileReport>,
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

/// A compressed wrapper as shown to people.
#[derive(Debug, Serialize)]
pub struct ZFileReport {
    algorithm: &'static str,
    block_bytes: u32,
    blocks: u64,
    original_bytes: u64,
    block_checksums: bool,
    complete_header: bool,
}

impl From<&Head> for ZFileReport {
    fn from(head: &Head) -> ZFileReport {
        ZFileReport {
            algorithm: head.algorithm.name(),
            block_bytes: head.block_bytes,
            blocks: head.blocks,
            original_bytes: head.original_bytes,
            block_checksums: head.verify,
            complete_header: head.flags & zfile::format::flags::HEADER != 0,
        }
    }
}

/// Describes a sealed layer, or the data or index file of an upper.
pub fn inspect(path: &Path) -> anyhow::Result<Report> {
    let opener = Opener::default();
    let (blob, wrapping) = opener
        .open(path)
        .with_context(|| format!("{}", path.display()))?;
    let size_bytes = std::fs::metadata(path)?.len();
    let mut bytes = [0; BLOCK_BYTES];
    blob.read_exact_at(&mut bytes, 0)
        .with_context(|| format!("{} is too short for an LSMT header", path.display()))?;
    let header = Block::decode(&bytes, "header").with_context(|| format!("{}", path.display()))?;
    let mut report = Report {
        kind: "upper data",
        size_bytes,
        tar_offset: wrapping.tar_offset,
        zfile: wrapping.zfile.as_ref().map(Into::into),
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
    if header.flags & flags::SEALED == 0 && !has_trailer(blob.as_ref()) {
        return Ok(report);
    }
    let (layer, entries) = RoLayer::from_blob(path, blob)?;
    let zeroed = entries.iter().filter(|entry| entry.is_zeroed()).count();
    report.kind = "sealed layer";
    report.trailer = Some(layer.trailer().into());
    report.entries = Some(entries.len() as u64);
    report.zeroed_entries = Some(zeroed as u64);
    report.mapped_bytes = Some(mapped_bytes(&entries));
    Ok(report)
}

fn has_trailer(blob: &dyn Blob) -> bool {
    let mut bytes = [0; BLOCK_BYTES];
    let offset = blob.size_bytes().saturating_sub(BLOCK_BYTES as u64);
    offset >= BLOCK_BYTES as u64
        && blob.read_exact_at(&mut bytes, offset).is_ok()
        && Block::decode(&bytes, "trailer").is_ok()
}

fn mapped_bytes(entries: &[Segment]) -> u64 {
    let data = entries.iter().filter(|entry| !entry.is_zeroed());
    data.map(Segment::length).sum::<u64>() * SECTOR_BYTES
}

/// Writes the flat bytes of a stack. The upper is replayed, not opened for
/// writing, so its files stay as they are.
pub fn cat(config: &Path, output: &mut impl Write) -> anyhow::Result<()> {
    let resolved = ImageConfig::read(config)?.resolve(config)?;
    let lowers = open_config(&Opener::default(), &resolved)?;
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

/// Checks a layer, or every file of a config; returns the findings. With
/// `check_parents` each layer of a config must also name the one below it.
pub fn fsck(path: &Path, check_parents: bool) -> Vec<String> {
    let opener = Opener::default();
    if !is_config(path) {
        return fsck_layer(&opener, path).err().into_iter().collect();
    }
    let resolved = match ImageConfig::read(path).and_then(|config| config.resolve(path)) {
        Ok(resolved) => resolved,
        Err(error) => return vec![error.to_string()],
    };
    let mut findings = Vec::new();
    let mut below: Option<Block> = None;
    for lower in &resolved.lowers {
        findings.extend(fsck_statement(lower));
        match fsck_layer(&opener, &lower.path) {
            Err(finding) => findings.push(finding),
            Ok(trailer) => {
                if let Some(below) = below.filter(|_| check_parents) {
                    findings.extend(fsck_parent(&lower.path, &trailer, &below));
                }
                below = Some(trailer);
            }
        }
    }
    if let Some(upper) = &resolved.upper {
        findings.extend(fsck_upper(upper));
    }
    findings
}

/// Whether a layer's file is the one its config means.
fn fsck_statement(lower: &ResolvedLower) -> Option<String> {
    let shown = lower.path.display();
    // A file that cannot be read is found by the check of its content.
    let size_bytes = std::fs::metadata(&lower.path).ok()?.len();
    if let Some(stated_bytes) = lower.size_bytes.filter(|stated| *stated != size_bytes) {
        return Some(format!(
            "layer {shown}: {size_bytes} bytes, the config states {stated_bytes}"
        ));
    }
    let stated = lower.sha256.as_ref()?;
    let digest = sha256_hex(&lower.path).ok()?;
    (digest != *stated).then(|| {
        format!("layer {shown}: digest sha256:{digest}, the config states sha256:{stated}")
    })
}

fn fsck_parent(path: &Path, trailer: &Block, below: &Block) -> Option<String> {
    (trailer.parent_uuid != below.uuid).then(|| {
        format!(
            "layer {}: made for a parent {}, below it is {}",
            path.display(),
            trailer.parent_uuid,
            below.uuid
        )
    })
}

fn fsck_layer(opener: &Opener, path: &Path) -> Result<Block, String> {
    let (layer, entries) = RoLayer::open(opener, path).map_err(|error| error.to_string())?;
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
                return Err(format!(
                    "layer {shown}: byte {offset} is unreadable: {error}"
                ));
            }
            offset += length;
        }
    }
    Ok(layer.trailer().clone())
}

fn fsck_upper(upper: &UpperPaths) -> Option<String> {
    match Upper::check(&upper.data, &upper.index) {
        Ok(0) => None,
        Ok(dropped_bytes) => Some(format!(
            "upper {}: the last {dropped_bytes} bytes are torn or point past the data; \
             opening the upper for writing cuts them off",
            upper.index.display()
        )),
        Err(error) => Some(error.to_string()),
    }
}
