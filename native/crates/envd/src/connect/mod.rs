//! The Connect protocol as the clients use it (contract section 3.3): errors, codec, frames.

pub mod codec;
pub mod error;
pub mod frames;
pub mod lenient;

pub use codec::Codec;
pub use error::{Code, ConnectError};
