//! Finds where a process maps a stack's file (`/proc/PID/maps`).

use std::io;

/// One private mapping of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Byte of the file at `start`.
    pub file_offset: u64,
}

/// Identity of a file as the kernel prints it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    /// Major device number.
    pub major: u64,
    /// Minor device number.
    pub minor: u64,
    /// Inode number.
    pub inode: u64,
}

/// Private mappings of the file in process `pid`, by file offset.
///
/// Device and inode decide, not the path: a jailed process may see the file
/// under another name, and an inode number of ours is never used twice.
pub fn find(pid: i32, file: FileIdentity) -> io::Result<Vec<Mapping>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let lines = text.lines();
    let mut found: Vec<Mapping> = lines.filter_map(|line| parse_line(line, file)).collect();
    found.sort_by_key(|mapping| mapping.file_offset);
    Ok(found)
}

/// `start-end perms offset major:minor inode path`, numbers in hex but the inode.
fn parse_line(line: &str, file: FileIdentity) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let is_private = fields.next()?.ends_with('p');
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let file_offset = hex(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let found = FileIdentity {
        major: hex(major)?,
        minor: hex(minor)?,
        inode: fields.next()?.parse().ok()?,
    };
    (is_private && found == file).then_some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        file_offset,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileIdentity = FileIdentity {
        major: 0,
        minor: 0x2a,
        inode: 7,
    };

    #[test]
    fn only_private_mappings_of_the_file_count() {
        let private = "7f00-8f00 rw-p 00001000 00:2a 7      /mnt/with space/x";
        let expected = Mapping {
            start: 0x7f00,
            end: 0x8f00,
            file_offset: 0x1000,
        };
        assert_eq!(parse_line(private, FILE), Some(expected));
        for other in [
            "7f00-8f00 rw-s 00001000 00:2a 7 /mnt/x",
            "7f00-8f00 rw-p 00001000 00:2b 7 /mnt/x",
            "7f00-8f00 rw-p 00001000 00:2a 8 /mnt/x",
            "7f00-8f00 rw-p 00000000 00:00 0",
            "garbage",
        ] {
            assert_eq!(parse_line(other, FILE), None, "{other}");
        }
    }
}
