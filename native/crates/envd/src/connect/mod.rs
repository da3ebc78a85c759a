//! The Connect protocol as the clients use it (contract section 3.3): errors, codecs, compression, frames.

pub mod codec;
pub mod compression;
pub mod error;
pub mod frames;
pub mod lenient;

pub use codec::{Answer, Codec, Request};
pub use compression::Compression;
pub use error::{Code, ConnectError};
