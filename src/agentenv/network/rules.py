"""nftables rule sets, as text for one atomic `nft -f -` transaction each. Pure.

In a slot's namespace: the guest may open connections outwards except to the node's denied ranges and by its own policy
(allow beats deny), and to the volume server that runs in the namespace itself when the sandbox mounts volumes; nothing
reaches the guest but answers and what the proxy opens from inside the namespace. Every packet of the guest meets the policy,
not only the first of a connection: a new policy holds for open ones, too. On the host: a guest's traffic is never taken in by
the host itself (its own services), is never forwarded to denied ranges, and leaves masqueraded.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from agentenv.core.errors import InvalidInput
from agentenv.core.network import Egress
from agentenv.network.layout import GATEWAY_IP, GUEST_IP, TAP, UPLINK, VOLUME_PORT, Layout


def namespace_rules(denied_cidrs: Sequence[str], egress: Egress) -> str:
    """Rules inside a slot, replacing those it had; its rates have a table of their own."""
    return f"""
table ip slot {{}}
delete table ip slot
table ip slot {{
  {_set("denied_cidrs", denied_cidrs)}
  {_set("allow_out", egress.allow)}
  {_set("deny_out", egress.deny)}
  chain input {{
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established,related accept
    iifname {TAP} ip saddr {GUEST_IP} ip daddr {GATEWAY_IP} tcp dport {VOLUME_PORT} accept
  }}
  chain forward {{
    type filter hook forward priority 0; policy drop;
    iifname {TAP} ip saddr != {GUEST_IP} drop
    iifname {TAP} ip daddr @denied_cidrs drop
    iifname {TAP} oifname {UPLINK} goto egress
    ct state established,related accept
  }}
  chain egress {{
    ip daddr @allow_out accept
    ip daddr @deny_out drop
    accept
  }}
  chain postrouting {{
    type nat hook postrouting priority 100;
    oifname {UPLINK} masquerade
  }}
}}
"""


def host_rules(layout: Layout, denied_cidrs: Sequence[str]) -> str:
    """Rules on the host for all slots of one node, whatever their number."""
    veths = f'"{layout.veth_prefix}*"'
    return f"""
table ip {layout.table} {{}}
delete table ip {layout.table}
table ip {layout.table} {{
  {_set("denied_cidrs", denied_cidrs)}
  chain input {{
    type filter hook input priority -10; policy accept;
    iifname {veths} ct state established,related accept
    iifname {veths} drop
  }}
  chain forward {{
    type filter hook forward priority -10; policy accept;
    iifname {veths} oifname {veths} drop
    iifname {veths} ip daddr @denied_cidrs drop
    iifname {veths} accept
    oifname {veths} ct state established,related accept
    oifname {veths} drop
  }}
  chain postrouting {{
    type nat hook postrouting priority 100;
    ip saddr {layout.network} oifname != {veths} masquerade
  }}
}}
"""


def _set(name: str, cidrs: Sequence[str]) -> str:
    """Ranges may overlap; there may be none."""
    try:
        networks = [str(ipaddress.IPv4Network(cidr, strict=False)) for cidr in cidrs]
    except ValueError as error:
        raise InvalidInput(f"network.{name}: {error}", "give IPv4 ranges such as 10.0.0.0/8") from error
    elements = f"elements = {{ {', '.join(networks)} }}" if networks else ""
    return f"set {name} {{ type ipv4_addr; flags interval; auto-merge; {elements} }}"


def remove_host_rules(layout: Layout) -> str:
    """Undo `host_rules`; no error when they are not there."""
    return f"table ip {layout.table} {{}}\ndelete table ip {layout.table}\n"
