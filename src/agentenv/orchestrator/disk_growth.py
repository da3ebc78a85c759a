"""Larger disks: a sandbox that was created with a larger disk than its snapshot's has it before anybody sees the sandbox.

The device is opened at the new size, a guest that was restored is told of it, and the guest's agent has the file system take it all.
What is captured from then on has that size in its layers, so this happens once in a sandbox's life.
"""

from __future__ import annotations

from dataclasses import replace

from agentenv.core.model import Machine, RunningVm, Sandbox, Snapshot
from agentenv.core.spans import span
from agentenv.core.tasks import unless
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.start_errors import lost_at_start
from agentenv.vmm.driver import Vm


def grown_disk_mb(sandbox: Sandbox, snapshot: Snapshot) -> int:
    """What the disk is to have now, MiB; 0 when it stays as the snapshot has it."""
    wanted_mb = sandbox.machine.disk_mb
    return wanted_mb if wanted_mb > snapshot.machine.disk_mb else 0


def machine_of(record: RunningVm, snapshot: Snapshot) -> Machine:
    """The machine that a VM of the snapshot is."""
    return replace(snapshot.machine, disk_mb=record.grown_disk_mb or snapshot.machine.disk_mb)


def disk_bytes(record: RunningVm) -> int | None:
    """At which size the disk is opened; None: as its layers have it."""
    return record.grown_disk_mb << 20 if record.grown_disk_mb else None


async def grow(parts: Parts, record: RunningVm, vm: Vm, namespace: str, *, cold: bool) -> None:
    """Have the guest use its larger disk, if there is one. InvalidInput or Unsupported when it cannot, Unavailable when it is lost."""
    if not record.grown_disk_mb:
        return
    with span("grow"):
        if not cold:  # one that boots has asked for the size itself
            await vm.disk_grown()
        await unless(vm.ended(), parts.guest.provision.grow_disk(namespace, record.grown_disk_mb << 20), lost_at_start)
