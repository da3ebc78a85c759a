"""Warm: VMs that stand ready, so that a create only has to wake one.

A warm VM was restored from a template's snapshot as any other; its guest has answered and run a command, and stands still: it costs
no CPU, and the memory it has diverged. It reaches no network until then, and learns who it is when a create takes it. It is on no
record: the server frees those it has when it ends, and the next one removes what a killed one has left.

Only hot templates have some: those that sandboxes were created from more than once, and lately (`warm.idle_s`). Each has
`warm.sandboxes`, all together stay within `warm.memory_mb`. They are made one at a time, when nobody creates, and go when their template
does, when it is not used for long, and when memory gets tight.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Container
from dataclasses import replace

from agentenv.core.errors import AgentEnvError
from agentenv.core.ids import new_sandbox_id
from agentenv.core.model import Build, Machine, RunningVm
from agentenv.core.network import OPEN, NetworkSettings, addresses
from agentenv.guest.client import GuestIdentity
from agentenv.guest.commands import Command, CommandRefused
from agentenv.orchestrator.admission import admit_memory, memory_needed_mb
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.start import launch_vm, plan, require_usable, stop
from agentenv.orchestrator.sweep import sweep_soon
from agentenv.orchestrator.templates import all_builds
from agentenv.orchestrator.warm_pool import WarmVm
from agentenv.vmm.driver import Vm

_log = logging.getLogger(__name__)
_CLOSED = addresses(NetworkSettings(), False)
_INTERVAL_MS = 5_000
_QUIET_MS = 200  # nobody creates, and the last one's first commands are through: the CPU is free for what may be needed next
_QUIET_CREATES = 3  # or as long as so many creates take: a first command takes about as long as two from VMs that stand ready
_QUIET_MOST_MS = 10_000  # on a host so slow that a create takes longer
_RETRY_MS = 60_000  # after a failure: whatever it is, it is not worth CPU all the time
_COMMAND_DEADLINE_S = 60.0


async def run(parts: Parts) -> None:
    """Keep what `warm.sandboxes` asks for until cancelled."""
    pool = parts.shared.warm
    while parts.config.warm.sandboxes:
        pool.changed.clear()
        wait_ms = _INTERVAL_MS
        try:
            await _free_unwanted(parts)
            while (build := _lacking(parts)) is not None:
                await _quiet(parts)
                await asyncio.shield(parts.shared.background(_make(parts, build), f"warm VM of {build.build_id}"))
        except Exception as error:  # noqa: BLE001 - a fault in getting ahead must not end it for good
            wait_ms = _RETRY_MS
            _log.warning("a VM could not be started in advance: %s", error, exc_info=not isinstance(error, AgentEnvError))
        await _wait(parts, wait_ms)


async def drain(parts: Parts) -> None:
    """Free all that stand ready."""
    await asyncio.gather(*(_free(parts, warm) for warm in list(parts.shared.warm.ready.values())))


async def give_back(parts: Parts, warm: WarmVm) -> None:
    """Free one that was taken, unless a sandbox's record has it."""
    if parts.shared.warm.handed_over(warm.sandbox_id) is not None:
        await _stop(parts, warm.sandbox_id, warm.record, warm.vm)


async def free_unfit(parts: Parts, run_ids: Container[str]) -> None:
    """Free those that stand ready and are of no use any more, by the ids of their lives."""
    unfit = [warm for warm in parts.shared.warm.ready.values() if warm.record.run_id in run_ids]
    await asyncio.gather(*(_free(parts, warm) for warm in unfit))


async def _free(parts: Parts, warm: WarmVm) -> None:
    if parts.shared.warm.ready.pop(warm.sandbox_id, None) is not None:
        work = _stop(parts, warm.sandbox_id, warm.record, warm.vm)
        await asyncio.shield(parts.shared.background(work, f"free {warm.sandbox_id}"))


async def _stop(parts: Parts, sandbox_id: str, record: RunningVm, vm: Vm | None) -> None:
    await stop(parts, sandbox_id, record, vm)
    sweep_soon(parts)  # what its disk has written is nobody's


async def _free_unwanted(parts: Parts) -> None:
    pool = parts.shared.warm
    oldest_ms = parts.clock.monotonic_ms() - 1000 * parts.config.warm.idle_s
    there = {build.snapshot_id for build in all_builds(parts.store)}
    for snapshot_id, demand in list(pool.demand.items()):
        if demand.last_ms < oldest_ms or snapshot_id not in there:
            del pool.demand[snapshot_id]
    for warm in list(pool.ready.values()):
        if warm.snapshot_id not in pool.demand or not _has_memory(parts, warm.machine, spare=False):
            await _free(parts, warm)


