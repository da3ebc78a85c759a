"""How fast a guest may send and receive, whoever it talks to: the world, or those who call it through the proxy.

Towards the guest a token bucket on its tap makes packets wait. What it sends arrives at the tap from outside, where the kernel can only
drop: a rule of the packet filter does, and its TCP slows down.
"""

from __future__ import annotations

from agentenv.host import process
from agentenv.network.layout import TAP

_COMMAND_DEADLINE_S = 20.0
_BURST_S = 0.1  # let through at once
_LEAST_BURST_BYTES = 64 << 10  # as large as a segment that the kernel has not cut yet
_LATENCY_MS = 200  # what would wait longer is dropped, which is how senders learn to slow down


def limit(namespace: str, bytes_per_s: int) -> None:
    """Limit both directions of the slot with this namespace. Blocks for milliseconds. Idempotent."""
    process.run(["tc", "-n", namespace, "-batch", "-"], _COMMAND_DEADLINE_S, to_guest(bytes_per_s))
    process.run(["ip", "netns", "exec", namespace, "nft", "-f", "-"], _COMMAND_DEADLINE_S, from_guest(bytes_per_s))


def to_guest(bytes_per_s: int) -> str:
    """For `tc -batch`."""
    return f"qdisc replace dev {TAP} root tbf rate {8 * bytes_per_s}bit burst {_burst_bytes(bytes_per_s)}b latency {_LATENCY_MS}ms\n"


def from_guest(bytes_per_s: int) -> str:
    """For `nft -f`: a table of its own, which no change of the sandbox's policy touches."""
    return f"""
table ip aenv_rate {{}}
delete table ip aenv_rate
table ip aenv_rate {{
  chain prerouting {{
    type filter hook prerouting priority -300;
    iifname "{TAP}" limit rate over {bytes_per_s} bytes/second burst {_burst_bytes(bytes_per_s)} bytes drop
  }}
}}
"""


def _burst_bytes(bytes_per_s: int) -> int:
    return max(_LEAST_BURST_BYTES, int(bytes_per_s * _BURST_S))
