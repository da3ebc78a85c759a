//! JSON bodies of the socket. Sizes are bytes, paths absolute.

use std::path::PathBuf;

use clap::ValueEnum;
use lsmt::zfile::{Algorithm, Compression};
use lsmt::UpperLayout;
use serde::{Deserialize, Serialize};

/// How the kernel caches a stack's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheMode {
    /// Through the page cache, shared by all who map the file. Read-only stacks.
    Page,
    /// Past the page cache, so that lowers are not cached twice.
    Direct,
}

/// What a stack is for those who use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Export {
    /// A file of the mount.
    Fuse,
    /// A block device. It goes on when the daemon is killed and started again.
    Ublk,
    /// A block device where the host has them, else a file.
    Auto,
}

/// The two files of an upper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upper {
    /// Data file.
    pub data: PathBuf,
    /// Index file.
    pub index: PathBuf,
}

impl From<&Upper> for lsmt::UpperPaths {
    fn from(upper: &Upper) -> lsmt::UpperPaths {
        lsmt::UpperPaths {
            data: upper.data.clone(),
            index: upper.index.clone(),
        }
    }
}

/// How an upper is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Every write is appended.
    #[default]
    Append,
    /// Overwrites go where the data is, all else is appended.
    Hybrid,
    /// Every sector at its fixed place of a sparse file.
    Sparse,
}

impl From<Layout> for UpperLayout {
    fn from(layout: Layout) -> UpperLayout {
        match layout {
            Layout::Append => UpperLayout::Append,
            Layout::Hybrid => UpperLayout::Hybrid,
            Layout::Sparse => UpperLayout::Sparse,
        }
    }
}

impl From<UpperLayout> for Layout {
    fn from(layout: UpperLayout) -> Layout {
        match layout {
            UpperLayout::Append => Layout::Append,
            UpperLayout::Hybrid => Layout::Hybrid,
            UpperLayout::Sparse => Layout::Sparse,
        }
    }
}

/// Who owns a stack's file besides root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// Body of `PUT /v1/stacks/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenStack {
    /// An overlaybd config.v1.json that names lowers and upper; then these stay
    /// unset here.
    #[serde(default)]
    pub config: Option<PathBuf>,
    /// Sealed layers, bottom first.
    #[serde(default)]
    pub lowers: Vec<PathBuf>,
    /// Writable upper, created when absent.
    #[serde(default)]
    pub upper: Option<Upper>,
    /// How an upper that is created is written; `append` when absent.
    #[serde(default)]
    pub upper_layout: Option<Layout>,
    /// Size of the disk; taken from the layers when absent.
    #[serde(default)]
    pub virtual_size_bytes: Option<u64>,
    /// Default: `direct` with an upper, `page` without.
    #[serde(default)]
    pub cache: Option<CacheMode>,
    /// Default: root. Of the file: a device belongs to root.
    #[serde(default)]
    pub owner: Option<Owner>,
    /// Default: `fuse`.
    #[serde(default)]
    pub export: Option<Export>,
    /// Pages of zeros that are written are recorded as such and not stored: for the memory
    /// of a VM, which its VMM writes itself. Of a file only.
    #[serde(default)]
    pub records_zeros: bool,
}

/// An open stack.
#[derive(Debug, Clone, Serialize)]
pub struct StackInfo {
    /// Caller's name for it.
    pub id: String,
    /// What it is: `fuse` or `ublk`.
    pub export: Export,
    /// The file or device.
    pub path: PathBuf,
    /// Size of the disk and of the file.
    pub virtual_size_bytes: u64,
    /// Sealed layers, bottom first.
    pub lowers: Vec<PathBuf>,
    /// The upper in use now.
    pub upper: Option<Upper>,
    /// How it is written.
    pub upper_layout: Option<Layout>,
    /// Kernel caching.
    pub cache: CacheMode,
    /// Owner of the file.
    pub owner: Owner,
    /// Open file handles, mappings included. Those of a device are looked for when it is
    /// closed, and not counted.
    pub open_handles: u64,
    /// Size of the upper's data file.
    pub upper_data_bytes: u64,
    /// Live data in it.
    pub upper_mapped_bytes: u64,
    /// Records of its log.
    pub upper_records: u64,
    /// Whether changes of a device are kept until there is room on the host's disk.
    pub waits_for_room: bool,
}

/// Body of `POST /v1/stacks/{id}/seal`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SealStack {
    /// The fresh upper.
    pub upper: Upper,
    /// Whether the sealed layer must be durable before the reply.
    #[serde(default)]
    pub sync: bool,
}

/// Body of `POST /v1/stacks/{id}/replace`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplaceLayers {
    /// Sealed layers of the stack, one after the other, bottom first.
    pub lowers: Vec<PathBuf>,
    /// A layer that reads the same, as a commit of them does.
    pub replacement: PathBuf,
}

/// A sealed layer.
#[derive(Debug, Clone, Serialize)]
pub struct Layer {
    /// Layer file.
    pub path: PathBuf,
    /// Its size.
    pub size_bytes: u64,
    /// Data in it.
    pub mapped_bytes: u64,
    /// Its identity.
    pub uuid: String,
}

