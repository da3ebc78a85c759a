//! Command line of the ordinary-process mode.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::app::InternalAccess;
use crate::limits::DEFAULT_PORT;

/// Text of `--help`.
pub const USAGE: &str = "\
envd: guest agent of a sandbox.

As PID 1 it takes its settings from the kernel command line. Otherwise:

  envd --no-init [options]

  --port N                  port to serve (49983; 0 picks one and prints it)
  --bind ADDR               address to serve (127.0.0.1)
  --default-user NAME       user of requests that name none (user)
  --allow-init-from ADDR    peer that may call /init, or 'any' (nobody)
  --cgroup DIR              cgroup2 folder for one group per process (none)
";

/// Settings of the ordinary-process mode.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    /// Port to serve.
    pub port: u16,
    /// Address to serve.
    pub bind: IpAddr,
    /// Default user.
    pub default_user: String,
    /// Who may call `/init`.
    pub internal: InternalAccess,
    /// Parent of the per-process cgroups.
    pub cgroup: Option<PathBuf>,
}

/// Why the command line was refused; empty for `--help`.
pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        port: DEFAULT_PORT,
        bind: IpAddr::from([127, 0, 0, 1]),
        default_user: "user".into(),
        internal: InternalAccess::Nobody,
        cgroup: None,
    };
    let mut arguments = arguments;
    let mut ordinary = false;
    while let Some(name) = arguments.next() {
        if name == "--no-init" {
            ordinary = true;
            continue;
        }
        if matches!(name.as_str(), "--help" | "-h") {
            return Err(String::new());
        }
        let value = arguments
            .next()
            .ok_or_else(|| format!("{name} needs a value, or is not an option"))?;
        let invalid = || format!("{name}: '{value}' is not valid");
        match name.as_str() {
            "--port" => options.port = value.parse().map_err(|_| invalid())?,
            "--bind" => options.bind = value.parse().map_err(|_| invalid())?,
            "--default-user" => options.default_user = value,
            "--allow-init-from" if value == "any" => options.internal = InternalAccess::Any,
            "--allow-init-from" => {
                options.internal = InternalAccess::Peer(value.parse().map_err(|_| invalid())?)
            }
            "--cgroup" => options.cgroup = Some(value.into()),
            _ => return Err(format!("{name} is not an option")),
        }
    }
    if !ordinary {
        return Err("this is not PID 1; give --no-init to run as an ordinary process".into());
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Options, String> {
        parse(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn options_and_mistakes() {
        let options =
            parsed("--no-init --port 7 --bind 0.0.0.0 --default-user root --allow-init-from any")
                .unwrap();
        assert_eq!(
            (
                options.port,
                options.internal,
                options.default_user.as_str()
            ),
            (7, InternalAccess::Any, "root")
        );
        assert!(parsed("--port 7").unwrap_err().contains("--no-init"));
        assert!(parsed("--no-init --port x").unwrap_err().contains("'x'"));
        assert!(parsed("--no-init --port")
            .unwrap_err()
            .contains("needs a value"));
        assert!(parsed("--no-init --typo 1").unwrap_err().contains("--typo"));
        assert_eq!(parsed("--help").unwrap_err(), "");
    }
}
