"""Create: a new sandbox from a template's snapshot; and the new sandboxes that a fork makes."""

from __future__ import annotations

import logging
from dataclasses import replace

from agentenv.core.errors import AgentEnvError, NotFound
from agentenv.core.ids import new_sandbox_id, new_token
from agentenv.core.lifecycle import State
from agentenv.core.model import CreateRequest, Sandbox, Template
from agentenv.orchestrator import delete
from agentenv.orchestrator.admission import admit
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.start import start
from agentenv.orchestrator.watch import watch

_log = logging.getLogger(__name__)


def find_template(parts: Parts, reference: str) -> Template:
    """A template by id, name or `name:default`. NotFound."""
    name = reference.strip().lower().removesuffix(":default")
    template = parts.store.template(name)
    if template is None:
        raise NotFound(f"template {reference!r} does not exist", "`aenv templates` lists what there is")
    return template


async def create(parts: Parts, request: CreateRequest) -> Sandbox:
    """Start a sandbox from a template; returns once its guest answers."""
    template = find_template(parts, request.template)
    admit(parts, template.machine)
    now_ms = parts.clock.now_ms()
    sandbox = Sandbox(
        sandbox_id=new_sandbox_id(),
        template_id=template.template_id,
        template_name=template.name,
        state=State.CREATING,
        machine=template.machine,
        envd_version=template.envd_version,
        started_at_ms=now_ms,
        end_at_ms=now_ms + 1000 * request.timeout_s,
        timeout_s=request.timeout_s,
        on_timeout=request.on_timeout,
        auto_resume=request.auto_resume,
        allow_public_traffic=request.allow_public_traffic,
        allow_internet_access=request.allow_internet_access,
        metadata=dict(request.metadata),
        env_vars=dict(request.env_vars),
        access_token=new_token(),
        traffic_token=None if request.allow_public_traffic else new_token(),
        snapshot_id=template.snapshot_id,
    )
    created = await launch(parts, sandbox)
    await _count_spawn(parts, template.template_id)
    return created


async def _count_spawn(parts: Parts, template_id: str) -> None:
    """A figure for people: no reason to fail a create that worked."""
    template = parts.store.template(template_id)
    if template is None:
        return
    try:
        await parts.store.put_template(replace(template, spawn_count=template.spawn_count + 1))
    except AgentEnvError as error:
        _log.warning("the spawn count of template %s could not be written: %s", template.name, error)


async def launch(parts: Parts, sandbox: Sandbox) -> Sandbox:
    """Record a new sandbox and start it from its `snapshot_id`. On failure it ends as killed, with the reason."""
    sandbox_id = sandbox.sandbox_id
    began_ms = parts.clock.monotonic_ms()
    async with parts.shared.locked(sandbox_id):  # before it is recorded: from then on it can be found, and killed
        await parts.store.add_sandbox(sandbox)
        try:
            snapshot = parts.store.snapshot(sandbox.snapshot_id or "")
            record, vm = await start(parts, sandbox, snapshot)
            now_ms = parts.clock.now_ms()
            running = await parts.store.transition(
                sandbox_id,
                State.CREATING,
                State.RUNNING,
                vm=record,
                snapshot_id=None,
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
    return running
