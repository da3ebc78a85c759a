//! Making a user in the account files of an image, which may be missing.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::{give, make_folders, Owner};
use crate::users::read_text;

/// First number of ordinary users, as Debian has it.
const FIRST_ID: u32 = 1000;
const LAST_ID: u32 = 59_999;
/// The user that images without one get. It may become root where the image has sudo, as in the E2B service.
const STANDARD: &str = "user";
const ROOT_LINE: &str = "root:x:0:0:root:/root:/bin/sh";
const ROOT_GROUP: &str = "root:x:0:";

/// Makes the user `name` with a group of that name and a home, unless there is one.
pub fn ensure(root: &Path, name: &str) -> io::Result<()> {
    let etc = root.join("etc");
    let (passwd, group) = (
        read_text(&etc.join("passwd")),
        read_text(&etc.join("group")),
    );
    if has(&passwd, name) {
        return Ok(());
    }
    if !is_name(name) {
        return Err(io::Error::other(format!(
            "'{name}' cannot be a user's name"
        )));
    }
    let own_group = field(&group, name, 2).and_then(|text| text.parse().ok());
    let uid = free_id(&passwd, &group, own_group)?;
    let gid = own_group.unwrap_or(uid);
    make_folders(&etc, Owner { uid: 0, gid: 0 })?;
    if own_group.is_none() {
        let line = format!("{name}:x:{gid}:");
        append(&etc.join("group"), &group, ROOT_GROUP, &line, 0o644)?;
        append_if_there(&etc.join("gshadow"), &format!("{name}:!::"))?;
    }
    append_if_there(&etc.join("shadow"), &format!("{name}:!:19000:0:99999:7:::"))?;
    let shell = match is_program(&root.join("bin/bash")) {
        true => "/bin/bash",
        false => "/bin/sh",
    };
    let line = format!("{name}:x:{uid}:{gid}::/home/{name}:{shell}");
    append(&etc.join("passwd"), &passwd, ROOT_LINE, &line, 0o644)?;
    let owner = Owner { uid, gid };
    let home = root.join("home").join(name);
    make_folders(&root.join("home"), Owner { uid: 0, gid: 0 })?;
    if make_folders(&home, owner)? {
        copy_skeleton(&etc.join("skel"), &home, owner)?;
    }
    if name == STANDARD {
        allow_sudo(&etc)?;
    }
    Ok(())
}

fn is_name(name: &str) -> bool {
    let first_fits = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    first_fits && name.len() <= 64 && name.chars().all(fits)
}

fn is_program(path: &Path) -> bool {
    // A link of the image may lead to an absolute path: inside a guest that is the same root.
    fs::metadata(path).is_ok_and(|info| info.is_file() && info.permissions().mode() & 0o111 != 0)
}

fn has(text: &str, name: &str) -> bool {
    field(text, name, 0).is_some()
}

fn field<'a>(text: &'a str, name: &str, number: usize) -> Option<&'a str> {
    text.lines()
        .find(|line| line.split(':').next() == Some(name))
        .and_then(|line| line.split(':').nth(number))
}

/// A number that no user has, and no other group than the user's own.
fn free_id(passwd: &str, group: &str, own_group: Option<u32>) -> io::Result<u32> {
    let numbers = |text: &str| -> HashSet<u32> {
        text.lines()
            .filter_map(|line| line.split(':').nth(2)?.parse().ok())
            .collect()
    };
    let (users, groups) = (numbers(passwd), numbers(group));
    let is_free = |id: &u32| !users.contains(id) && (own_group.is_some() || !groups.contains(id));
    (FIRST_ID..=LAST_ID)
        .find(is_free)
        .ok_or_else(|| io::Error::other("no user number is free"))
}

/// Adds a line to a file of accounts. One that is missing begins with root's line: a list without root is none.
fn append(path: &Path, text: &str, roots: &str, line: &str, mode: u32) -> io::Result<()> {
    let is_new = fs::symlink_metadata(path).is_err();
    let mut all = text.to_owned();
    if !has(&all, "root") {
        all = format!("{roots}\n{all}");
    }
    if !all.ends_with('\n') {
        all.push('\n');
    }
    fs::write(path, format!("{all}{line}\n"))?;
    match is_new {
        true => fs::set_permissions(path, fs::Permissions::from_mode(mode)),
        false => Ok(()),
    }
}

