//! Writes pax archives: what a header cannot hold goes into records before it. Sparse files are in GNU's format 1.0.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;

use crate::{Member, MemberKind, Part, RECORD_BYTES};

const NAME_BYTES_MAX: usize = 100;
const ID_MAX: u64 = 0o7_777_777;
const SIZE_MAX: u64 = 0o77_777_777_777;
const BUFFER_BYTES: usize = 64 << 10;

/// An archive being written. `finish` ends it.
pub struct Writer<W>(W);

impl<W: Write> Writer<W> {
    /// An archive into `output`.
    pub fn new(output: W) -> Writer<W> {
        Writer(output)
    }

    /// Adds what has no content. Fails for an attribute whose name a record cannot hold.
    pub fn append(&mut self, member: &Member) -> io::Result<()> {
        self.head(member, &member.path, records(member)?, 0)
    }

    /// Adds a file of `member.size_bytes`, of which `parts` have data. What it no longer has is zeros.
    pub fn append_file(
        &mut self,
        member: &Member,
        parts: &[Part],
        content: &File,
    ) -> io::Result<()> {
        let (mut records, mut map) = (records(member)?, Vec::new());
        let is_whole = matches!(parts, [Part { offset: 0, length }] if *length == member.size_bytes)
            || (parts.is_empty() && member.size_bytes == 0);
        if !is_whole {
            map = sparse_map(parts);
            records.set("GNU.sparse.major", b"1")?;
            records.set("GNU.sparse.minor", b"0")?;
            records.set("GNU.sparse.name", &member.path)?;
            records.set(
                "GNU.sparse.realsize",
                member.size_bytes.to_string().as_bytes(),
            )?;
        }
        let data: u64 = parts.iter().map(|part| part.length).sum();
        let stored = map.len() as u64 + data;
        if stored > SIZE_MAX {
            records.set("size", stored.to_string().as_bytes())?;
        }
        self.head(member, &member.path, records, stored)?;
        self.0.write_all(&map)?;
        for part in parts {
            self.part(content, part)?;
        }
        self.pad(stored)
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<()> {
        self.0.write_all(&[0; 2 * RECORD_BYTES])?;
        self.0.flush()
    }

    fn part(&mut self, content: &File, part: &Part) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut done = 0;
        while done < part.length {
            let wanted = (part.length - done).min(BUFFER_BYTES as u64) as usize;
            let count = content.read_at(&mut buffer[..wanted], part.offset + done)?;
            if count == 0 {
                let rest = io::repeat(0).take(part.length - done);
                io::copy(&mut { rest }, &mut self.0)?;
                break;
            }
            self.0.write_all(&buffer[..count])?;
            done += count as u64;
        }
        Ok(())
    }

    fn head(
        &mut self,
        member: &Member,
        path: &[u8],
        records: Records,
        size: u64,
    ) -> io::Result<()> {
        if !records.0.is_empty() {
            let content = records.0;
            self.0.write_all(&header(
                b'x',
                path,
                &Member {
                    link: Vec::new(),
                    ..plain()
                },
                content.len() as u64,
            ))?;
            self.0.write_all(&content)?;
            self.pad(content.len() as u64)?;
        }
        self.0
            .write_all(&header(type_flag(member.kind), path, member, size))
    }

    fn pad(&mut self, size: u64) -> io::Result<()> {
        let over = (size % RECORD_BYTES as u64) as usize;
        match over {
            0 => Ok(()),
            over => self.0.write_all(&[0; RECORD_BYTES][over..]),
        }
    }
}

/// The records of one header of a member.
#[derive(Default)]
struct Records(Vec<u8>);

impl Records {
    fn set(&mut self, key: &str, value: &[u8]) -> io::Result<()> {
        self.set_bytes(key.as_bytes(), value)
    }