def _lacking(parts: Parts) -> Build | None:
    """The hot build that was asked for last of those that have too few, if there is memory for one more."""
    pool, limits = parts.shared.warm, parts.config.warm
    builds = {build.snapshot_id: build for build in all_builds(parts.store)}
    held_mb = sum(memory_needed_mb(parts, warm.machine) for warm in pool.ready.values())
    hot = [snapshot_id for snapshot_id, demand in pool.demand.items() if demand.is_hot]
    for snapshot_id in sorted(hot, key=lambda snapshot_id: -pool.demand[snapshot_id].last_ms):
        build = builds.get(snapshot_id)
        if build is None or not parts.store.snapshot(snapshot_id).has_memory or len(pool.of(snapshot_id)) >= limits.sandboxes:
            continue
        machine = parts.store.snapshot(snapshot_id).machine
        if held_mb + memory_needed_mb(parts, machine) <= limits.memory_mb and _has_memory(parts, machine, spare=True):
            return build
    return None


def _has_memory(parts: Parts, machine: Machine, *, spare: bool) -> bool:
    """Whether the host has memory for one more sandbox; `spare`: for one more than that."""
    twice = replace(machine, memory_mb=2 * machine.memory_mb)
    try:
        admit_memory(parts, twice if spare else machine)
    except AgentEnvError:
        return False
    return True


async def _make(parts: Parts, build: Build) -> None:
    """One more that stands ready. On failure nothing is left."""
    snapshot = parts.store.snapshot(build.snapshot_id)
    await require_usable(parts, snapshot, cold=False)
    sandbox_id, pool = new_sandbox_id(), parts.shared.warm
    with parts.layers.announced(*snapshot.memory_layers, *snapshot.disk_layers), parts.shared.using(snapshot.snapshot_id):
        slot = await parts.slots.acquire(_CLOSED, parts.config.limits.quotas.network_bytes_per_s)
        record = pool.making[sandbox_id] = plan(parts, snapshot, slot.number, cold=False)
        vm: Vm | None = None
        try:
            record, vm = await launch_vm(parts, sandbox_id, record, snapshot, slot)
            await _try_out(parts, sandbox_id, slot.namespace, build)
            await vm.pause()
            await parts.slots.apply(slot.number, OPEN)  # it stands still; whoever takes it sets what holds for it
            pool.ready[sandbox_id] = WarmVm(sandbox_id, snapshot.snapshot_id, snapshot.machine, record, vm)
            _log.info("%s stands ready, of snapshot %s", sandbox_id, snapshot.snapshot_id)
        except BaseException:
            await _stop(parts, sandbox_id, record, vm)
            raise
        finally:
            del pool.making[sandbox_id]


async def _try_out(parts: Parts, sandbox_id: str, namespace: str, build: Build) -> None:
    """Once what every sandbox does first: whatever that needs of host and guest is in memory, and translated if the VMM translates."""
    identity = GuestIdentity(
        sandbox_id, "", "", dns_servers=parts.config.guest.dns_servers, default_user=build.user, default_workdir=build.workdir
    )
    await parts.guest.initialise(namespace, identity, parts.config.guest.restore_deadline_s)
    with contextlib.suppress(CommandRefused):  # an image without a shell
        await parts.guest.execute(
            namespace, Command.in_login_shell("true", build.user, build.workdir), lambda *_: None, _COMMAND_DEADLINE_S
        )


async def _quiet(parts: Parts) -> None:
    """Wait until no create is under way, nor was for a moment, which is longer where creates take long: a slow host needs a longer one."""
    pool = parts.shared.warm
    while True:
        quiet_ms = min(max(_QUIET_MS, _QUIET_CREATES * pool.create_took_ms), _QUIET_MOST_MS)
        left_ms = quiet_ms if pool.creating else pool.created_ms + quiet_ms - parts.clock.monotonic_ms()
        if left_ms <= 0:
            return
        await parts.clock.sleep_ms(left_ms)


async def _wait(parts: Parts, wait_ms: int) -> None:
    sleep = asyncio.create_task(parts.clock.sleep_ms(wait_ms))
    waits = {sleep, asyncio.create_task(parts.shared.warm.changed.wait())} if wait_ms == _INTERVAL_MS else {sleep}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