fn append_if_there(path: &Path, line: &str) -> io::Result<()> {
    if !path.is_file() {
        return Ok(());
    }
    let mut all = read_text(path);
    if !all.is_empty() && !all.ends_with('\n') {
        all.push('\n');
    }
    fs::write(path, format!("{all}{line}\n"))
}

fn copy_skeleton(skeleton: &Path, home: &Path, owner: Owner) -> io::Result<()> {
    for entry in fs::read_dir(skeleton).into_iter().flatten().flatten() {
        let (from, to) = (entry.path(), home.join(entry.file_name()));
        // Only plain files: what distributions have there.
        if entry.file_type()?.is_file() && fs::symlink_metadata(&to).is_err() {
            fs::copy(&from, &to)?;
            give(&to, owner)?;
        }
    }
    Ok(())
}

fn allow_sudo(etc: &Path) -> io::Result<()> {
    let folder = etc.join("sudoers.d");
    if !folder.is_dir() {
        return Ok(());
    }
    let path = folder.join(STANDARD);
    fs::write(&path, format!("{STANDARD} ALL=(ALL) NOPASSWD:ALL\n"))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o440))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::users::Accounts;

    struct Root(std::path::PathBuf);

    impl Root {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("envd-accounts-{}-{name}", std::process::id()));
            let _absent = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.0.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn text(&self, name: &str) -> String {
            read_text(&self.0.join(name))
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _gone = fs::remove_dir_all(&self.0);
        }
    }

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    #[test]
    fn an_image_without_accounts_gets_root_and_the_user() {
        assert!(is_root(), "these tests make files of other owners");
        let root = Root::new("empty");
        ensure(&root.0, "user").unwrap();
        assert_eq!(
            root.text("etc/passwd"),
            "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
        );
        assert_eq!(root.text("etc/group"), "root:x:0:\nuser:x:1000:\n");
        assert!(root.0.join("home/user").is_dir() && !root.0.join("etc/shadow").exists());
        let before = root.text("etc/passwd");
        ensure(&root.0, "user").unwrap();
        assert_eq!(
            root.text("etc/passwd"),
            before,
            "a second call changes nothing"
        );
    }

    #[test]
    fn numbers_that_are_taken_are_left_to_their_owners() {
        let root = Root::new("taken");
        root.write(
            "etc/passwd",
            "root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh",
        );
        root.write(
            "etc/group",
            "root:x:0:\nnode:x:1000:\nother:x:1001:\napp:x:77:\n",
        );
        root.write("etc/shadow", "root:*:::::::\n");
        root.write("etc/skel/.profile", "hello\n");
        root.write("etc/sudoers.d/README", "");
        root.write("bin/bash", "");
        fs::set_permissions(root.0.join("bin/bash"), fs::Permissions::from_mode(0o755)).unwrap();
        ensure(&root.0, "user").unwrap();
        ensure(&root.0, "app").unwrap();
        let (passwd, group) = (root.text("etc/passwd"), root.text("etc/group"));
        assert!(
            passwd.contains("\nuser:x:1002:1002::/home/user:/bin/bash\n"),
            "{passwd}"
        );
        assert!(
            passwd.contains("\napp:x:1001:77::/home/app:/bin/bash\n"),
            "{passwd}"
        );
        assert!(
            passwd.contains("/home/node:/bin/sh\nuser"),
            "no line is torn"
        );
        assert_eq!(group.matches("app:").count(), 1);
        assert_eq!(root.text("etc/shadow").lines().count(), 3);
        assert_eq!(root.text("home/user/.profile"), "hello\n");
        assert!(root.text("etc/sudoers.d/user").starts_with("user ALL"));
        assert!(!root.0.join("etc/sudoers.d/app").exists());
    }

    #[test]
    fn names_that_would_break_the_files_are_refused() {
        let root = Root::new("names");
        for name in ["", "a:b", "a\nb", "-a", "0a", "ä", &"x".repeat(65)] {
            assert!(ensure(&root.0, name).is_err(), "{name:?}");
        }
        assert!(!root.0.join("etc/passwd").exists());
        let mut noise = crate::fuzz::Noise::new(3);
        for _ in 0..300 {
            root.write(
                "etc/passwd",
                &noise.text(&["root:x:0:0:::\nuser:x:1000:1::\n"]),
            );
            root.write("etc/group", &noise.text(&["root:x:0:\nuser:x:1000:\n"]));
            if ensure(&root.0, "someone").is_ok() {
                assert!(has(&root.text("etc/passwd"), "someone"));
            }
        }
        let _parsed = Accounts::load();
    }
}
