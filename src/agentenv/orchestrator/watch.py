"""Watch a VM's process: when it ends by itself the sandbox has ended, and that is never hidden by a fresh start."""

from __future__ import annotations

import asyncio

from agentenv.core.lifecycle import State
from agentenv.orchestrator import delete
from agentenv.orchestrator.parts import Parts
from agentenv.vmm.driver import Vm


def watch(parts: Parts, sandbox_id: str, vm: Vm) -> None:
    """Start watching; ends by itself when the VM is stopped by a verb."""
    task = asyncio.create_task(_watch(parts, sandbox_id, vm), name=f"watch {sandbox_id}")
    parts.shared.watchers.add(task)
    task.add_done_callback(parts.shared.watchers.discard)


async def _watch(parts: Parts, sandbox_id: str, vm: Vm) -> None:
    reason = await vm.ended()
    async with parts.shared.locked(sandbox_id):
        sandbox = parts.store.sandbox(sandbox_id)
        if sandbox is None or parts.shared.vms.get(sandbox_id) is not vm or sandbox.state is not State.RUNNING:
            return  # a verb ended it
        await delete.end(parts, sandbox, f"its VM ended by itself: {reason}")
