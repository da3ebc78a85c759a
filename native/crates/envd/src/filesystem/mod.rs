//! `filesystem.Filesystem`: paths, entries and the calls on them (contract section 3.6).
//!
//! Invariant: every access happens with the identity of the requesting user, so the kernel decides
//! what is allowed, also where a link leads. What it refuses to make, change, move or remove is done again
//! as root if no link is on the way ([`pinned`]).

pub mod entry;
pub mod paths;
pub mod pinned;
pub mod remove;
pub mod service;
pub mod watch;
