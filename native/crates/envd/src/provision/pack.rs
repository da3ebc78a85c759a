//! Reading of a stage's files for a COPY from it: an archive of what the disk has of some sources.
//!
//! A source is a path below the root whose parts may be patterns as Go's `filepath.Match` has them. Links on the way to
//! a source, and a source that is one, are followed; links inside a folder stay links. What is mounted over the disk
//! is not part of it, and sockets are not. Names are those the caller gave; the later names of a file are links to its first.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;
use tarstream::{MemberKind, Writer};
use tokio::sync::mpsc;

use super::facts;
use super::wildcard::fits;

const PIECE_BYTES: usize = 256 << 10;

/// What an archive is written into: pieces for the body of an answer.
pub struct Sender {
    channel: mpsc::Sender<io::Result<Bytes>>,
    piece: Vec<u8>,
}

/// The body of that answer.
pub struct Pieces(mpsc::Receiver<io::Result<Bytes>>);

/// The two ends; `queue` pieces wait for the connection at most.
pub fn channel(queue: usize) -> (Sender, Pieces) {
    let (channel, receiver) = mpsc::channel(queue);
    let piece = Vec::with_capacity(PIECE_BYTES);
    (Sender { channel, piece }, Pieces(receiver))
}

impl Sender {
    /// Ends the body, well or with the failure. To be called on a worker thread.
    pub fn finish(mut self, outcome: io::Result<()>) {
        let last = outcome.and_then(|()| self.flush());
        if let Err(error) = last {
            let _gone = self.channel.blocking_send(Err(error));
        }
    }
}

impl Write for Sender {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(data);
        if self.piece.len() >= PIECE_BYTES {
            self.flush()?;
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE_BYTES));
        self.channel
            .blocking_send(Ok(piece.into()))
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let next = self.0.poll_recv(context);
        next.map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}

/// Writes an archive of what `root` has of the sources.
/// With `parents` it begins with the folders above each, as they are on the way to it.
pub fn pack(root: &Path, sources: &[String], parents: bool, output: impl Write) -> io::Result<()> {
    let mut packing = Packing {
        archive: Writer::new(output),
        device: fs::metadata(root)?.dev(),
        firsts: HashMap::new(),
        done: (parents || sources.len() > 1).then(HashSet::new),
    };
    for source in sources {
        for (name, place) in matches(root, source) {
            if parents {
                packing.add_above(root, &name)?;
            }
            packing.add(&name, &place)?;
        }
    }
    packing.archive.finish()
}

struct Packing<W> {
    archive: Writer<W>,
    device: u64,
    /// Of files with several names: the one that has the content.
    firsts: HashMap<u64, PathBuf>,
    /// Names in the archive, where sources may overlap.
    done: Option<HashSet<PathBuf>>,
}

