"""Template service: what a template keeps running is started again in a guest that boots, and watched until it answers.

A restore needs none of this: there the service is part of the memory. Invariant: a service that does not start never keeps
its sandbox from running; the sandbox's log says why it is not there.
"""

from __future__ import annotations

import asyncio

from agentenv.core.errors import AgentEnvError
from agentenv.core.model import Sandbox, Service
from agentenv.guest.commands import Command, OnStart, Stream
from agentenv.orchestrator.parts import Parts, note

_COMMAND_DEADLINE_S = 30.0  # of the start command, which returns at once, and of one try of the ready command
_INTERVAL_MS = 2_000  # between tries: each costs the booting guest a shell
_SAID_MAX_BYTES = 500
_HINT = "see the service's own log in the sandbox"


async def start_again(parts: Parts, sandbox: Sandbox, namespace: str, run_id: str) -> None:
    """Start the service of a guest that has just booted; its ready command is awaited by a task of its own. Never raises ours."""
    service = sandbox.service
    if service is None:
        return
    failure = await _start(parts, sandbox, namespace, service)
    if failure is not None:
        await note(parts, sandbox.sandbox_id, "the template's start command failed after the boot", "error", cause=failure, hint=_HINT)
        return
    if not service.ready:
        return
    task = asyncio.create_task(_until_ready(parts, sandbox, namespace, run_id, service), name=f"service of {sandbox.sandbox_id}")
    parts.shared.watchers.add(task)
    task.add_done_callback(parts.shared.watchers.discard)


async def _until_ready(parts: Parts, sandbox: Sandbox, namespace: str, run_id: str, service: Service) -> None:
    """Try the ready command until it succeeds, its time is up, or that life of the sandbox has ended."""
    sandbox_id, deadline_s = sandbox.sandbox_id, parts.config.guest.service_deadline_s
    began_ms = parts.clock.monotonic_ms()
    while _lives(parts, sandbox_id, run_id):
        failure = await _failure(parts, sandbox, namespace, service, service.ready)
        took_ms = parts.clock.monotonic_ms() - began_ms
        if not _lives(parts, sandbox_id, run_id):
            return
        if failure is None:
            await note(parts, sandbox_id, "the template's service is ready again", took_ms=f"{took_ms:.0f}")
            return
        if took_ms >= 1000 * deadline_s:
            said = f"the template's service was not ready within {deadline_s} s of the boot"
            await note(parts, sandbox_id, said, "error", cause=failure, hint=_HINT)
            return
        await parts.clock.sleep_ms(_INTERVAL_MS)


def _lives(parts: Parts, sandbox_id: str, run_id: str) -> bool:
    """Whether the sandbox still is the VM that booted: a pause or an end has given its network to others."""
    sandbox = parts.store.sandbox(sandbox_id)
    return sandbox is not None and sandbox.vm is not None and sandbox.vm.run_id == run_id


async def _start(parts: Parts, sandbox: Sandbox, namespace: str, service: Service) -> str | None:
    """Why the start command did not succeed, or None. One that stays is left alone as soon as it runs."""
    if not service.stays:
        return await _failure(parts, sandbox, namespace, service, service.start)
    started = asyncio.Event()
    work = asyncio.ensure_future(_failure(parts, sandbox, namespace, service, service.start, started.set))
    waits = asyncio.ensure_future(started.wait())
    try:
        await asyncio.wait({work, waits}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, waits):
            task.cancel()
        await asyncio.wait({work, waits})


async def _failure(
    parts: Parts, sandbox: Sandbox, namespace: str, service: Service, command: str, on_start: OnStart = lambda: None
) -> str | None:
    """Why a command of the service did not succeed, or None."""
    said = bytearray()

    def keep(_stream: Stream, data: bytes) -> None:
        said.extend(data)
        del said[:-_SAID_MAX_BYTES]

    wanted = Command(("/bin/sh", "-c", command), service.user, service.workdir, service.env_vars, sandbox.access_token)
    if service.stays:
        wanted = Command.in_login_shell(command, service.user, service.workdir, service.env_vars, sandbox.access_token)
    try:
        ended = await parts.guest.execute(namespace, wanted, keep, _COMMAND_DEADLINE_S, on_start)
    except AgentEnvError as error:
        return error.message
    if ended.exit_code == 0:
        return None
    return f"`{command}` ended with status {ended.exit_code}: {said.decode(errors='replace')}"
