"""What a sandbox may reach, and how it is reached: its network settings as the contract has them (section 2.6). Pure.

None means that the caller said nothing; an empty list says "none". `addresses` and `unenforced` split the settings into
what the node's packet filter enforces and what is kept and shown only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

EVERYWHERE = "0.0.0.0/0"
DEFAULT_DNS_SERVERS = ("8.8.8.8",)  # reachable when domains are allowed, unless `dns_servers` names others


@dataclass(frozen=True, slots=True)
class ProxyTls:
    """TLS on the way to an egress proxy."""

    enabled: bool
    server_name: str | None = None
    ca_cert: str | None = None


@dataclass(frozen=True, slots=True)
class EgressProxy:
    """A SOCKS5 proxy for outgoing TCP; `address` is host:port."""

    address: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ProxyTls | None = None


@dataclass(frozen=True, slots=True)
class HeaderRule:
    """Headers to set on matching outgoing requests; None when the rule transforms nothing."""

    headers: dict[str, str] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """The `network` of a sandbox. The first part can be replaced while it runs, the second is for its whole life."""

    allow_out: tuple[str, ...] | None = None
    deny_out: tuple[str, ...] | None = None
    dns_servers: tuple[str, ...] | None = None
    egress_proxy: EgressProxy | None = None
    rules: dict[str, tuple[HeaderRule, ...]] | None = None

    mask_request_host: str | None = None
    https_ports: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Egress:
    """IPv4 ranges for the packet filter: what is allowed goes out, else what is denied does not, else all does."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


OPEN = Egress()


def is_address(entry: str) -> bool:
    """Whether an entry of a list is an IP address or a range of them; a domain otherwise."""
    try:
        ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
    return True


def addresses(settings: NetworkSettings, allow_internet_access: bool | None) -> Egress:
    """What the packet filter enforces. Guests have no IPv6, so its ranges need no rule; domains in `allow_out` are not resolved."""
    allow = list(_ipv4(settings.allow_out))
    if any(not is_address(entry) for entry in settings.allow_out or ()):
        allow += _ipv4(DEFAULT_DNS_SERVERS if settings.dns_servers is None else settings.dns_servers)
    deny = list(_ipv4(settings.deny_out))
    if allow_internet_access is False:
        deny.append(EVERYWHERE)
    return Egress(tuple(allow), tuple(deny))


def _ipv4(entries: Iterable[str] | None) -> Iterable[str]:
    networks = (ipaddress.ip_network(entry, strict=False) for entry in entries or () if is_address(entry))
    return [str(network) for network in networks if network.version == 4]


def unenforced(settings: NetworkSettings) -> list[str]:
    """What this node keeps and shows but does not enforce, a sentence each."""
    found = []
    if domains := [entry for entry in settings.allow_out or () if not is_address(entry)]:
        names = ", ".join(domains[:5]) + (", ..." if len(domains) > 5 else "")
        found.append(f"network.allowOut: this node does not filter by domain; {names} stay blocked where denyOut covers them")
    if settings.egress_proxy is not None:
        found.append("network.egressProxy: this node does not tunnel; traffic goes out directly")
    if settings.rules:
        found.append("network.rules: this node does not transform requests; they go out as they are")
    if settings.https_ports:
        found.append("network.httpsPorts: this node reaches every port of a sandbox by plain TCP")
    return found
