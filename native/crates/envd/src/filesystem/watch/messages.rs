//! Messages of the watch calls (contract section 3.6). Names are accepted in both spellings.

use serde::{Deserialize, Serialize};

use crate::connect::lenient;
use crate::filesystem::entry::EntryInfo;

/// WatchDir and CreateWatcher request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct WatchRequest {
    /// Folder.
    #[serde(deserialize_with = "lenient::or_default")]
    pub path: String,
    /// Also the folders below it.
    #[serde(deserialize_with = "lenient::or_default")]
    pub recursive: bool,
    /// Describe the file of each event.
    #[serde(
        rename = "includeEntry",
        alias = "include_entry",
        deserialize_with = "lenient::or_default"
    )]
    pub include_entry: bool,
    /// Watch network file systems too, though they may report little.
    #[serde(
        rename = "allowNetworkMounts",
        alias = "allow_network_mounts",
        deserialize_with = "lenient::or_default"
    )]
    pub allow_network_mounts: bool,
}

/// GetWatcherEvents and RemoveWatcher request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct WatcherRequest {
    /// What CreateWatcher answered.
    #[serde(
        rename = "watcherId",
        alias = "watcher_id",
        deserialize_with = "lenient::or_default"
    )]
    pub watcher_id: String,
}

/// CreateWatcher answer.
#[derive(Debug, Serialize)]
pub struct CreateWatcherResponse {
    /// Name of the watcher in later calls.
    #[serde(rename = "watcherId")]
    pub watcher_id: String,
}

/// GetWatcherEvents answer.
#[derive(Debug, Serialize)]
pub struct WatcherEventsResponse {
    /// All since the last call, oldest first.
    pub events: Vec<FilesystemEvent>,
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum EventKind {
    /// It is there now: made, or moved here.
    #[serde(rename = "EVENT_TYPE_CREATE")]
    Create,
    /// Its content changed.
    #[serde(rename = "EVENT_TYPE_WRITE")]
    Write,
    /// It was removed.
    #[serde(rename = "EVENT_TYPE_REMOVE")]
    Remove,
    /// It was moved away.
    #[serde(rename = "EVENT_TYPE_RENAME")]
    Rename,
    /// Its mode, owner, times or attributes changed.
    #[serde(rename = "EVENT_TYPE_CHMOD")]
    Chmod,
}

/// One event.
#[derive(Debug, Serialize)]
pub struct FilesystemEvent {
    /// Path below the watched folder; `.` for the folder itself.
    pub name: String,
    /// What happened.
    #[serde(rename = "type")]
    pub kind: EventKind,
    /// The file, if asked for and still there.
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

/// One message of the WatchDir stream.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WatchMessage {
    /// The watch is in place.
    Start {},
    /// Something happened.
    Filesystem(FilesystemEvent),
    /// Nothing happened.
    Keepalive {},
}
