//! The kernel command line (`aenv.*` words) of a guest.
//!
//! | word | meaning | default |
//! |---|---|---|
//! | `aenv.root=/dev/vda` | root device | required |
//! | `aenv.rootfs=ext4` | its file system | ext4 |
//! | `aenv.ip=169.254.0.21/30` | address of eth0 | no network |
//! | `aenv.gateway=169.254.0.22` | default gateway; the only peer allowed to call `/init` | none |
//! | `aenv.gateway_mac=02:00:00:00:00:02` | its hardware address, recorded for good | found by ARP |
//! | `aenv.hostname=sandbox` | hostname until `/init` | sandbox |
//! | `aenv.port=49983` | port of the agent | 49983 |
//! | `aenv.user=user` | default user until `/init` | user |
//! | `aenv.exit=poweroff` | how the machine ends: `poweroff` or `reboot` (Firecracker) | poweroff |
//!
//! Words of others are ignored; an unknown or malformed `aenv.` word is an error.

use std::net::Ipv4Addr;

use super::BootError;
use crate::limits::DEFAULT_PORT;

/// How the machine is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitAction {
    /// Power off.
    PowerOff,
    /// Restart, which some VMMs take as the end.
    Reboot,
}

/// Settings of a boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootSettings {
    /// Root device.
    pub root: String,
    /// File system of the root device.
    pub rootfs: String,
    /// Address and prefix length of eth0.
    pub address: Option<(Ipv4Addr, u8)>,
    /// Default gateway.
    pub gateway: Option<Ipv4Addr>,
    /// Hardware address of the gateway.
    pub gateway_mac: Option<[u8; 6]>,
    /// Hostname.
    pub hostname: String,
    /// Port to serve.
    pub port: u16,
    /// Default user.
    pub user: String,
    /// End of the machine.
    pub exit: ExitAction,
}

impl ExitAction {
    /// The action a command line asks for, whatever else is wrong with it: for the end of a failed boot.
    pub fn of(text: &str) -> Self {
        match text
            .split_whitespace()
            .any(|word| word == "aenv.exit=reboot")
        {
            true => ExitAction::Reboot,
            false => ExitAction::PowerOff,
        }
    }
}

impl BootSettings {
    /// Reads a command line.
    pub fn parse(text: &str) -> Result<Self, BootError> {
        let mut settings = Self {
            root: String::new(),
            rootfs: "ext4".into(),
            address: None,
            gateway: None,
            gateway_mac: None,
            hostname: "sandbox".into(),
            port: DEFAULT_PORT,
            user: "user".into(),
            exit: ExitAction::PowerOff,
        };
        for word in text.split_whitespace() {
            let Some((name, value)) = word
                .strip_prefix("aenv.")
                .and_then(|word| word.split_once('='))
            else {
                continue;
            };
            let invalid = || {
                BootError::new(
                    "read the kernel command line",
                    format!("'{word}' is not understood"),
                )
            };
            match name {
                "root" => settings.root = value.into(),
                "rootfs" => settings.rootfs = value.into(),
                "ip" => settings.address = Some(parse_address(value).ok_or_else(invalid)?),
                "gateway" => settings.gateway = Some(value.parse().map_err(|_| invalid())?),
                "gateway_mac" => settings.gateway_mac = Some(parse_mac(value).ok_or_else(invalid)?),
                "hostname" if crate::identity::is_hostname(value) => {
                    settings.hostname = value.into()
                }
                "port" => settings.port = value.parse().map_err(|_| invalid())?,
                "user" if !value.is_empty() => settings.user = value.into(),
                "exit" if value == "poweroff" => settings.exit = ExitAction::PowerOff,
                "exit" if value == "reboot" => settings.exit = ExitAction::Reboot,
                _ => return Err(invalid()),
            }
        }
        if settings.root.is_empty() {
            return Err(BootError::new(
                "read the kernel command line",
                "aenv.root=DEVICE is missing",
            ));
        }
        Ok(settings)
    }
}

fn parse_address(text: &str) -> Option<(Ipv4Addr, u8)> {
    let (address, prefix) = text.split_once('/')?;
    let prefix: u8 = prefix.parse().ok()?;
    (prefix <= 32).then_some((address.parse().ok()?, prefix))
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(parts.next().filter(|part| part.len() == 2)?, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_command_line() {
        let text = "console=ttyS0 root=/dev/x aenv.root=/dev/vda aenv.ip=169.254.0.21/30 aenv.gateway=169.254.0.22 aenv.gateway_mac=02:00:00:00:00:02 aenv.hostname=box aenv.exit=reboot quiet\n";
        let settings = BootSettings::parse(text).unwrap();
        assert_eq!(settings.address, Some((Ipv4Addr::new(169, 254, 0, 21), 30)));
        assert_eq!(settings.gateway_mac, Some([2, 0, 0, 0, 0, 2]));
        assert_eq!(
            (
                settings.root.as_str(),
                settings.rootfs.as_str(),
                settings.port
            ),
            ("/dev/vda", "ext4", 49983)
        );
        assert_eq!(settings.exit, ExitAction::Reboot);
    }

    #[test]
    fn mistakes_are_named() {
        assert!(BootSettings::parse("quiet")
            .unwrap_err()
            .to_string()
            .contains("aenv.root"));
        assert_eq!(
            ExitAction::of("x aenv.ip=bad aenv.exit=reboot\n"),
            ExitAction::Reboot
        );
        assert_eq!(ExitAction::of(""), ExitAction::PowerOff);
        for bad in [
            "aenv.ip=1.2.3.4",
            "aenv.ip=1.2.3.4/33",
            "aenv.gateway_mac=2:0:0:0:0:0",
            "aenv.hostname=a_b",
            "aenv.exit=never",
            "aenv.typo=1",
        ] {
            let error = BootSettings::parse(&format!("aenv.root=/dev/vda {bad}"))
                .unwrap_err()
                .to_string();
            assert!(error.contains(bad), "{error}");
        }
    }
}
