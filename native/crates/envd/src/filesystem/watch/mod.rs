//! Watching folders (contract section 3.6): WatchDir, CreateWatcher, GetWatcherEvents, RemoveWatcher.
//!
//! ```text
//! kernel queue -> queue (records) -> tracker (events, folders below) -> watcher (bounded queue)
//!                                                          -> stream (WatchDir) or registry (polled)
//! ```
//!
//! Invariants: one inotify descriptor per watcher, read with the identity of the user who asked; a
//! client hears about a folder only what that user may see; what cannot be told ends the watch with an
//! error that says so, and never goes missing in silence.
//!
//! The rules where the contract leaves a choice:
//! - In a recursive watch, what a new folder already holds when its watch is in place is reported as
//!   CREATE, and as WRITE too for files that are not empty, unless the kernel reports it anyway. This
//!   holds for folders made, moved in, and made readable.
//! - Links to folders are reported but not followed, except the watched folder itself.
//! - Network file systems and those of the kernel (/proc, /sys) mounted below are left out, the
//!   former unless allowed.
//! - Changes of the watched folder itself have the name `.`. When it is removed or moved, that is the
//!   last event: a stream ends, a polled watcher has no more events.

mod messages;
pub mod mounts;
mod queue;
pub mod registry;
pub mod service;
mod stream;
#[cfg(test)]
mod tests;
mod tracker;
mod tree;
mod watcher;
