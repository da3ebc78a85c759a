//! Layers that stay in a registry: read by HTTP range, kept in a bounded cache on
//! disk, downloaded in the background.
//!
//! A *stub* ([`Stub`]) is a small file in place of a layer; [`Remotes`] opens what it
//! points to as an [`lsmt::Blob`]. Reads go to the local file once the download is
//! complete, else to the [`cache::Cache`], else to the [`source::Source`].
//!
//! Invariants: the cache never returns a byte that differs from what was stored in it;
//! no input makes the crate use more than a fixed bound of memory, connections or
//! disk; a secret is in memory only and goes to no other host than it is for.
#![forbid(unsafe_code)]

pub mod address;
mod answer;
pub mod auth;
pub mod blob;
pub mod cache;
pub mod download;
pub mod error;
mod flight;
pub mod http;
pub mod logins;
pub mod remotes;
pub mod source;
pub mod stub;
pub mod trace;

pub use cache::{Cache, CacheStats};
pub use error::RemoteError;
pub use http::{Http, HttpOptions};
pub use logins::Login;
pub use remotes::{RemoteOptions, Remotes};
pub use stub::Stub;

#[cfg(test)]
mod hostile;
