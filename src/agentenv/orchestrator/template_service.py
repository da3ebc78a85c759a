"""Template service: what a template keeps running is started again in a guest that boots, and watched until it answers.

A restore needs none of this: there the service is part of the memory. Invariant: a service that does not start never keeps
its sandbox from running; the sandbox's log says why it is not there.
"""

from __future__ import annotations

import asyncio

from agentenv.core.errors import AgentEnvError
from agentenv.core.model import Sandbox, Service
from agentenv.orchestrator.parts import Parts, note

_COMMAND_DEADLINE_S = 30.0  # of the start command, which returns at once, and of one try of the ready command
_INTERVAL_MS = 2_000  # between tries: each costs the booting guest a shell
_SAID_MAX_CHARS = 500
_HINT = "see the service's own log in the sandbox"


async def start_again(parts: Parts, sandbox: Sandbox, namespace: str, run_id: str) -> None:
    """Start the service of a guest that has just booted; its ready command is awaited by a task of its own. Never raises ours."""
    service = sandbox.service
    if service is None:
        return
    failure = await _failure(parts, sandbox, namespace, service.start)
    if failure is not None:
        await note(parts, sandbox.sandbox_id, "the template's start command failed after the boot", "error", cause=failure, hint=_HINT)
        return
    task = asyncio.create_task(_until_ready(parts, sandbox, namespace, run_id, service), name=f"service of {sandbox.sandbox_id}")
    parts.shared.watchers.add(task)
    task.add_done_callback(parts.shared.watchers.discard)


async def _until_ready(parts: Parts, sandbox: Sandbox, namespace: str, run_id: str, service: Service) -> None:
    """Try the ready command until it succeeds, its time is up, or that life of the sandbox has ended."""
    sandbox_id, deadline_s = sandbox.sandbox_id, parts.config.guest.service_deadline_s
    began_ms = parts.clock.monotonic_ms()
    while _lives(parts, sandbox_id, run_id):
        failure = await _failure(parts, sandbox, namespace, service.ready)
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


async def _failure(parts: Parts, sandbox: Sandbox, namespace: str, command: str) -> str | None:
    """Why a command did not succeed, or None."""
    try:
        status, said = await parts.guest.run(namespace, command, _COMMAND_DEADLINE_S, sandbox.access_token)
    except AgentEnvError as error:
        return error.message
    return None if status == 0 else f"`{command}` ended with status {status}: {said[-_SAID_MAX_CHARS:]}"
