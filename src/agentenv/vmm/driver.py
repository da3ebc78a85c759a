"""What every VMM driver offers. Firecracker is the one for production, QEMU the portable one.

A VM starts by `restore`, or by `boot` where there is no memory to restore. Both return as soon as the VMM process is recorded and
the guest is on its way: whether the guest works is seen from its first answer, and from `Vm.ended` when the VMM dies.
A VM is a process that outlives the server; `adopt` takes one over after a restart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from agentenv.core.model import Machine, VmIdentity
from agentenv.core.quotas import Quotas
from agentenv.host.process import ProcessId


@dataclass(frozen=True, slots=True)
class VmSpec:
    """Everything a VMM needs. Paths are absolute; `work` is this VM's own folder and belongs to its VMM."""

    name: str
    work: Path
    machine: Machine
    memory: Path
    disk: Path
    namespace: str
    tap: str
    guest_mac: str
    quotas: Quotas = field(default_factory=Quotas)  # of these, disk rates are the VMM's to enforce


User = tuple[int, int]
"""A user and a group, by number."""


@dataclass(frozen=True, slots=True)
class MemoryExport:
    """How a driver wants memory exported, which many VMs map; see `BlockClient.open`. The default is a file of ours."""

    export: Literal["auto"] | None = None
    owner: User | None = None


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """Where a VMM that writes memory itself puts what changed since it was last saved, or all of it if that is not known to be kept."""

    path: Path
    is_whole: bool


@dataclass(frozen=True, slots=True)
class BootSpec:
    """What a cold boot needs beyond `VmSpec`."""

    kernel: Path
    initramfs: Path
    cmdline: str


class Vm(Protocol):
    """One running VM."""

    @property
    def process(self) -> ProcessId:
        """Its VMM's process."""
        ...

    @property
    def writer(self) -> User | None:
        """As whom it writes its memory itself, into a file; None: what changed is found from outside, in the memory of its process."""
        ...

    @property
    def waits_for_room(self) -> bool:
        """Whether a write that finds no room on the host is kept and repeated; else it is an error in the guest."""
        ...

    async def pause(self) -> None:
        """Stop the virtual CPUs and drain device I/O."""
        ...

    async def resume(self) -> None:
        """Let the virtual CPUs run."""
        ...

    async def disk_grown(self) -> None:
        """Tell the guest that its disk is larger than it was when its state was saved."""
        ...

    async def stalled(self) -> bool:
        """Whether the VM stands still for want of room on the host: its VMM, or `pause`, stopped it, and no verb is at work with it."""
        ...

    async def save_state(self, path: Path, memory: MemoryFile | None = None) -> None:
        """Write device and CPU state of the paused VM to a new file, and its memory to another if it has a `writer`.

        StorageFull leaves no file of state. What was written of memory is then of no use, and nothing is missing in what is next.
        """
        ...

    async def kill(self) -> None:
        """End the VMM at once and wait until its process is gone. Idempotent."""
        ...

    async def ended(self) -> str:
        """Return, with a reason, when the VMM's process is gone."""
        ...

    async def close(self) -> None:
        """Let go of the VM without touching it (the server stops, the VM goes on)."""
        ...


#: Writes into the memory of a VMM's process, which is mapped by then, before the guest runs.
Fill = Callable[[ProcessId], Awaitable[None]]


class Vmm(Protocol):
    """A driver. `fills_memory`: its VMs can be given memory beyond what `VmSpec.memory` holds, before they run.

    `code_cache_mb`: what a VMM may fill with translated code beside what any VMM needs, MiB; 0 where nothing is translated.
    """

    fills_memory: bool

    @property
    def code_cache_mb(self) -> int:  # noqa: D102 - see the class
        ...

    def identity(self, kernel_sha256: str, initramfs_sha256: str) -> VmIdentity:
        """What snapshots made here depend on."""
        ...

    @property
    def memory(self) -> MemoryExport:
        """How its VMs want their memory exported."""
        ...

    def user(self, namespace: str) -> User | None:
        """As whom the VM in that network namespace runs, and has its disk; None: as we do. NotFound."""
        ...

    async def boot(self, spec: VmSpec, boot: BootSpec) -> Vm:
        """Start from the kernel. HostNotReady, Unavailable (it ended, with its last words), Internal (it refused)."""
        ...

    async def restore(self, spec: VmSpec, state: Path, fill: Fill | None = None) -> Vm:
        """Start from a saved state over a private mapping of `spec.memory`; the guest runs on at once.

        `fill` completes the memory before; what it raises is raised, and the VMM is gone. Unsupported unless `fills_memory`.
        """
        ...

    async def adopt(self, spec: VmSpec, process: ProcessId) -> Vm:
        """Take over a VM started by a former server. NotFound when its process is gone."""
        ...
