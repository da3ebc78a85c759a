"""Create: a new sandbox from a template's snapshot; and the new sandboxes that a fork makes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import replace

from agentenv.core import quotas
from agentenv.core.disk_size import check_most, with_disk
from agentenv.core.errors import AgentEnvError
from agentenv.core.lifecycle import State
from agentenv.core.model import CreateRequest, Creation, Sandbox, StartOutcome, new_sandbox
from agentenv.orchestrator import delete
from agentenv.orchestrator.admission import admit
from agentenv.orchestrator.collect import make_room
from agentenv.orchestrator.network import warn_unenforced
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.start import start
from agentenv.orchestrator.templates import resolve
from agentenv.orchestrator.warm import give_back
from agentenv.orchestrator.warm_pool import WarmVm
from agentenv.orchestrator.watch import watch
from agentenv.volume import mounts

_log = logging.getLogger(__name__)


async def create(parts: Parts, request: CreateRequest) -> Sandbox:
    """Start a sandbox from a template; returns once its guest answers."""
    _check(parts, request)
    await make_room(parts)
    template, build = resolve(parts.store, request.template)
    machine = with_disk(build.machine, request.disk_mb, f"template {template.name}")
    admit(parts, machine)
    volume_mounts = mounts.resolve(parts.volumes, request.volume_mounts)
    sandbox = replace(new_sandbox(request, template, build, parts.clock.now_ms()), machine=machine, volume_mounts=volume_mounts)
    with parts.shared.warm.create(parts.clock):
        created = await _launch_any(parts, sandbox, request.creation)
    if request.unknown_fields:
        names = ", ".join(request.unknown_fields)
        await note(parts, created.sandbox_id, f"fields of its creation that this node does not know were ignored: {names}", "warn")
    try:
        await parts.store.count_spawn(template.template_id, parts.clock.now_ms())
    except AgentEnvError as error:  # a figure for people: no reason to fail a create that worked
        _log.warning("the spawn count of template %s could not be written: %s", template.name, error)
    return created


async def create_many(parts: Parts, requests: Sequence[CreateRequest]) -> list[StartOutcome]:
    """Start several at once. An error that concerns all (no such template, no room for even one) fails the call; others are outcomes."""
    for request in {(request.template, request.quotas, request.disk_mb): request for request in requests}.values():
        _check(parts, request)
        template, build = resolve(parts.store, request.template)
        admit(parts, with_disk(build.machine, request.disk_mb, f"template {template.name}"))
    return list(await asyncio.gather(*(outcome_of(create(parts, request)) for request in requests)))


def _check(parts: Parts, request: CreateRequest) -> None:
    """InvalidInput when it asks for more than this node gives to one sandbox."""
    quotas.check(request.quotas, parts.config.limits.quotas)
    check_most(request.disk_mb, parts.config.limits.disk_mb_of_sandbox)


async def outcome_of(start: Awaitable[Sandbox]) -> StartOutcome:
    """What comes of one of several starts; its own error does not end the others."""
    try:
        return StartOutcome(await start)
    except AgentEnvError as error:
        return StartOutcome(None, error.status, str(error))


async def _launch_any(parts: Parts, sandbox: Sandbox, creation: Creation | None) -> Sandbox:
    """Wake a VM that stands ready for it, if there is one; volumes, limits and a disk of its own need a VM that is started with them."""
    snapshot_id = sandbox.snapshot_id or ""
    is_plain = not sandbox.volume_mounts and sandbox.quotas == quotas.NONE and sandbox.machine == parts.store.snapshot(snapshot_id).machine
    warm = parts.shared.warm.take(snapshot_id, parts.clock.monotonic_ms()) if is_plain else None
    if warm is None:
        return await launch(parts, sandbox, creation)
    try:
        return await launch(parts, replace(sandbox, sandbox_id=warm.sandbox_id), creation, warm=warm)
    finally:
        if warm.sandbox_id in parts.shared.warm.taken:  # the sandbox was not recorded, or it had to be started otherwise
            parts.shared.background(give_back(parts, warm), f"give back {warm.sandbox_id}")


async def launch(
    parts: Parts,
    sandbox: Sandbox,
    creation: Creation | None = None,
    *,
    cold: bool = False,
    clock_behind_ms: int = 0,
    warm: WarmVm | None = None,
) -> Sandbox:
    """Record a new sandbox and start it from its `snapshot_id`. On failure it ends as killed, with the reason.

    `cold` boots it, on a machine of the sandbox's own size; else the snapshot says how large it is, but for the disk. For the others
    see `start`.
    """
    sandbox_id = sandbox.sandbox_id
    began_ms = parts.clock.monotonic_ms()
    async with parts.shared.locked(sandbox_id):  # before it is recorded: from then on it can be found, and killed
        await parts.store.add_sandbox(sandbox)
        try:
            snapshot = parts.store.snapshot(sandbox.snapshot_id or "")
            if cold:
                snapshot = replace(snapshot, machine=replace(sandbox.machine, disk_mb=snapshot.machine.disk_mb))
            record, vm = await start(parts, sandbox, snapshot, cold=cold, clock_behind_ms=clock_behind_ms, warm=warm)
            now_ms = parts.clock.now_ms()
            running = await parts.store.transition(
                sandbox_id,
                State.CREATING,
                State.RUNNING,
                vm=record,
                snapshot_id=None,
                creation=creation,
                started_at_ms=now_ms,
                end_at_ms=now_ms + 1000 * sandbox.timeout_s,
            )
        except BaseException as error:
            reason = str(error) if isinstance(error, AgentEnvError) else f"start was broken off ({type(error).__name__})"
            await delete.abandon(parts, sandbox_id, f"it could not be started: {reason}")
            raise
        watch(parts, sandbox_id, vm)
    parts.shared.expiry_changed.set()
    took_ms = parts.clock.monotonic_ms() - began_ms
    await note(parts, sandbox_id, "started", template=sandbox.template_name, took_ms=f"{took_ms:.0f}")
    await warn_unenforced(parts, running)
    return running