    fn set_bytes(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        if key.contains(&b'=') || key.contains(&0) {
            let shown = key.escape_ascii();
            return Err(io::Error::other(format!(
                "an archive cannot hold the attribute '{shown}'"
            )));
        }
        let rest = key.len() + value.len() + 3;
        let mut length = rest;
        while length.to_string().len() + rest != length {
            length = length.to_string().len() + rest;
        }
        self.0.extend_from_slice(format!("{length} ").as_bytes());
        for bytes in [key, b"=", value, b"\n"] {
            self.0.extend_from_slice(bytes);
        }
        Ok(())
    }
}

fn records(member: &Member) -> io::Result<Records> {
    let mut records = Records::default();
    if member.path.len() > NAME_BYTES_MAX {
        records.set("path", &member.path)?;
    }
    if member.link.len() > NAME_BYTES_MAX {
        records.set("linkpath", &member.link)?;
    }
    if member.mtime_ns != 0 || !(0..=SIZE_MAX as i64).contains(&member.mtime_s) {
        records.set("mtime", time(member.mtime_s, member.mtime_ns).as_bytes())?;
    }
    for (name, id) in [("uid", member.uid), ("gid", member.gid)] {
        if id > ID_MAX {
            records.set(name, id.to_string().as_bytes())?;
        }
    }
    for (name, value) in &member.xattrs {
        records.set_bytes(&[b"SCHILY.xattr.", name.as_slice()].concat(), value)?;
    }
    Ok(records)
}

fn time(seconds: i64, nanoseconds: u32) -> String {
    match (seconds < 0, nanoseconds) {
        (_, 0) => seconds.to_string(),
        (false, _) => format!("{seconds}.{nanoseconds:09}"),
        (true, _) => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanoseconds),
    }
}

/// The map that stands before the data of a sparse file, in whole records.
fn sparse_map(parts: &[Part]) -> Vec<u8> {
    let mut map = format!("{}\n", parts.len()).into_bytes();
    for part in parts {
        map.extend_from_slice(format!("{}\n{}\n", part.offset, part.length).as_bytes());
    }
    map.resize(map.len().next_multiple_of(RECORD_BYTES), 0);
    map
}

fn type_flag(kind: MemberKind) -> u8 {
    match kind {
        MemberKind::File => b'0',
        MemberKind::HardLink => b'1',
        MemberKind::Symlink => b'2',
        MemberKind::Character => b'3',
        MemberKind::Block => b'4',
        MemberKind::Directory => b'5',
        MemberKind::Fifo => b'6',
    }
}

/// What a header of records has in fields that mean nothing there.
fn plain() -> Member {
    Member {
        path: Vec::new(),
        kind: MemberKind::File,
        link: Vec::new(),
        mode: 0o644,
        uid: 0,
        gid: 0,
        mtime_s: 0,
        mtime_ns: 0,
        device: (0, 0),
        xattrs: Vec::new(),
        size_bytes: 0,
    }
}

fn header(type_flag: u8, path: &[u8], member: &Member, size: u64) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    let mut put = |at: usize, bytes: &[u8]| record[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &path[..path.len().min(NAME_BYTES_MAX)]);
    put(100, format!("{:07o}", member.mode & 0o7777).as_bytes());
    put(108, format!("{:07o}", member.uid.min(ID_MAX)).as_bytes());
    put(116, format!("{:07o}", member.gid.min(ID_MAX)).as_bytes());
    put(124, format!("{:011o}", size.min(SIZE_MAX)).as_bytes());
    put(
        136,
        format!("{:011o}", member.mtime_s.clamp(0, SIZE_MAX as i64)).as_bytes(),
    );
    put(156, &[type_flag]);
    put(157, &member.link[..member.link.len().min(NAME_BYTES_MAX)]);
    put(257, b"ustar\x0000");
    put(329, format!("{:07o}", member.device.0).as_bytes());
    put(337, format!("{:07o}", member.device.1).as_bytes());
    put(148, b"        ");
    let sum: u32 = record.iter().map(|byte| u32::from(*byte)).sum();
    record[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    record
}
