//! Names and addresses of this guest in the image's files: hostname, hosts, resolver, machine id.

use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::Path;

use crate::users::read_text;

const HOSTS: &str = "/etc/hosts";
const RESOLVER: &str = "/etc/resolv.conf";
const OUR_LINE: &str = "# sandbox hostname";

/// Whether a text is a legal hostname: letters, digits, dashes and dots, at most 64 bytes.
pub fn is_hostname(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 64
        && !name.starts_with(['-', '.'])
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.')
}

/// Sets the hostname and keeps /etc/hostname and /etc/hosts in step.
pub fn set_hostname(name: &str) -> io::Result<()> {
    if rustix::system::uname().nodename().to_bytes() != name.as_bytes() {
        rustix::system::sethostname(name.as_bytes())?;
    }
    write_if_changed(Path::new("/etc/hostname"), &format!("{name}\n"))?;
    let old = read_text(Path::new(HOSTS));
    write_if_changed(Path::new(HOSTS), &hosts_text(&old, name))
}

/// The hosts file with localhost and exactly one line of ours.
fn hosts_text(old: &str, name: &str) -> String {
    let mut lines: Vec<&str> = old
        .lines()
        .filter(|line| !line.trim_end().ends_with(OUR_LINE))
        .collect();
    let names_localhost = |line: &&str| {
        !line.trim_start().starts_with('#')
            && line
                .split_whitespace()
                .skip(1)
                .any(|word| word == "localhost")
    };
    if !lines.iter().any(names_localhost) {
        lines.insert(0, "127.0.0.1 localhost");
    }
    let ours = format!("127.0.1.1 {name} {OUR_LINE}");
    if name != "localhost" {
        lines.push(&ours);
    }
    lines.join("\n") + "\n"
}

/// Writes the machine id: 32 hexadecimal digits.
pub fn set_machine_id(id: &str) -> io::Result<()> {
    write_if_changed(Path::new("/etc/machine-id"), &format!("{id}\n"))
}

/// Whether a text is a machine id.
pub fn is_machine_id(id: &str) -> bool {
    id.len() == 32
        && id
            .bytes()
            .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Names the DNS servers where the image does not: the file is absent, has no server, dangles, or is
/// ours from an earlier call.
pub fn set_dns_servers(servers: &[IpAddr]) -> io::Result<()> {
    const MARK: &str = "# written by the sandbox";
    let path = Path::new(RESOLVER);
    let old = read_text(path);
    let has_server = old
        .lines()
        .any(|line| line.split_whitespace().next() == Some("nameserver"));
    if servers.is_empty() || (has_server && !old.starts_with(MARK)) {
        return Ok(());
    }
    let mut text = format!("{MARK}\n");
    for server in servers {
        text.push_str(&format!("nameserver {server}\n"));
    }
    if fs::symlink_metadata(path).is_ok_and(|info| info.is_symlink()) && !path.exists() {
        fs::remove_file(path)?;
    }
    write_if_changed(path, &text)
}

/// Writes a file of /etc unless it already says so: a restore should not dirty pages for nothing.
///
/// It is not emptied first: ext4 writes a file that was to the disk at once, which takes longer than all else here.
pub fn write_if_changed(path: &Path, text: &str) -> io::Result<()> {
    let old = fs::read(path).ok();
    if old.as_deref() == Some(text.as_bytes()) {
        return Ok(());
    }
    if let Some(folder) = path.parent().filter(|_| old.is_none()) {
        fs::create_dir_all(folder)?;
    }
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    file.write_all(text.as_bytes())?;
    if old.is_none_or(|old| old.len() > text.len()) {
        file.set_len(text.len() as u64)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_keep_the_images_lines_and_one_of_ours() {
        let first = hosts_text(
            "127.0.0.1\tlocalhost\n::1 localhost\n10.0.0.1 db\n",
            "box-a",
        );
        assert_eq!(first, "127.0.0.1\tlocalhost\n::1 localhost\n10.0.0.1 db\n127.0.1.1 box-a # sandbox hostname\n");
        let second = hosts_text(&first, "box-b");
        assert_eq!(second, first.replace("box-a", "box-b"));
        assert_eq!(hosts_text("", "localhost"), "127.0.0.1 localhost\n");
    }

    #[test]
    fn files_say_what_was_written_last_and_no_more() {
        let folder = std::env::temp_dir().join(format!("envd-identity-{}", std::process::id()));
        let path = folder.join("etc").join("name");
        for text in [
            "first\n",
            "second, longer\n",
            "short\n",
            "short\n",
            "",
            "again\n",
        ] {
            write_if_changed(&path, text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        write_if_changed(&path, "again\n").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), written);
        let link = folder.join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        write_if_changed(&link, "through\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "through\n");
        assert!(write_if_changed(&path.join("below a file"), "x").is_err());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn names_are_checked() {
        assert!(is_hostname("i123abc") && is_hostname("a.b-c"));
        assert!(
            !is_hostname("")
                && !is_hostname("-a")
                && !is_hostname("a b")
                && !is_hostname("a\nb")
                && !is_hostname(&"a".repeat(65))
        );
        assert!(
            is_machine_id(&"0f".repeat(16))
                && !is_machine_id("0F")
                && !is_machine_id(&"0F".repeat(16))
        );
    }
}
