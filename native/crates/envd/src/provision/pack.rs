//! Reading of a stage's files for a COPY from it: an archive of what the disk has of some sources.
//!
//! A source is a path below the root whose parts may be patterns as Go's `filepath.Match` has them. Links on the way to
//! a source, and a source that is one, are followed; links inside a folder stay links. What is mounted over the disk
//! is not part of it. Names are those the caller gave.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;
use tar::{Builder, EntryType, Header};
use tokio::sync::mpsc;

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
pub fn pack(root: &Path, sources: &[String], output: impl Write) -> io::Result<()> {
    let device = fs::metadata(root)?.dev();
    let mut archive = Builder::new(output);
    for source in sources {
        for (name, place) in matches(root, source) {
            add(&mut archive, &name, &place, device)?;
        }
    }
    archive.into_inner()?.flush()
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

fn add(
    archive: &mut Builder<impl Write>,
    name: &Path,
    place: &Path,
    device: u64,
) -> io::Result<()> {
    let facts = fs::symlink_metadata(place)?;
    let shown = match name.as_os_str().is_empty() {
        true => Path::new("."),
        false => name,
    };
    let mut header = Header::new_gnu();
    header.set_metadata(&facts);
    if facts.dev() != device {
        return match facts.is_dir() {
            true => append(archive, &mut header, shown, EntryType::Directory),
            false => Ok(()),
        };
    }
    if facts.is_symlink() {
        header.set_size(0);
        archive.append_link(&mut header, shown, fs::read_link(place)?)
    } else if facts.is_dir() {
        append(archive, &mut header, shown, EntryType::Directory)?;
        let mut children: Vec<_> = fs::read_dir(place)?.collect::<io::Result<_>>()?;
        children.sort_by_key(fs::DirEntry::file_name);
        children.iter().try_for_each(|child| {
            add(
                archive,
                &name.join(child.file_name()),
                &child.path(),
                device,
            )
        })
    } else if facts.is_file() {
        append_file(archive, header, shown, place, &facts)
    } else if facts.file_type().is_socket() {
        Ok(())
    } else {
        append(archive, &mut header, shown, EntryType::Fifo)
    }
}

fn append(
    archive: &mut Builder<impl Write>,
    header: &mut Header,
    name: &Path,
    kind: EntryType,
) -> io::Result<()> {
    header.set_entry_type(kind);
    header.set_size(0);
    archive.append_data(header, name, io::empty())
}

fn append_file(
    archive: &mut Builder<impl Write>,
    mut header: Header,
    name: &Path,
    place: &Path,
    facts: &Metadata,
) -> io::Result<()> {
    let file = File::open(place)?;
    header.set_size(facts.len());
    // A file that grows or shrinks meanwhile must not shift what comes after it.
    let content = file
        .take(facts.len())
        .chain(io::repeat(0))
        .take(facts.len());
    archive.append_data(&mut header, name, content)
}

/// Whether a name fits a pattern, as Go's `filepath.Match` says. The host has checked that it is one.
fn fits(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    fits_rest(&pattern, &name)
}

fn fits_rest(pattern: &[char], name: &[char]) -> bool {
    // The last `*`, and how much of the name it has taken: a later one makes an earlier one's choice final.
    let (mut at, mut of) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while of < name.len() {
        if pattern.get(at) == Some(&'*') {
            star = Some((at + 1, of));
            at += 1;
        } else if let Some(length) = one(&pattern[at.min(pattern.len())..], name[of]) {
            at += length;
            of += 1;
        } else if let Some((after, taken)) = star {
            star = Some((after, taken + 1));
            (at, of) = (after, taken + 1);
        } else {
            return false;
        }
    }
    pattern[at.min(pattern.len())..]
        .iter()
        .all(|left| *left == '*')
}

/// How much of the pattern stands for the character, None when it does not fit.
fn one(pattern: &[char], character: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['\\', escaped, ..] => (*escaped == character).then_some(2),
        ['[', rest @ ..] => group(rest, character).map(|length| length + 1),
        [literal, ..] => (*literal == character).then_some(1),
        [] => None,
    }
}

fn group(rest: &[char], character: char) -> Option<usize> {
    let is_negated = rest.first() == Some(&'^');
    let mut at = usize::from(is_negated);
    let (first, mut has_it) = (at, false);
    let letter = |at: &mut usize| -> Option<char> {
        if rest.get(*at) == Some(&'\\') {
            *at += 1;
        }
        *at += 1;
        rest.get(*at - 1).copied()
    };
    while rest.get(at) != Some(&']') || at == first {
        let low = letter(&mut at)?;
        let mut high = low;
        if rest.get(at) == Some(&'-') {
            at += 1;
            high = letter(&mut at)?;
        }
        has_it |= (low..=high).contains(&character);
    }
    (has_it != is_negated).then_some(at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tar::Archive;

    #[test]
    fn patterns_fit_as_in_go() {
        let yes = [
            ("*", ".hidden"),
            ("*.txt", "a.txt"),
            ("a*b*c", "aXbYbc"),
            ("?", "é"),
            ("[a-c]x", "bx"),
            ("[^a-c]x", "dx"),
            ("\\*", "*"),
            ("[\\]]", "]"),
            ("a**", "a"),
        ];
        let no = [
            ("*.txt", "a.txt2"),
            ("?", ""),
            ("?", "ab"),
            ("[a-c]x", "dx"),
            ("[^a-c]x", "ax"),
            ("\\*", "a"),
            ("a*b", "a"),
            ("", "a"),
            ("[a", "a"),
        ];
        assert!(
            yes.iter().all(|(pattern, name)| fits(pattern, name)),
            "{yes:?}"
        );
        assert!(
            !no.iter().any(|(pattern, name)| fits(pattern, name)),
            "{no:?}"
        );
        let mut noise = crate::fuzz::Noise::new(5);
        for _ in 0..5_000 {
            let _any = fits(&noise.text(&["[a-c]*?\\x[^"]), &noise.text(&["abc-]["]));
        }
    }

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
        let names = |sources: &[&str]| -> Vec<String> {
            let sources: Vec<String> = sources.iter().map(ToString::to_string).collect();
            let mut bytes = Vec::new();
            pack(&root, &sources, &mut bytes).unwrap();
            let mut archive = Archive::new(bytes.as_slice());
            let entries = archive.entries().unwrap().map(|entry| {
                let entry = entry.unwrap();
                let kind = entry.header().entry_type();
                let size = entry.header().size().unwrap();
                format!("{} {kind:?} {size}", entry.path().unwrap().display())
            });
            entries.collect()
        };
        assert_eq!(
            names(&["usr/lib/a.so", "none", "dangling"]),
            ["usr/lib/a.so Regular 12"]
        );
        let by_pattern = [
            "lib/a.so Regular 12",
            "lib/b.so Regular 12",
            "lib/z.so Regular 12",
        ];
        assert_eq!(
            names(&["lib/*.so"]),
            by_pattern,
            "links on the way and at the end are followed"
        );
        let deep = ["lib/deep Directory 0", "lib/deep/d.so Regular 17"];
        assert_eq!(names(&["lib/deep"]), deep);
        let all = names(&["."]);
        assert!(all.contains(&". Directory 0".to_owned()), "{all:?}");
        assert!(
            all.contains(&"usr/lib/z.so Symlink 0".to_owned()),
            "links inside stay links: {all:?}"
        );
        assert!(all.contains(&format!("{long} Regular 300000")), "{all:?}");
        fs::remove_dir_all(root).unwrap();
    }
}
