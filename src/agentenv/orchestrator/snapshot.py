"""Snapshot: an instant of a sandbox as a build of a template, to create sandboxes from for as long as a tag names it."""

from __future__ import annotations

import contextlib

from agentenv.core import templates
from agentenv.core.errors import LimitReached
from agentenv.core.ids import new_build_id
from agentenv.core.lifecycle import State
from agentenv.core.model import Build, Template
from agentenv.core.references import DEFAULT_TAG, parse_new_name
from agentenv.orchestrator.instant import instant
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.sweep import sweep_soon


async def snapshot(parts: Parts, sandbox_id: str, name: str | None, memory: bool = True) -> tuple[Template, str]:
    """Keep this instant under `name`, or under none; answers with the template and the tag. The source goes on.

    A name that a snapshot or a built template has already gets one more build. InvalidInput when the name cannot be given,
    and what `instant` raises. Nothing is kept after a failure.
    """
    wanted = parse_new_name(name) if name is not None else None
    limit = parts.config.limits.templates

    def check(present: list[Template]) -> None:
        if templates.snapshot_home(present, wanted) is None and len(present) >= limit:
            raise LimitReached(f"the node has {limit} templates and snapshots, its limit", "delete some, or raise limits.templates")

    check(parts.store.templates())  # before the sandbox is stopped for nothing
    now_ms = parts.clock.now_ms()
    # Sandboxes made from it start with its chain and go on for a while: half the chain is theirs.
    most_layers = max(2, parts.config.limits.layers_in_chain // 2)
    try:
        with contextlib.ExitStack() as held:
            source, snapshot_id = await instant(parts, sandbox_id, State.SNAPSHOTTING, lambda _: None, held, most_layers, memory)
            build = Build(
                new_build_id(),
                snapshot_id,
                source.machine,
                source.envd_version,
                now_ms,
                dict(source.env_vars),
                source.sandbox_id,
                source.service,
                source.default_user,
                source.default_workdir,
            )

            def change(present: list[Template]) -> Template:
                check(present)
                return templates.with_snapshot(present, build, wanted, now_ms)

            template = await parts.store.change_templates(change)
    finally:
        sweep_soon(parts)  # the build that had the tag before, or what a failure has left
    tag = (wanted and wanted.tag) or DEFAULT_TAG
    await note(parts, sandbox_id, "snapshot taken", snapshot=templates.snapshot_name(template, tag))
    return template, tag