/// Reply of a seal.
#[derive(Debug, Serialize)]
pub struct Sealed {
    /// The layer that was the upper.
    pub layer: Layer,
    /// The stack as it is now.
    pub stack: StackInfo,
}

/// Body of `POST /v1/captures`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureRequest {
    /// Process whose memory is captured; its guest must be paused.
    pub pid: i32,
    /// The stack it maps privately.
    pub stack: String,
    /// Layer file to write.
    pub output: PathBuf,
    /// Whether the layer must be durable before the reply.
    #[serde(default)]
    pub sync: bool,
}

/// Reply of a capture.
#[derive(Debug, Serialize)]
pub struct Captured {
    /// The layer file.
    pub output: PathBuf,
    /// Size of the memory.
    pub virtual_size_bytes: u64,
    /// Size of the layer file.
    pub size_bytes: u64,
    /// Pages that diverged from the stack.
    pub pages: u64,
    /// Of these, all-zero ones.
    pub zero_pages: u64,
    /// Pages whose bytes are in the layer.
    pub stored_pages: u64,
    /// Time to find the pages.
    pub find_us: u64,
    /// Time to copy and write them.
    pub copy_us: u64,
}

/// Body of `POST /v1/imports`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportRequest {
    /// Raw image.
    pub source: PathBuf,
    /// Layer file to write.
    pub output: PathBuf,
    /// Size of the disk; that of the image when absent.
    #[serde(default)]
    pub virtual_size_bytes: Option<u64>,
    /// Whether the layer must be durable before the reply.
    #[serde(default)]
    pub sync: bool,
}

/// How to compress a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompressLayer {
    /// Kind of compression.
    pub algorithm: AlgorithmName,
    /// Bytes compressed each by itself, a power of two; 4096 when absent.
    #[serde(default = "default_block_bytes")]
    pub block_bytes: u32,
}

impl CompressLayer {
    /// The same for the library; `None` when the block size is impossible.
    pub fn checked(&self) -> Option<Compression> {
        let algorithm = match self.algorithm {
            AlgorithmName::Lz4 => Algorithm::Lz4,
            AlgorithmName::Zstd => Algorithm::Zstd,
        };
        Compression::new(algorithm, self.block_bytes)
    }
}

fn default_block_bytes() -> u32 {
    4096
}

/// Compressions by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum AlgorithmName {
    /// Fast.
    Lz4,
    /// Small.
    Zstd,
}

/// Body of `POST /v1/commits`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommitRequest {
    /// Sealed layers, bottom first.
    pub lowers: Vec<PathBuf>,
    /// Layer file to write.
    pub output: PathBuf,
    /// Compress the layer; plain when absent.
    #[serde(default)]
    pub compression: Option<CompressLayer>,
    /// Wrap the layer in a tar archive, as layers of OCI images are.
    #[serde(default)]
    pub tar: bool,
    /// Identity of the layer; a random one when absent.
    #[serde(default)]
    pub uuid: Option<String>,
    /// Take the identity of the top layer, which the result stands for.
    #[serde(default)]
    pub keep_uuid: bool,
    /// Identity of the layer below; that of the bottom layer's when absent.
    #[serde(default)]
    pub parent_uuid: Option<String>,
    /// Free text kept in the layer.
    #[serde(default)]
    pub user_tag: String,
    /// Whether the layer must be durable before the reply.
    #[serde(default)]
    pub sync: bool,
}

/// Reply of an import or a commit.
#[derive(Debug, Serialize)]
pub struct WrittenLayer {
    /// The layer file.
    pub output: PathBuf,
    /// Its size.
    pub size_bytes: u64,
    /// Size of the disk.
    pub virtual_size_bytes: u64,
    /// Data in the layer.
    pub stored_bytes: u64,
    /// Digest of the layer file, hex.
    pub sha256: String,
}

impl WrittenLayer {
    /// Describes a layer just written; reads it for the digest.
    pub fn describe(layer: lsmt::LayerInfo) -> std::io::Result<WrittenLayer> {
        Ok(WrittenLayer {
            sha256: crate::layers::sha256_hex(&layer.path)?,
            output: layer.path,
            size_bytes: layer.size_bytes,
            virtual_size_bytes: layer.virtual_size_bytes,
            stored_bytes: layer.stored_bytes,
        })
    }
}

/// Body of `POST /v1/shutdown`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShutdownRequest {
    /// Also when files are open.
    #[serde(default)]
    pub force: bool,
}

/// Reply of `GET /v1/info`.
#[derive(Debug, Serialize)]
pub struct Info {
    /// Always `blockd`.
    pub program: &'static str,
    /// Version of the program.
    pub version: &'static str,
    /// Version of this protocol.
    pub protocol: u32,
    /// Process id of the daemon.
    pub pid: u32,
    /// Where stacks appear.
    pub mount: PathBuf,
    /// Kinds of export.
    pub exports: Vec<Export>,
    /// Why `ublk` is not among them.
    pub no_ublk: Option<String>,
    /// Whether it knows `POST /v1/fills`: one of an earlier version may have run on.
    pub fills_memory: bool,
}

/// Reply of `GET /v1/stacks`.
#[derive(Debug, Serialize)]
pub struct StackList {
    /// All open stacks, by id.
    pub stacks: Vec<StackInfo>,
}
