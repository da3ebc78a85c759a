//! Messages of the watch calls (contract section 3.6), in both encodings. JSON names are accepted in both
//! spellings. Field numbers the contract does not list are as the clients' own code has them.

use serde::{Deserialize, Serialize, Serializer};

use crate::connect::lenient;
use crate::filesystem::entry::EntryInfo;
use crate::process::messages::Empty;

/// WatchDir and CreateWatcher request.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct WatchRequest {
    /// Folder.
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "lenient::or_default")]
    pub path: String,
    /// Also the folders below it.
    #[prost(bool, tag = "2")]
    #[serde(deserialize_with = "lenient::or_default")]
    pub recursive: bool,
    /// Describe the file of each event.
    #[prost(bool, tag = "3")]
    #[serde(
        rename = "includeEntry",
        alias = "include_entry",
        deserialize_with = "lenient::or_default"
    )]
    pub include_entry: bool,
    /// Watch network file systems too, though they may report little.
    #[prost(bool, tag = "4")]
    #[serde(
        rename = "allowNetworkMounts",
        alias = "allow_network_mounts",
        deserialize_with = "lenient::or_default"
    )]
    pub allow_network_mounts: bool,
}

/// GetWatcherEvents and RemoveWatcher request.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct WatcherRequest {
    /// What CreateWatcher answered.
    #[prost(string, tag = "1")]
    #[serde(
        rename = "watcherId",
        alias = "watcher_id",
        deserialize_with = "lenient::or_default"
    )]
    pub watcher_id: String,
}

/// CreateWatcher answer.
#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct CreateWatcherResponse {
    /// Name of the watcher in later calls.
    #[prost(string, tag = "1")]
    #[serde(rename = "watcherId")]
    pub watcher_id: String,
}

/// GetWatcherEvents answer.
#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct WatcherEventsResponse {
    /// All since the last call, oldest first.
    #[prost(message, repeated, tag = "1")]
    pub events: Vec<FilesystemEvent>,
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum EventKind {
    /// Never sent.
    Unspecified = 0,
    /// It is there now: made, or moved here.
    Create = 1,
    /// Its content changed.
    Write = 2,
    /// It was removed.
    Remove = 3,
    /// It was moved away.
    Rename = 4,
    /// Its mode, owner, times or attributes changed.
    Chmod = 5,
}

fn write_kind<S: Serializer>(value: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match EventKind::try_from(*value) {
        Ok(EventKind::Create) => "EVENT_TYPE_CREATE",
        Ok(EventKind::Write) => "EVENT_TYPE_WRITE",
        Ok(EventKind::Remove) => "EVENT_TYPE_REMOVE",
        Ok(EventKind::Rename) => "EVENT_TYPE_RENAME",
        Ok(EventKind::Chmod) => "EVENT_TYPE_CHMOD",
        Ok(EventKind::Unspecified) | Err(_) => "EVENT_TYPE_UNSPECIFIED",
    })
}

/// One event.
#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct FilesystemEvent {
    /// Path below the watched folder; `.` for the folder itself.
    #[prost(string, tag = "1")]
    pub name: String,
    /// What happened.
    #[prost(enumeration = "EventKind", tag = "2")]
    #[serde(rename = "type", serialize_with = "write_kind")]
    pub kind: i32,
    /// The file, if asked for and still there.
    #[prost(message, optional, boxed, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<Box<EntryInfo>>,
}

impl FilesystemEvent {
    /// Memory the event takes, near enough for a limit.
    pub fn size_bytes(&self) -> usize {
        let entry = self.entry.as_ref().map_or(0, |entry| {
            let texts = [
                Some(&entry.name),
                Some(&entry.path),
                entry.symlink_target.as_ref(),
            ];
            let texts: usize = texts.into_iter().flatten().map(String::len).sum();
            let metadata = entry
                .metadata
                .iter()
                .map(|(key, value)| key.len() + value.len() + 64);
            size_of::<EntryInfo>() + 64 + texts + metadata.sum::<usize>()
        });
        size_of::<Self>() + self.name.len() + entry
    }
}

/// One message of the WatchDir stream: exactly one field is set.
#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct WatchMessage {
    /// The watch is in place.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<Empty>,
    /// Something happened.
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<FilesystemEvent>,
    /// Nothing happened.
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<Empty>,
}

impl WatchMessage {
    /// The watch is in place.
    pub fn start() -> Self {
        Self {
            start: Some(Empty {}),
            ..Self::default()
        }
    }

    /// Something happened.
    pub fn event(event: FilesystemEvent) -> Self {
        Self {
            filesystem: Some(event),
            ..Self::default()
        }
    }

    /// Nothing happened.
    pub fn keepalive() -> Self {
        Self {
            keepalive: Some(Empty {}),
            ..Self::default()
        }
    }
}
