"""Names and addresses of a network slot. Pure.

Every guest has the same address and MAC inside its own namespace, so one snapshot fits every slot:

    guest eth0 169.254.0.21/30 <-> tap0 169.254.0.22/30 [namespace] eth0 <veth> host

The link to the host takes two addresses of the node's pool: even in the namespace, odd on the host.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from agentenv.core.errors import InvalidInput

GUEST_IP = "169.254.0.21"
GUEST_MAC = "02:00:00:00:00:01"
GATEWAY_IP = "169.254.0.22"
GATEWAY_MAC = "02:00:00:00:00:02"
GUEST_PREFIX = 30
TAP = "tap0"
UPLINK = "eth0"


@dataclass(frozen=True, slots=True)
class Slot:
    """One network slot: `namespace` and `veth` (on the host) are unique on the machine, addresses within the node."""

    number: int
    namespace: str
    veth: str
    inner_ip: str
    host_ip: str


class Layout:
    """Slots of one node. `tag` (4 hex digits) keeps several nodes on one machine apart."""

    def __init__(self, pool_cidr: str, tag: str) -> None:
        try:
            self.network = ipaddress.IPv4Network(pool_cidr)
        except ValueError as error:
            raise InvalidInput(f"network.pool_cidr {pool_cidr!r} is not an IPv4 network: {error}", "for example 10.119.0.0/16") from error
        if self.network.prefixlen > 30:
            raise InvalidInput(f"network.pool_cidr {pool_cidr!r} holds no slot", "choose a /30 or larger")
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
        return Slot(number, f"{self.namespace_prefix}{number}", f"{self.veth_prefix}{number}", str(inner), str(inner + 1))

    def number_of(self, namespace: str) -> int | None:
        """The slot number of a namespace name of this node, or None."""
        suffix = namespace.removeprefix(self.namespace_prefix)
        return int(suffix) if suffix != namespace and suffix.isdigit() else None
