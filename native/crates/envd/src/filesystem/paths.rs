//! How a path of a request is read (contract section 3.2).

use std::path::{Component, Path, PathBuf};

use crate::connect::{Code, ConnectError};
use crate::limits::PATH_MAX_BYTES;
use crate::users::User;

/// Absolute path for `path`: empty means the default folder, `~` the home, and a relative path starts
/// at the home, not at the default folder. `.` and `..` are resolved by text.
pub fn resolve(path: &str, user: &User, workdir: Option<&Path>) -> Result<PathBuf, ConnectError> {
    if path.contains('\0') {
        return Err(ConnectError::new(
            Code::InvalidArgument,
            "the path holds a NUL byte",
        ));
    }
    if path.len() > PATH_MAX_BYTES {
        return Err(ConnectError::new(
            Code::InvalidArgument,
            format_args!("the path is longer than {PATH_MAX_BYTES} bytes"),
        ));
    }
    let joined = if path.is_empty() {
        workdir.map_or_else(|| user.home.clone(), |folder| user.home.join(folder))
    } else if path == "~" {
        user.home.clone()
    } else if let Some(rest) = path.strip_prefix("~/") {
        user.home.join(rest.trim_start_matches('/'))
    } else if path.starts_with('~') {
        let hint = "only ~ and ~/ of the own user are expanded; use an absolute path, or ./ before a name that starts with ~";
        return Err(ConnectError::new(
            Code::InvalidArgument,
            format_args!("cannot expand '{path}': {hint}"),
        ));
    } else {
        user.home.join(path)
    };
    Ok(clean(&Path::new("/").join(joined)))
}

/// Removes `.`, `..` and doubled slashes by text.
pub fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => out.push(name),
            Component::ParentDir => {
                out.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_the_contract() {
        let user = User {
            name: "u".into(),
            uid: 1,
            gid: 1,
            groups: vec![1],
            home: "/home/u".into(),
        };
        let resolve = |path: &str| {
            resolve(path, &user, Some(Path::new("/work"))).map(|path| path.display().to_string())
        };
        for (given, expected) in [
            ("", "/work"),
            ("~", "/home/u"),
            ("~/a", "/home/u/a"),
            ("a/b", "/home/u/a/b"),
            ("./~x", "/home/u/~x"),
            ("/a//b/../c/.", "/a/c"),
            ("/../..", "/"),
            ("-rf", "/home/u/-rf"),
            ("%2e%2e", "/home/u/%2e%2e"),
        ] {
            assert_eq!(resolve(given).unwrap(), expected, "{given}");
        }
        assert_eq!(resolve("~other/x").unwrap_err().code, Code::InvalidArgument);
        assert_eq!(resolve("a\0b").unwrap_err().code, Code::InvalidArgument);
        assert!(resolve(&"x".repeat(5000)).is_err());
    }
}
