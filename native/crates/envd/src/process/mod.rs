//! Processes started by clients: spawn, output, input, signals, end (contract section 3.4).
//!
//! Invariants:
//! - a process is in the live table from before it can exit until the reaper has its status;
//! - its `end` event is sent once, after its own output, and last;
//! - no client, slow or gone, can make the agent's memory grow or another process wait.

pub mod cgroup;
pub mod io;
pub mod messages;
pub mod registry;
pub mod service;
pub mod spawn;
pub mod stream;
mod words;
