"""Watch a VM's process: when it ends by itself the sandbox has ended, and that is never hidden by a fresh start."""

from __future__ import annotations

import asyncio
import logging

from agentenv.core.errors import AgentEnvError
from agentenv.core.lifecycle import State
from agentenv.core.model import Sandbox
from agentenv.orchestrator import delete
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.serve_volumes import life
from agentenv.vmm.driver import Vm

_log = logging.getLogger(__name__)
_RETRY_MS = 1_000


def watch(parts: Parts, sandbox_id: str, vm: Vm) -> None:
    """Start watching; ends by itself when the VM is stopped by a verb."""
    task = asyncio.create_task(_watch(parts, sandbox_id, vm), name=f"watch {sandbox_id}")
    parts.shared.watchers.add(task)
    task.add_done_callback(parts.shared.watchers.discard)


def _killed_for_memory(parts: Parts, sandbox: Sandbox) -> str:
    """The reason when it was the kernel that killed the VMM; else nothing."""
    if sandbox.vm is None or not parts.cgroups.killed_for_memory(life(sandbox.sandbox_id, sandbox.vm.run_id)):
        return ""
    return "the kernel killed its VMM for want of memory: of the host's, or of what its guest and limits.vmm_overhead_mb allow it"


async def _watch(parts: Parts, sandbox_id: str, vm: Vm) -> None:
    reason = await vm.ended()
    if not parts.block_server.is_alive() or vm.process.start_ticks < parts.block_server.process.start_ticks:
        reason = f"{reason}; the block server had ended before it"
    while True:
        try:
            async with parts.shared.locked(sandbox_id):
                sandbox = parts.store.sandbox(sandbox_id)
                if sandbox is not None and parts.shared.vms.get(sandbox_id) is vm and sandbox.state is State.RUNNING:
                    await delete.end(parts, sandbox, f"its VM ended by itself: {_killed_for_memory(parts, sandbox) or reason}")
                return  # otherwise a verb ended it
        except AgentEnvError as error:
            _log.error("the end of %s could not be recorded, will be tried again: %s", sandbox_id, error)
            await parts.clock.sleep_ms(_RETRY_MS)
