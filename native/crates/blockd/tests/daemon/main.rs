//! The daemon as its users meet it: over its socket and its mount.
//!
//! One program, so that the rig is built once and every part of it is used.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod captures;
mod device_reads;
mod device_room;
mod devices;
mod in_place;
mod lifecycle;
mod offline;
mod registry;
mod remotes;
mod rig;
mod stacks;
mod storage_full;

const MIB: u64 = 1 << 20;
