//! Remote procedure calls over TCP (RFC 5531): records, calls, credentials, replies.

use std::io::{self, Read, Write};

use crate::xdr::{Malformed, Reader, Writer};

/// Largest call: a write of `nfs::TRANSFER_MAX_BYTES` and room for all around it.
pub const CALL_MAX_BYTES: usize = (1 << 20) + (64 << 10);
/// Most fragments of one record: clients send one.
const FRAGMENTS_MAX: usize = 64;
const LAST_FRAGMENT: u32 = 1 << 31;
const CREDENTIAL_MAX_BYTES: usize = 400;
const MACHINE_NAME_MAX_BYTES: usize = 255;
const GROUPS_MAX: usize = 16;
const RPC_VERSION: u32 = 2;
const AUTH_NONE: u32 = 0;
const AUTH_SYS: u32 = 1;
const NOBODY: u32 = 65534;

/// Whose call it is, as the guest's kernel says. It speaks for all its users: they are its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
}

/// A call and its arguments.
pub struct Call<'a> {
    /// Chosen by the client to tell its calls apart.
    pub xid: u32,
    /// Program.
    pub program: u32,
    /// Version of the program.
    pub version: u32,
    /// Procedure of the version.
    pub procedure: u32,
    /// Who calls.
    pub caller: Caller,
    /// The arguments.
    pub arguments: Reader<'a>,
}

/// How a call that was understood ended (`accept_stat`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No such program.
    NoProgram,
    /// No such version; there is only this one.
    NoVersion(u32),
    /// No such procedure.
    NoProcedure,
    /// The arguments are malformed.
    Garbage,
}

impl From<Malformed> for Refusal {
    fn from(_: Malformed) -> Self {
        Self::Garbage
    }
}

/// Reads one record into `into`. False at the end of the connection; an error for a record that breaks the limits.
pub fn read_record(stream: &mut impl Read, into: &mut Vec<u8>) -> io::Result<bool> {
    into.clear();
    for _ in 0..FRAGMENTS_MAX {
        let mut head = [0; 4];
        match stream.read_exact(&mut head) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && into.is_empty() => {
                return Ok(false)
            }
            outcome => outcome?,
        }
        let head = u32::from_be_bytes(head);
        let length = (head & !LAST_FRAGMENT) as usize;
        let start = into.len();
        if start + length > CALL_MAX_BYTES {
            return Err(io::Error::other("a call is larger than the limit"));
        }
        into.resize(start + length, 0);
        stream.read_exact(&mut into[start..])?;
        if head & LAST_FRAGMENT != 0 {
            return Ok(true);
        }
    }
    Err(io::Error::other("a call has more fragments than the limit"))
}

/// Writes one record.
pub fn write_record(stream: &mut impl Write, reply: &[u8]) -> io::Result<()> {
    let mut record = Vec::with_capacity(reply.len() + 4);
    record.extend_from_slice(&(LAST_FRAGMENT | reply.len() as u32).to_be_bytes());
    record.extend_from_slice(reply);
    stream.write_all(&record)
}

/// The call in a record. Malformed when it is no call of RPC version 2.
pub fn parse(record: &[u8]) -> Result<Call<'_>, Malformed> {
    let mut reader = Reader::new(record);
    let xid = reader.u32()?;
    if reader.u32()? != 0 || reader.u32()? != RPC_VERSION {
        return Err(Malformed);
    }
    let (program, version, procedure) = (reader.u32()?, reader.u32()?, reader.u32()?);
    let flavour = reader.u32()?;
    let credential = reader.opaque(CREDENTIAL_MAX_BYTES)?;
    let caller = match flavour {
        AUTH_SYS => parse_caller(credential)?,
        _ => Caller {
            uid: NOBODY,
            gid: NOBODY,
            groups: Vec::new(),
        },
    };
    let _verifier = (reader.u32()?, reader.opaque(CREDENTIAL_MAX_BYTES)?);
    Ok(Call {
        xid,
        program,
        version,
        procedure,
        caller,
        arguments: reader,
    })
}

fn parse_caller(credential: &[u8]) -> Result<Caller, Malformed> {
    let mut reader = Reader::new(credential);
    let _stamp = reader.u32()?;
    let _machine = reader.opaque(MACHINE_NAME_MAX_BYTES)?;
    let (uid, gid) = (reader.u32()?, reader.u32()?);
    let count = reader.u32()? as usize;
    if count > GROUPS_MAX {
        return Err(Malformed);
    }
    let groups = (0..count)
        .map(|_| reader.u32())
        .collect::<Result<Vec<u32>, Malformed>>()?;
    Ok(Caller { uid, gid, groups })
}

/// The reply to `xid` with its results, or why there are none.
pub fn reply(xid: u32, outcome: Result<Vec<u8>, Refusal>) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.u32(xid);
    writer.u32(1); // a reply
    writer.u32(0); // accepted
    writer.u32(AUTH_NONE);
    writer.u32(0);
    match outcome {
        Ok(results) => {
            writer.u32(0);
            writer.fixed(&results);
        }
        Err(Refusal::NoProgram) => writer.u32(1),
        Err(Refusal::NoVersion(only)) => {
            writer.u32(2);
            writer.u32(only);
            writer.u32(only);
        }
        Err(Refusal::NoProcedure) => writer.u32(3),
        Err(Refusal::Garbage) => writer.u32(4),
    }
    writer.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(fragments: &[(&[u8], bool)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (content, last) in fragments {
            let head = content.len() as u32 | if *last { LAST_FRAGMENT } else { 0 };
            bytes.extend_from_slice(&head.to_be_bytes());
            bytes.extend_from_slice(content);
        }
        bytes
    }

    #[test]
    fn fragments_become_one_record() {
        let mut into = Vec::new();
        let bytes = record(&[(b"ab", false), (b"", false), (b"c", true)]);
        assert!(read_record(&mut &bytes[..], &mut into).unwrap());
        assert_eq!(into, b"abc");
        assert!(!read_record(&mut &b""[..], &mut into).unwrap());
    }

    #[test]
    fn records_have_limits() {
        let mut into = Vec::new();
        let large = (CALL_MAX_BYTES as u32 + 1).to_be_bytes();
        assert!(read_record(&mut &large[..], &mut into).is_err());
        let endless = record(&[(&b""[..], false); FRAGMENTS_MAX]);
        assert!(read_record(&mut &endless[..], &mut into).is_err());
        let cut = record(&[(b"abcd", true)]);
        assert!(read_record(&mut &cut[..6], &mut into).is_err());
    }

    #[test]
    fn credentials() {
        let mut body = Writer::default();
        body.u32(1);
        body.opaque(b"host");
        for number in [1000, 100, 2, 4, 5] {
            body.u32(number);
        }
        let body = body.into_bytes();
        let mut call = Writer::default();
        for number in [9, 0, 2, 100_003, 3, 1, AUTH_SYS] {
            call.u32(number);
        }
        call.opaque(&body);
        call.u32(AUTH_NONE);
        call.opaque(b"");
        call.u32(77);
        let bytes = call.into_bytes();
        let mut call = parse(&bytes).unwrap();
        let caller = Caller {
            uid: 1000,
            gid: 100,
            groups: vec![4, 5],
        };
        assert_eq!((call.xid, call.caller), (9, caller));
        assert_eq!(call.arguments.u32(), Ok(77));
        for cut in 0..bytes.len() - 4 {
            assert!(parse(&bytes[..cut]).is_err(), "cut at {cut}");
        }
    }
}
