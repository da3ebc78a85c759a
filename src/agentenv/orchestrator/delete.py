"""Delete (kill): end a sandbox in any state and free all it has. Works on damaged and half-made ones too."""

from __future__ import annotations

from agentenv.core.errors import NotFound
from agentenv.core.lifecycle import State
from agentenv.core.model import Sandbox
from agentenv.orchestrator.parts import Parts, said
from agentenv.orchestrator.start import stop
from agentenv.orchestrator.sweep import sweep_soon

_ENDED = (State.KILLING, State.KILLED)


def missing(sandbox_id: str) -> NotFound:
    """The contract's words for a sandbox that is not there (section 2.1)."""
    return NotFound(f"Sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it")


def alive(parts: Parts, sandbox_id: str) -> Sandbox:
    """The record of a sandbox that has not ended and is not about to. NotFound."""
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is None or sandbox.state in _ENDED:
        raise missing(sandbox_id)
    return sandbox


async def kill(parts: Parts, sandbox_id: str) -> None:
    """End a running or paused sandbox. NotFound when there is none, or it has been killed before."""
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is None or sandbox.state is State.KILLED:
        raise missing(sandbox_id)
    parts.shared.gone(sandbox_id)  # streams are cut at once, even while another verb holds the sandbox
    async with parts.shared.locked(sandbox_id):
        sandbox = parts.store.sandbox(sandbox_id)
        if sandbox is None or sandbox.state is State.KILLED:
            raise missing(sandbox_id)
        await end(parts, sandbox, "killed by request")


async def end(parts: Parts, sandbox: Sandbox, reason: str) -> None:
    """End a sandbox whose lock the caller holds. Its resources are freed before this returns.

    May be called again after a failure. The record lets go of the VM with the first commit: what a crash after it leaves
    over is explained by nothing, and the next start of the server removes it.
    """
    sandbox_id, record = sandbox.sandbox_id, sandbox.vm
    if sandbox.state is not State.KILLING:
        await parts.store.transition(sandbox_id, sandbox.state, State.KILLING, vm=None, reason=reason)
    parts.shared.gone(sandbox_id)
    if record is not None:
        await stop(parts, sandbox_id, record, parts.shared.let_go(sandbox_id))
    if (former := parts.shared.formers.pop(sandbox_id, None)) is not None:
        await stop(parts, sandbox_id, *former)
    # Written in one step: who finds a sandbox gone finds the reason, whenever the server is killed.
    await parts.store.transition(sandbox_id, State.KILLING, State.KILLED, said(parts, sandbox_id, "ended", reason=reason), snapshot_id=None)
    sweep_soon(parts)


async def abandon(parts: Parts, sandbox_id: str, reason: str) -> None:
    """End a sandbox that never came to run, if nobody else has. The caller holds its lock."""
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is not None and sandbox.state not in _ENDED:
        await end(parts, sandbox, reason)
