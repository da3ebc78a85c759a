"""What a production node wants of its kernel: modules and settings, as one table for `aenv doctor` and `aenv setup`.

Every figure has its reason beside it. Nothing here looks at a host or changes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Need = Literal["needed", "advised"]
OPEN_FILES_MAX = 1_048_576
"""Of the service: three for each connection of the proxy, some dozens for each sandbox, and every layer that `blockd` has open."""


@dataclass(frozen=True, slots=True)
class Module:
    """A kernel module. `proof` is a file that is there when it is loaded, built in or not."""

    name: str
    proof: str
    need: Need
    why: str


@dataclass(frozen=True, slots=True)
class Sysctl:
    """A kernel setting: at least `value`, or exactly `value`."""

    name: str
    value: int
    exact: bool
    need: Need
    why: str

    @property
    def path(self) -> str:
        """Below the root folder."""
        return f"proc/sys/{self.name.replace('.', '/')}"

    def fits(self, found: int) -> bool:
        """Whether what a host has will do."""
        return found == self.value if self.exact else found >= self.value


MODULES: tuple[Module, ...] = (
    Module("tun", "dev/net/tun", "needed", "a guest's network card is a tap device"),
    Module("fuse", "dev/fuse", "needed", "guest memory is a file that `blockd` serves"),
    Module("ublk_drv", "dev/ublk-control", "needed", "disks are block devices, and outlive a kill of `blockd`"),
    Module("nf_conntrack", "proc/sys/net/netfilter/nf_conntrack_max", "advised", "its limit can be set only when it is loaded"),
)

SYSCTLS: tuple[Sysctl, ...] = (
    Sysctl("net.ipv4.ip_forward", 1, True, "needed", "guests reach the outside through the host"),
    Sysctl(
        "vm.overcommit_memory",
        1,
        True,
        "advised",
        "guest memory is mapped in full and filled as it is used: with 2 no VM starts once the sum is reached, with 0 a large one may not",
    ),
    Sysctl("vm.max_map_count", 262_144, False, "advised", "a VMM and its libraries map many areas"),
    Sysctl("fs.file-max", 2_097_152, False, "advised", "open files of all processes together"),
    Sysctl("fs.nr_open", OPEN_FILES_MAX, False, "needed", "the service asks for that many open files"),
    Sysctl("kernel.pid_max", 4_194_304, False, "advised", "every VM has a thread for each CPU and some for I/O"),
    Sysctl("net.core.somaxconn", 4096, False, "advised", "connections that wait while a burst of requests, or an upgrade, is under way"),
    Sysctl("net.netfilter.nf_conntrack_max", 1_048_576, False, "advised", "the host follows every connection of every guest"),
    Sysctl("net.ipv4.neigh.default.gc_thresh1", 8192, False, "advised", "a neighbour for each sandbox, kept without looking for old ones"),
    Sysctl("net.ipv4.neigh.default.gc_thresh2", 32_768, False, "advised", "more neighbours than that are collected at once"),
    Sysctl("net.ipv4.neigh.default.gc_thresh3", 65_536, False, "advised", "beyond it no sandbox is reached; 1024 unless set"),
    Sysctl("kernel.dmesg_restrict", 1, True, "advised", "what the kernel says of one tenant's VM is not for other users"),
)
