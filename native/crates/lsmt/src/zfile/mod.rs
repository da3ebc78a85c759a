//! ZFile: a compressed wrapper around the bytes of a layer (overlaybd spec 2).

pub mod codec;
pub mod crc;
pub mod format;
pub mod jump_table;
pub mod reader;
pub mod writer;

pub use format::{is_zfile, Algorithm, ZFileError};
pub use reader::ZFileBlob;
pub use writer::Compression;
