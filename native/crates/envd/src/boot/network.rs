//! Interfaces lo and eth0, by ioctl: one address, one route, one neighbour.

use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::settings::BootSettings;
use super::{BootError, Step};
use crate::sys;

const INTERFACE: &str = "eth0";

/// Brings the interfaces up.
pub fn configure(settings: &BootSettings) -> Result<(), BootError> {
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .step("open a socket")?;
    let socket = socket.as_fd();
    sys::set_interface_up(socket, "lo").step("bring lo up")?;
    let Some((address, prefix)) = settings.address else {
        return Ok(());
    };
    // Egress policy speaks IPv4; no router answers IPv6 here, so programs should not try it first.
    let switch = Path::new("/proc/sys/net/ipv6/conf")
        .join(INTERFACE)
        .join("disable_ipv6");
    if switch.exists() {
        std::fs::write(&switch, "1").step("switch IPv6 off")?;
    }
    sys::set_interface_address(socket, INTERFACE, address, netmask(prefix))
        .step(format!("set the address of {INTERFACE}"))?;
    sys::set_interface_up(socket, INTERFACE).step(format!("bring {INTERFACE} up"))?;
    if let Some(gateway) = settings.gateway {
        sys::add_default_route(socket, gateway).step("add the default route")?;
        if let Some(mac) = settings.gateway_mac {
            sys::add_neighbour(socket, INTERFACE, gateway, mac)
                .step("record the gateway's hardware address")?;
        }
    }
    Ok(())
}

fn netmask(prefix: u8) -> Ipv4Addr {
    let bits = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
    Ipv4Addr::from(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netmasks() {
        assert_eq!(netmask(30), Ipv4Addr::new(255, 255, 255, 252));
        assert_eq!(netmask(32), Ipv4Addr::new(255, 255, 255, 255));
        assert_eq!(netmask(0), Ipv4Addr::new(0, 0, 0, 0));
    }
}
