"""How fast a guest may send and receive: a token bucket on each of the two links that its traffic leaves its namespace by."""

from __future__ import annotations

from agentenv.host import process
from agentenv.network.layout import TAP, UPLINK

_COMMAND_DEADLINE_S = 20.0
_BURST_S = 0.05  # let through at once
_LEAST_BURST_BYTES = 64 << 10  # as large as a segment that the kernel has not cut yet
_LATENCY_MS = 200  # what waits longer is dropped, which is how senders learn to slow down


def limit(namespace: str, bytes_per_s: int) -> None:
    """Limit both directions of the slot with this namespace. Blocks for milliseconds. Idempotent."""
    process.run(["tc", "-n", namespace, "-batch", "-"], _COMMAND_DEADLINE_S, commands(bytes_per_s))


def commands(bytes_per_s: int) -> str:
    """For `tc -batch`: towards the world and towards the guest."""
    burst_bytes = max(_LEAST_BURST_BYTES, int(bytes_per_s * _BURST_S))
    bucket = f"root tbf rate {8 * bytes_per_s}bit burst {burst_bytes}b latency {_LATENCY_MS}ms"
    return "".join(f"qdisc replace dev {device} {bucket}\n" for device in (UPLINK, TAP))
