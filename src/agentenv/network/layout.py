"""Names and addresses of a network slot. Pure.

Every guest has the same address and MAC inside its own namespace, so one snapshot fits every slot:

    guest eth0 169.254.0.21/30 <-> tap0 169.254.0.22/30 [namespace] eth0 <veth> host

The link to the host takes two addresses of the node's pool: even in the namespace, odd on the host.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from agentenv.core.errors import InvalidInput

GUEST_IP = "169.254.0.21"
GUEST_MAC = "02:00:00:00:00:01"
GATEWAY_IP = "169.254.0.22"
GATEWAY_MAC = "02:00:00:00:00:02"
GUEST_PREFIX = 30
VOLUME_PORT = 2049  # of the gateway, where the volumes a sandbox mounts are served; else nothing listens there
TAP = "tap0"
UPLINK = "eth0"
_LARGEST_POOL = 8  # with more slots than this, names of links would exceed the kernel's 15 characters
_SMALLEST_POOL = 30
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Slot:
    """One network slot: `namespace` and `veth` (on the host) are unique on the machine, addresses within the node."""

    number: int
    namespace: str
    veth: str
    inner_ip: str
    host_ip: str


def boot_settings() -> str:
    """What a guest that boots is told of its network on the kernel's command line (read by envd)."""
    return f"aenv.ip={GUEST_IP}/{GUEST_PREFIX} aenv.gateway={GATEWAY_IP} aenv.gateway_mac={GATEWAY_MAC}"


class Layout:
    """Slots of one node. `tag` (4 hex digits) keeps several nodes on one machine apart."""

    def __init__(self, pool_cidr: str, tag: str) -> None:
        try:
            self.network = ipaddress.IPv4Network(pool_cidr)
        except ValueError as error:
            raise InvalidInput(f"network.pool_cidr {pool_cidr!r} is not an IPv4 network: {error}", "for example 10.119.0.0/16") from error
        if not _LARGEST_POOL <= self.network.prefixlen <= _SMALLEST_POOL:
            raise InvalidInput(
                f"network.pool_cidr {pool_cidr!r} is not between /{_LARGEST_POOL} and /{_SMALLEST_POOL}", "for example 10.119.0.0/16"
            )
        self.tag = tag
        self.count = self.network.num_addresses // 2
        self.namespace_prefix = f"aenv-{tag}-"
        self.veth_prefix = f"av{tag}-"
        self.table = f"aenv_{tag}"

    def slot(self, number: int) -> Slot:
        """Slot `number`, from 0 to `count` - 1."""
        if not 0 <= number < self.count:
            raise InvalidInput(f"slot {number} is outside 0..{self.count - 1}")
        inner = self.network.network_address + 2 * number
        return Slot(number, *self.names(number), str(inner), str(inner + 1))

    def names(self, number: int) -> tuple[str, str]:
        """Namespace and veth of a slot number, also of one that a former, larger pool had."""
        return f"{self.namespace_prefix}{number}", f"{self.veth_prefix}{number}"

    def number_of(self, namespace: str) -> int | None:
        """The slot number of a namespace name of this node, or None. It may be one of a former, larger pool."""
        suffix = namespace.removeprefix(self.namespace_prefix)
        return int(suffix) if suffix != namespace and _NUMBER.fullmatch(suffix) else None
