//! Users and groups of the image, read from /etc/passwd and /etc/group.
//!
//! The binary is static, so there is no name service; an image without these files has `root` only.
//! Invariant: files are read at each look-up, so a user made by a command exists for the next one.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::limits::CONFIG_FILE_MAX_BYTES;

/// One user with all it takes to act as them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Supplementary groups, the primary one included.
    pub groups: Vec<u32>,
    /// Home folder; it need not exist.
    pub home: PathBuf,
}

/// Parsed account files.
pub struct Accounts {
    users: Vec<User>,
    groups: Vec<(String, u32, Vec<String>)>,
}

impl Accounts {
    /// Reads the account files of the running system.
    pub fn load() -> Self {
        Self::parse(
            &read_text(Path::new("/etc/passwd")),
            &read_text(Path::new("/etc/group")),
        )
    }

    fn parse(passwd: &str, group: &str) -> Self {
        let groups: Vec<_> = group
            .lines()
            .filter_map(|line| {
                let mut fields = line.split(':');
                let name = fields.next().filter(|name| !name.is_empty())?;
                let gid = fields.nth(1)?.parse().ok()?;
                let members = fields
                    .next()
                    .unwrap_or("")
                    .split(',')
                    .filter(|member| !member.is_empty());
                Some((
                    name.to_owned(),
                    gid,
                    members.map(str::to_owned).collect::<Vec<_>>(),
                ))
            })
            .collect();
        let users = passwd
            .lines()
            .filter_map(|line| {
                let mut fields = line.split(':');
                let name = fields.next().filter(|name| !name.is_empty())?.to_owned();
                let uid = fields.nth(1)?.parse().ok()?;
                let gid = fields.next()?.parse().ok()?;
                let home = fields
                    .nth(1)
                    .filter(|home| !home.is_empty())
                    .unwrap_or("/")
                    .into();
                let mut own = vec![gid];
                own.extend(
                    groups
                        .iter()
                        .filter(|(_, id, members)| *id != gid && members.contains(&name))
                        .map(|(_, id, _)| *id),
                );
                Some(User {
                    name,
                    uid,
                    gid,
                    groups: own,
                    home,
                })
            })
            .collect();
        Self { users, groups }
    }

    /// Finds a user by name or number, alone or with a group (`name:group`), as image configurations
    /// write it and as container runtimes read it: a group that is named is the only one, and a number
    /// without an entry is of group 0.
    pub fn user(&self, name: &str) -> Option<User> {
        let Some((name, group)) = name.split_once(':') else {
            return self.plain_user(name);
        };
        let by_name = self.groups.iter().find(|(known, _, _)| known == group);
        let gid = match by_name {
            Some((_, gid, _)) => *gid,
            None if group == "root" => 0,
            None => group.parse().ok()?,
        };
        let mut user = self.plain_user(name)?;
        user.gid = gid;
        user.groups = vec![gid];
        Some(user)
    }

    fn plain_user(&self, name: &str) -> Option<User> {
        if let Some(user) = self.users.iter().find(|user| user.name == name) {
            return Some(user.clone());
        }
        if name == "root" {
            let home = Path::new("/root");
            return Some(User {
                name: "root".into(),
                uid: 0,
                gid: 0,
                groups: vec![0],
                home: if home.is_dir() { home } else { Path::new("/") }.into(),
            });
        }
        let uid: u32 = name.parse().ok()?;
        let known = self.users.iter().find(|user| user.uid == uid).cloned();
        // A number without an entry is a legal identity in container images.
        known.or_else(|| {
            Some(User {
                name: name.to_owned(),
                uid,
                gid: 0,
                groups: vec![0],
                home: "/".into(),
            })
        })
    }

    /// Finds who is to own files, as `COPY --chown` reads it: a number without a group or an entry is its own group.
    pub fn owner(&self, name: &str) -> Option<User> {
        let mut user = self.user(name)?;
        if !name.contains(':') && !self.users.iter().any(|known| known.uid == user.uid) {
            user.gid = user.uid;
        }
        Some(user)
    }

