"""Block watch: when blockd ends while the server runs, another is started at once, and what its end cost is settled.

Devices (ublk) are taken over by the next blockd: their guests go on. A file (FUSE) is gone with the blockd that served it, for good for
those who had it open: a sandbox whose disk it was has ended, with that reason; one whose memory alone it was is paused with its
disk, if its guest can still write that out. VMs that stood ready are made anew, the memory that creates start from is opened again.

A blockd that does not last is started more and more rarely. Until it answers, the server's `/health` says so and creates fail as
retryable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from agentenv.core.errors import AgentEnvError
from agentenv.core.lifecycle import State
from agentenv.core.model import RunningVm, Sandbox
from agentenv.orchestrator import delete, warm
from agentenv.orchestrator.hot_memory import open_hot_memory
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.pause import pause_held
from agentenv.orchestrator.repair import settle

_log = logging.getLogger(__name__)
_NAME = "blockd"
_STEADY_MS = 60_000  # one that lived that long is not part of a row of failures
_FIRST_WAIT_MS, _LONGEST_WAIT_MS = 1_000, 60_000
_RETRY_MS = 1_000
_POLL_MS = 100
_LOST = "the block server ended, and the sandbox's {} with it"


async def run(parts: Parts) -> None:
    """Watch until cancelled."""
    failures = 0
    while True:
        up_since_ms = parts.clock.monotonic_ms()
        await parts.block_server.ended()
        if parts.clock.monotonic_ms() - up_since_ms >= _STEADY_MS:
            failures = 0
        _log.error("blockd has ended; it is started again")
        failures = 1 + await _start_again(parts, failures)
        try:
            await asyncio.shield(parts.shared.background(_settle_losses(parts), "losses of blockd"))
        except Exception as error:  # noqa: BLE001 - whatever could not be settled must not end the watch; the next end of blockd tries again
            _log.error("what the end of blockd cost could not be settled: %s", error, exc_info=not isinstance(error, AgentEnvError))


def wait_ms(failures: int) -> int:
    """How long to wait before the next start, after that many failures in a row."""
    return 0 if failures == 0 else min(_LONGEST_WAIT_MS, _FIRST_WAIT_MS << min(failures - 1, 16))


async def _start_again(parts: Parts, failures: int) -> int:
    """Start it, as often as it takes; returns the failures in a row."""
    cause = "it has ended"
    while True:
        parts.shared.troubles[_NAME] = f"the block server does not run: {cause}; next start in {wait_ms(failures) / 1000:g} s"
        await parts.clock.sleep_ms(wait_ms(failures))
        try:
            await parts.block_server.ensure_running()
        except (AgentEnvError, OSError) as error:
            cause, failures = str(error), failures + 1
            _log.error("blockd could not be started (%d times in a row): %s", failures, error)
        else:
            del parts.shared.troubles[_NAME]
            return failures


async def _settle_losses(parts: Parts) -> None:
    """Do what the end of the former blockd asks for. Ends early when this one ends, too."""
    making = set(parts.shared.warm.making)
    left = {s.sandbox_id for s in parts.store.sandboxes() if s.state is not State.KILLED} | set(parts.shared.warm.taken)
    parts.shared.background(open_hot_memory(parts), "hot memory")
    while left and parts.block_server.is_alive():
        outcomes = await asyncio.gather(*(_settle_one(parts, sandbox_id) for sandbox_id in left), return_exceptions=True)
        failed = {sandbox_id: out for sandbox_id, out in zip(left, outcomes, strict=True) if isinstance(out, BaseException)}
        for sandbox_id, error in failed.items():
            _log.error("the loss of %s could not be settled, will be tried again: %s", sandbox_id, error)
        if left := set(failed):
            await parts.clock.sleep_ms(_RETRY_MS)
    while making & set(parts.shared.warm.making):  # whatever they were at, their disks are gone, too
        await parts.clock.sleep_ms(_POLL_MS)
    await warm.free_unfit(parts, await _lost_of(parts, [one.record for one in parts.shared.warm.ready.values()]))


async def _settle_one(parts: Parts, sandbox_id: str) -> None:
    """Once the verb that holds it is through: end or save a sandbox that has lost something."""
    async with parts.shared.locked(sandbox_id):
        await settle(parts, sandbox_id, _LOST.format("disk"))
        sandbox = parts.store.sandbox(sandbox_id)
        if sandbox is None or sandbox.state is not State.RUNNING or sandbox.vm is None:
            return
        if sandbox.vm.run_id not in await _lost_of(parts, [sandbox.vm]):
            await note(parts, sandbox_id, "the block server ended and another one has taken its disk over")
        elif await _has_disk(parts, sandbox.vm) and sandbox.purpose == "sandbox":
            await _save_disk(parts, sandbox)
        else:
            await delete.end(parts, sandbox, _LOST.format("disk"))


async def _save_disk(parts: Parts, sandbox: Sandbox) -> None:
    try:
        await pause_held(parts, sandbox.sandbox_id, memory=False)
        await note(parts, sandbox.sandbox_id, _LOST.format("memory") + "; paused with its disk alone", "error")
    except AgentEnvError as error:
        current = parts.store.sandbox(sandbox.sandbox_id)
        if current is not None and current.state is State.RUNNING:
            await delete.end(parts, current, f"{_LOST.format('memory')}; its disk could not be saved: {error}")


async def _lost_of(parts: Parts, records: Iterable[RunningVm]) -> set[str]:
    """The runs of those VMs that have lost their disk or their memory.

    A file of the same name may be open again already; a VM that is older than this blockd cannot have opened that one.
    """
    stacks = {stack.stack_id: stack for stack in await parts.blocks.stacks()}
    born = parts.block_server.process.start_ticks

    def has_lost(record: RunningVm) -> bool:
        wanted = [stacks.get(stack_id) for stack_id in (record.disk_stack, record.memory_stack)]
        return any(stack is None or (not stack.is_device and record.pid_start_ticks < born) for stack in wanted)

    return {record.run_id for record in records if has_lost(record)}


async def _has_disk(parts: Parts, record: RunningVm) -> bool:
    return any(stack.stack_id == record.disk_stack and stack.is_device for stack in await parts.blocks.stacks())
