"""What one sandbox may use of its node beyond its machine's size: shares of CPU, disk and network."""

from __future__ import annotations

from dataclasses import dataclass, fields

from agentenv.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Quotas:
    """Most it may use; 0 is no limit."""

    cpu_percent: int = 0  # of one CPU
    disk_bytes_per_s: int = 0  # read and written together
    disk_operations_per_s: int = 0
    network_bytes_per_s: int = 0  # in each direction


NONE = Quotas()
"""No limit."""

NAMES = {
    "cpu_percent": "cpuPercent",
    "disk_bytes_per_s": "diskBytesPerSecond",
    "disk_operations_per_s": "diskOperationsPerSecond",
    "network_bytes_per_s": "networkBytesPerSecond",
}
"""By field: what the API calls it."""

_LEAST = Quotas(cpu_percent=5, disk_bytes_per_s=64 << 10, disk_operations_per_s=10, network_bytes_per_s=16 << 10)
"""With less than this a guest does not start within any patience."""


def check(asked: Quotas, node: Quotas) -> None:
    """InvalidInput when something asked for is below what a guest can work with, or more than the node gives to one sandbox."""
    for one in fields(Quotas):
        value, most, least = (getattr(quotas, one.name) for quotas in (asked, node, _LEAST))
        if value and value < least:
            raise InvalidInput(f"limits.{NAMES[one.name]}: {value} is too little for a guest to work", f"ask for {least} or more")
        if value and most and value > most:
            raise InvalidInput(f"limits.{NAMES[one.name]}: {value} is more than this node gives to one sandbox", f"ask for {most} or less")


def capped(asked: Quotas, node: Quotas) -> Quotas:
    """What holds: the lower of what was asked for and what the node gives."""
    pairs = {one.name: (getattr(asked, one.name), getattr(node, one.name)) for one in fields(Quotas)}
    return Quotas(**{name: min(value or most, most or value) for name, (value, most) in pairs.items()})