impl<W: Write> Packing<W> {
    fn add_above(&mut self, root: &Path, name: &Path) -> io::Result<()> {
        let above: Vec<&Path> = name.ancestors().skip(1).collect();
        for folder in above.into_iter().rev().skip(1) {
            let is_new = self
                .done
                .as_mut()
                .is_none_or(|done| done.insert(folder.to_owned()));
            let place = fs::canonicalize(root.join(folder))?;
            if is_new {
                let facts = fs::metadata(&place)?;
                self.append(MemberKind::Directory, folder, &place, &facts)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, name: &Path, place: &Path) -> io::Result<()> {
        let facts = fs::symlink_metadata(place)?;
        let is_foreign = facts.dev() != self.device;
        let Some(kind) = facts::kind_of(&facts).filter(|_| !is_foreign || facts.is_dir()) else {
            return Ok(());
        };
        let is_new = self
            .done
            .as_mut()
            .is_none_or(|done| done.insert(name.to_owned()));
        if is_new {
            self.append(kind, name, place, &facts)?;
        }
        if kind != MemberKind::Directory || is_foreign {
            return Ok(());
        }
        let mut children: Vec<_> = fs::read_dir(place)?.collect::<io::Result<_>>()?;
        children.sort_by_key(fs::DirEntry::file_name);
        children
            .iter()
            .try_for_each(|child| self.add(&name.join(child.file_name()), &child.path()))
    }

    fn append(
        &mut self,
        kind: MemberKind,
        name: &Path,
        place: &Path,
        facts: &Metadata,
    ) -> io::Result<()> {
        let shown = match name.as_os_str().is_empty() {
            true => Path::new("."),
            false => name,
        };
        let mut member = facts::member(kind, shown, place, facts)?;
        if kind != MemberKind::Directory && facts.nlink() > 1 {
            if let Some(first) = self.firsts.get(&facts.ino()) {
                member.kind = MemberKind::HardLink;
                member.link = first.as_os_str().as_bytes().to_vec();
                member.xattrs.clear();
                return self.archive.append(&member);
            }
            self.firsts.insert(facts.ino(), shown.to_owned());
        }
        if kind != MemberKind::File {
            return self.archive.append(&member);
        }
        let file = File::open(place)?;
        let parts = facts::parts(&file, facts)?;
        self.archive.append_file(&member, &parts, &file)
    }
}

/// What there is of a source: its name, and where it is once links are followed. Sorted.
fn matches(root: &Path, source: &str) -> Vec<(PathBuf, PathBuf)> {
    let mut found = vec![PathBuf::new()];
    for part in source
        .split('/')
        .filter(|part| !matches!(*part, "" | "." | ".."))
    {
        let mut deeper = Vec::new();
        for name in found {
            if !part.contains(['*', '?', '[', '\\']) {
                deeper.push(name.join(part));
                continue;
            }
            let mut children: Vec<PathBuf> = fs::read_dir(root.join(&name))
                .into_iter()
                .flatten()
                .flatten()
                .filter(|entry| fits(part, &entry.file_name().to_string_lossy()))
                .map(|entry| name.join(entry.file_name()))
                .collect();
            children.sort();
            deeper.append(&mut children);
        }
        found = deeper;
    }
    let real = |name: PathBuf| Some((fs::canonicalize(root.join(&name)).ok()?, name));
    found
        .into_iter()
        .filter_map(real)
        .map(|(place, name)| (name, place))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tarstream::Archive;

    #[test]
    fn what_is_asked_for_is_in_the_archive() {
        let root = std::env::temp_dir().join(format!("envd-pack-{}", std::process::id()));
        let _absent = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("usr/lib/deep")).unwrap();
        for name in [
            "usr/lib/a.so",
            "usr/lib/b.so",
            "usr/lib/c.txt",
            "usr/lib/deep/d.so",
        ] {
            fs::write(root.join(name), name).unwrap();
        }
        symlink("a.so", root.join("usr/lib/z.so")).unwrap();
        symlink("usr/lib", root.join("lib")).unwrap();
        symlink("nothing", root.join("dangling")).unwrap();
        let long = format!("usr/{}", "n".repeat(200));
        fs::write(root.join(&long), vec![7; 300_000]).unwrap();
        let told = |parents: bool, sources: &[&str]| -> Vec<String> {
            let sources: Vec<String> = sources.iter().map(ToString::to_string).collect();
            let mut bytes = Vec::new();
            pack(&root, &sources, parents, &mut bytes).unwrap();
            let mut archive = Archive::new(bytes.as_slice());
            let members = std::iter::from_fn(|| archive.next_member().unwrap());
            let lines = members.map(|member| {
                let (path, kind) = (String::from_utf8(member.path).unwrap(), member.kind);
                format!("{path} {kind:?} {}", member.size_bytes)
            });
            lines.collect()
        };
        let names = |sources: &[&str]| told(false, sources);
        assert_eq!(
            names(&["usr/lib/a.so", "none", "dangling"]),
            ["usr/lib/a.so File 12"]
        );
        let by_pattern = ["lib/a.so File 12", "lib/b.so File 12", "lib/z.so File 12"];
        assert_eq!(
            names(&["lib/*.so"]),
            by_pattern,
            "links on the way and at the end are followed"
        );
        let with_parents = [
            "usr Directory 0",
            "usr/lib Directory 0",
            "usr/lib/c.txt File 13",
            "lib Directory 0",
            "lib/deep Directory 0",
            "lib/deep/d.so File 17",
        ];
        assert_eq!(told(true, &["usr/lib/c.txt", "lib/deep/*"]), with_parents);
        let deep = ["lib/deep Directory 0", "lib/deep/d.so File 17"];
        assert_eq!(names(&["lib/deep"]), deep);
        let all = names(&["."]);
        assert!(all.contains(&". Directory 0".to_owned()), "{all:?}");
        assert!(
            all.contains(&"usr/lib/z.so Symlink 0".to_owned()),
            "links inside stay links: {all:?}"
        );
        assert!(all.contains(&format!("{long} File 300000")), "{all:?}");
        fs::remove_dir_all(root).unwrap();
    }
}
