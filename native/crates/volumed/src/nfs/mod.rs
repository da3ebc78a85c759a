//! NFS version 3 and its mount protocol (RFC 1813), on one port.
//!
//! Version 3 keeps no state here: a guest that was paused, forked or restored, and a server that was
//! restarted, go on with the handles they have.

mod attributes;
mod change;
mod folders;
mod read;
pub mod status;

use std::ffi::CString;
use std::os::fd::AsFd;

use self::status::Status;
use crate::export::{Export, Node, NAME_MAX_BYTES};
use crate::handle::{self, HANDLE_MAX_BYTES};
use crate::rpc::{Call, Caller, Refusal};
use crate::sys::ActingAs;
use crate::xdr::{Malformed, Reader, Writer};

/// Most bytes that one read or write moves.
pub const TRANSFER_MAX_BYTES: usize = 1 << 20;
const NFS_PROGRAM: u32 = 100_003;
const MOUNT_PROGRAM: u32 = 100_005;
const VERSION: u32 = 3;
const MOUNT_PATH_MAX_BYTES: usize = 1024;
const AUTH_SYS: u32 = 1;
const MOUNT_NO_ENTRY: u32 = 2;

/// The volumes of one guest.
pub struct Server {
    exports: Vec<Export>,
    /// Changes with the host's boot: until then, what was written and not yet on disk is still in the
    /// host's memory, whatever became of this program.
    boot: u64,
}

/// What every procedure works with.
struct Context<'a> {
    server: &'a Server,
    caller: &'a Caller,
}

impl Server {
    /// Serves `exports`.
    pub fn new(exports: Vec<Export>, boot: u64) -> Self {
        Self { exports, boot }
    }

    /// Answers one call.
    pub fn answer(&self, call: Call<'_>) -> Result<Vec<u8>, Refusal> {
        match (call.program, call.version) {
            (NFS_PROGRAM, VERSION) => self.nfs(call),
            (MOUNT_PROGRAM, VERSION) => self.mount(call),
            (NFS_PROGRAM | MOUNT_PROGRAM, _) => Err(Refusal::NoVersion(VERSION)),
            _ => Err(Refusal::NoProgram),
        }
    }

    fn nfs(&self, call: Call<'_>) -> Result<Vec<u8>, Refusal> {
        let mut reader = call.arguments;
        let mut writer = Writer::default();
        let context = Context {
            server: self,
            caller: &call.caller,
        };
        let (from, to) = (&mut reader, &mut writer);
        let outcome = match call.procedure {
            0 => return Ok(Vec::new()),
            1 => read::get_attributes(&context, from, to),
            2 => change::set_attributes(&context, from, to),
            3 => read::lookup(&context, from, to),
            4 => read::access(&context, from, to),
            5 => read::read_link(&context, from, to),
            6 => read::read(&context, from, to),
            7 => change::write(&context, from, to),
            8 => change::create(&context, from, to),
            9 => change::make_folder(&context, from, to),
            10 => change::make_link(&context, from, to),
            11 => change::make_special(&context, from, to),
            12 => change::remove(&context, from, to, false),
            13 => change::remove(&context, from, to, true),
            14 => change::rename(&context, from, to),
            15 => change::link(&context, from, to),
            16 => folders::read(&context, from, to, false),
            17 => folders::read(&context, from, to, true),
            18 => read::file_system(&context, from, to),
            19 => read::limits(&context, from, to),
            20 => read::path_limits(&context, from, to),
            21 => change::commit(&context, from, to),
            _ => return Err(Refusal::NoProcedure),
        };
        match outcome {
            Ok(()) => Ok(writer.into_bytes()),
            Err(_) => Err(Refusal::Garbage),
        }
    }

    fn mount(&self, call: Call<'_>) -> Result<Vec<u8>, Refusal> {
        let mut reader = call.arguments;
        let mut writer = Writer::default();
        match call.procedure {
            0 | 3 | 4 => {}
            1 => {
                let path = reader.opaque(MOUNT_PATH_MAX_BYTES)?;
                let name = path.strip_prefix(b"/").unwrap_or(path);
                let export = self
                    .exports
                    .iter()
                    .find(|export| export.name.as_bytes() == name);
                let root = |export: &Export| export.seal(export.root_node()?.fd.as_fd());
                match export.map(root) {
                    Some(Ok(handle)) => {
                        writer.u32(0);
                        writer.opaque(&handle);
                        writer.u32(1);
                        writer.u32(AUTH_SYS);
                    }
                    _ => writer.u32(MOUNT_NO_ENTRY),
                }
            }
            // Who mounts what, and what there is, is nobody's business: both lists are empty.
            2 | 5 => writer.bool(false),
            _ => return Err(Refusal::NoProcedure),
        }
        Ok(writer.into_bytes())
    }
}

/// A procedure either wrote its whole result, a failure included, or its arguments are malformed.
type Outcome = Result<(), Malformed>;

impl Context<'_> {
    /// The bytes of a handle, not judged yet.
    fn handle<'a>(reader: &mut Reader<'a>) -> Result<&'a [u8], Malformed> {
        reader.opaque(HANDLE_MAX_BYTES)
    }

    /// The volume and the node of a handle.
    fn open(&self, sealed: &[u8]) -> Result<(&Export, Node), Status> {
        let tag = handle::claimed_tag(sealed).ok_or(Status::BadHandle)?;
        let export = self
            .server
            .exports
            .iter()
            .find(|export| export.tag == tag)
            .ok_or(Status::Stale)?;
        Ok((export, export.open(sealed)?))
    }

    /// From here on the thread is the caller to the file system, until the value is dropped.
    fn act(&self) -> Result<ActingAs, Status> {
        ActingAs::new(self.caller.uid, self.caller.gid, &self.caller.groups)
            .map_err(|_| Status::ServerFault)
    }
}

/// A name in a folder, as a call gives it: 1 to 255 bytes without `/` and NUL.
fn name(reader: &mut Reader<'_>) -> Result<Result<CString, Status>, Malformed> {
    let bytes = reader.opaque(MOUNT_PATH_MAX_BYTES)?;
    if bytes.len() > NAME_MAX_BYTES {
        return Ok(Err(Status::NameTooLong));
    }
    if bytes.is_empty() || bytes.contains(&b'/') {
        return Ok(Err(Status::Invalid));
    }
    Ok(CString::new(bytes).map_err(|_| Status::Invalid))
}
