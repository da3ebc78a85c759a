//! Description of one file (contract section 3.6).

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

use crate::clock;
use crate::connect::lenient;
use crate::files::metadata;
use crate::users::Names;

/// Kind of a file. For a symbolic link it is the kind of what it leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum FileType {
    /// Device, socket, fifo.
    Unspecified = 0,
    /// Regular file.
    File = 1,
    /// Folder.
    Directory = 2,
    /// Link that leads nowhere.
    Symlink = 3,
}

fn write_file_type<S: Serializer>(value: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match FileType::try_from(*value) {
        Ok(FileType::File) => "FILE_TYPE_FILE",
        Ok(FileType::Directory) => "FILE_TYPE_DIRECTORY",
        Ok(FileType::Symlink) => "FILE_TYPE_SYMLINK",
        Ok(FileType::Unspecified) | Err(_) => "FILE_TYPE_UNSPECIFIED",
    })
}

/// A moment; JSON has it as RFC 3339.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Timestamp {
    /// Since 1970.
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    /// And after that second.
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&clock::format_rfc3339(self.seconds, self.nanos as u32))
    }
}

/// One file.
#[derive(Clone, PartialEq, prost::Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    /// Last part of the path.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Kind.
    #[prost(enumeration = "FileType", tag = "2")]
    #[serde(rename = "type", serialize_with = "write_file_type")]
    pub kind: i32,
    /// Path as asked for.
    #[prost(string, tag = "3")]
    pub path: String,
    /// Size in bytes; of the link itself for a link.
    #[prost(int64, tag = "4")]
    #[serde(serialize_with = "lenient::write_integer")]
    pub size: i64,
    /// Permission bits.
    #[prost(uint32, tag = "5")]
    pub mode: u32,
    /// Permission bits as text, kind first.
    #[prost(string, tag = "6")]
    pub permissions: String,
    /// Name of the owner.
    #[prost(string, tag = "7")]
    pub owner: String,
    /// Name of the group.
    #[prost(string, tag = "8")]
    pub group: String,
    /// Of the content.
    #[prost(message, optional, tag = "9")]
    pub modified_time: Option<Timestamp>,
    /// Where a link leads, resolved as far as it goes.
    #[prost(string, optional, tag = "10")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// Metadata of the upload.
    #[prost(btree_map = "string, string", tag = "11")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Whether the path is a link.
    #[prost(bool, tag = "12")]
    #[serde(skip_serializing_if = "lenient::is_false")]
    pub is_symlink: bool,
}

impl EntryInfo {
    /// Describes `path` without following a link at its end.
    pub fn read(path: &Path, names: &Names) -> io::Result<Self> {
        let info = fs::symlink_metadata(path)?;
        let mut kind = kind_of(&info);
        let mut symlink_target = None;
        if info.is_symlink() {
            kind = fs::metadata(path).map_or(FileType::Symlink, |target| kind_of(&target));
            symlink_target = Some(link_target(path).to_string_lossy().into_owned());
        }
        Ok(Self {
            name: path
                .file_name()
                .map_or_else(|| "/".into(), |name| name.to_string_lossy().into_owned()),
            kind: kind.into(),
            path: path.to_string_lossy().into_owned(),
            size: info.size() as i64,
            mode: info.mode() & 0o777,
            permissions: permissions(&info),
            owner: names.user(info.uid()),
            group: names.group(info.gid()),
            modified_time: Some(Timestamp {
                seconds: info.mtime(),
                nanos: info.mtime_nsec() as i32,
            }),
            symlink_target,
            metadata: if info.is_file() {
                metadata::read(path)
            } else {
                BTreeMap::new()
            },
            is_symlink: info.is_symlink(),
        })
    }
}

fn link_target(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| {
        let text = fs::read_link(path).unwrap_or_default();
        super::paths::clean(&path.parent().unwrap_or(Path::new("/")).join(text))
    })
}

fn kind_of(info: &Metadata) -> FileType {
    if info.is_dir() {
        FileType::Directory
    } else if info.is_file() {
        FileType::File
    } else if info.is_symlink() {
        FileType::Symlink
    } else {
        FileType::Unspecified
    }
}

/// Text in the form of the reference: letters for the kind and special bits, then nine permission bits.
fn permissions(info: &Metadata) -> String {
    let kind = info.file_type();
    let mode = info.mode();
    let flags = [
        (kind.is_dir(), 'd'),
        (kind.is_symlink(), 'L'),
        (kind.is_block_device() || kind.is_char_device(), 'D'),
        (kind.is_fifo(), 'p'),
        (kind.is_socket(), 'S'),
        (mode & 0o4000 != 0, 'u'),
        (mode & 0o2000 != 0, 'g'),
        (kind.is_char_device(), 'c'),
        (mode & 0o1000 != 0, 't'),
    ];
    let mut text: String = flags
        .iter()
        .filter(|(set, _)| *set)
        .map(|(_, letter)| *letter)
        .collect();
    if text.is_empty() {
        text.push('-');
    }
    for (index, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> index) != 0 {
            letter
        } else {
            '-'
        });
    }
    text
}