    /// Names by id for directory entries.
    pub fn names(&self) -> Names {
        let mut names = Names {
            users: HashMap::new(),
            groups: HashMap::new(),
        };
        for user in &self.users {
            names
                .users
                .entry(user.uid)
                .or_insert_with(|| user.name.clone());
        }
        for (name, gid, _) in &self.groups {
            names.groups.entry(*gid).or_insert_with(|| name.clone());
        }
        names
    }
}

/// Id to name tables; an id without a name prints as its number.
pub struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    /// Name of a user id.
    pub fn user(&self, uid: u32) -> String {
        self.users.get(&uid).cloned().unwrap_or_else(|| {
            if uid == 0 {
                "root".into()
            } else {
                uid.to_string()
            }
        })
    }

    /// Name of a group id.
    pub fn group(&self, gid: u32) -> String {
        self.groups.get(&gid).cloned().unwrap_or_else(|| {
            if gid == 0 {
                "root".into()
            } else {
                gid.to_string()
            }
        })
    }
}

/// Text of a small system file; empty when it cannot be read or is absurdly large.
pub fn read_text(path: &Path) -> String {
    match std::fs::metadata(path) {
        Ok(info) if info.is_file() && info.len() <= CONFIG_FILE_MAX_BYTES => {}
        _ => return String::new(),
    }
    std::fs::read(path)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\napp:x:12345:100::/srv/app:/bin/sh\nbroken line\nnohome:x:7:7:::\n";
    const GROUP: &str = "root:x:0:\nusers:x:100:app\ndocker:x:999:other,app\nvideo:x:44:app\nbad\n";

    #[test]
    fn groups_and_home_come_from_the_files() {
        let accounts = Accounts::parse(PASSWD, GROUP);
        let app = accounts.user("app").unwrap();
        assert_eq!(
            (app.uid, app.gid, app.groups),
            (12345, 100, vec![100, 999, 44])
        );
        assert_eq!(app.home, PathBuf::from("/srv/app"));
        assert_eq!(accounts.user("12345").unwrap().name, "app");
        assert_eq!(accounts.user("4242").unwrap().home, PathBuf::from("/"));
        assert_eq!(accounts.user("nohome").unwrap().home, PathBuf::from("/"));
        assert!(accounts.user("nobody-here").is_none());
        let grouped = |name: &str| accounts.user(name).map(|user| (user.gid, user.groups));
        assert_eq!(grouped("app:video"), Some((44, vec![44])));
        assert_eq!(grouped("app:7"), Some((7, vec![7])));
        assert_eq!(grouped("4242:root"), Some((0, vec![0])));
        assert_eq!(grouped("4242"), Some((0, vec![0])));
        assert_eq!(grouped("4242:4242"), Some((4242, vec![4242])));
        let owning = |name: &str| accounts.owner(name).map(|user| (user.uid, user.gid));
        assert_eq!(owning("4242"), Some((4242, 4242)));
        assert_eq!(owning("4242:7"), Some((4242, 7)));
        assert_eq!(owning("app"), Some((12345, 100)));
        assert_eq!(grouped("app:none"), None);
        assert_eq!(grouped("none:7"), None);
        assert_eq!(accounts.names().group(999), "docker");
        assert_eq!(accounts.names().user(5), "5");
    }

    #[test]
    fn root_exists_in_an_empty_image() {
        let accounts = Accounts::parse("", "");
        let home = match Path::new("/root").is_dir() {
            true => "/root",
            false => "/",
        };
        assert_eq!(accounts.user("root").unwrap().home, PathBuf::from(home));
        assert!(accounts.user("user").is_none());
        assert_eq!(accounts.names().user(0), "root");
    }

    #[test]
    fn noise_in_the_account_files_makes_users_or_none() {
        let mut noise = crate::fuzz::Noise::new(13);
        for _ in 0..5_000 {
            let accounts = Accounts::parse(&noise.text(&[PASSWD]), &noise.text(&[GROUP]));
            for name in ["app", "root", "app:video", "7:7", ":", "-1", "4294967296"] {
                if let Some(user) = accounts.user(name) {
                    assert_eq!(user.groups[0], user.gid);
                }
            }
        }
    }
}
