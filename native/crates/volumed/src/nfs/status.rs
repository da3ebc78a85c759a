//! How calls end (RFC 1813 section 2.6).

use rustix::io::Errno;

use crate::xdr::Malformed;

/// Why a call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("status {self:?}")]
pub enum Status {
    /// Only the owner, or root, may.
    Permission = 1,
    /// Not there.
    NoEntry = 2,
    /// The disk failed.
    Io = 5,
    /// No such device.
    NoDevice = 6,
    /// Not allowed.
    Access = 13,
    /// Already there.
    Exists = 17,
    /// A link or move between volumes.
    CrossDevice = 18,
    /// No folder.
    NotFolder = 20,
    /// A folder.
    IsFolder = 21,
    /// Makes no sense.
    Invalid = 22,
    /// Too large a file.
    TooLarge = 27,
    /// No room on the node's disk.
    NoSpace = 28,
    /// Too many links.
    TooManyLinks = 31,
    /// Name too long.
    NameTooLong = 63,
    /// The folder holds something.
    NotEmpty = 66,
    /// A quota of the node's file system.
    Quota = 69,
    /// What the handle named is gone.
    Stale = 70,
    /// No handle of this server.
    BadHandle = 10001,
    /// The guard's time is not the file's.
    NotSynchronised = 10002,
    /// The reader's buffer holds not even one entry.
    TooSmall = 10005,
    /// Fault of the server.
    ServerFault = 10006,
    /// This kind of file is not made here.
    BadType = 10007,
    /// Not done by this server.
    NotSupported = 10004,
    /// The arguments are malformed: no answer of NFS but of RPC.
    Garbage = -1,
}

impl From<Malformed> for Status {
    fn from(_: Malformed) -> Self {
        Self::Garbage
    }
}

impl From<Errno> for Status {
    fn from(error: Errno) -> Self {
        match error {
            Errno::PERM => Self::Permission,
            Errno::NOENT => Self::NoEntry,
            Errno::NXIO | Errno::NODEV => Self::NoDevice,
            Errno::ACCESS => Self::Access,
            Errno::EXIST => Self::Exists,
            Errno::XDEV => Self::CrossDevice,
            Errno::NOTDIR => Self::NotFolder,
            Errno::ISDIR => Self::IsFolder,
            Errno::INVAL | Errno::LOOP | Errno::BADF => Self::Invalid,
            Errno::FBIG => Self::TooLarge,
            Errno::NOSPC => Self::NoSpace,
            Errno::MLINK => Self::TooManyLinks,
            Errno::NAMETOOLONG => Self::NameTooLong,
            Errno::NOTEMPTY => Self::NotEmpty,
            Errno::DQUOT => Self::Quota,
            Errno::STALE => Self::Stale,
            Errno::OPNOTSUPP => Self::NotSupported,
            _ => Self::Io,
        }
    }
}
