//! `filesystem.Filesystem`: paths, entries and the calls on them (contract section 3.6).
//!
//! Invariant: every access happens with the identity of the requesting user, so the kernel decides
//! what is allowed, also where a link leads.

pub mod entry;
pub mod paths;
pub mod remove;
pub mod service;
pub mod watch;
