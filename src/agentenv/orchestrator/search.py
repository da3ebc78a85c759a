"""Search: which sandboxes a filter means, in the order of their start, a page at a time."""

from __future__ import annotations

from agentenv.core.errors import InvalidInput
from agentenv.core.lifecycle import VISIBLE
from agentenv.core.model import Page, Sandbox, SandboxFilter
from agentenv.orchestrator.parts import Parts


def search(parts: Parts, wanted: SandboxFilter, page: Page) -> tuple[list[Sandbox], str | None]:
    """One page, and the position of the next one. Filters first, then orders, then cuts. InvalidInput: a position that is none."""
    found = [sandbox for sandbox in parts.store.sandboxes() if _matches(sandbox, wanted)]
    found.sort(key=_place, reverse=not page.ascending)
    if page.after is not None:
        cut = _position(page.after)
        found = [sandbox for sandbox in found if (_place(sandbox) > cut if page.ascending else _place(sandbox) < cut)]
    shown = found[: page.limit]
    more = len(found) > page.limit
    return shown, f"{shown[-1].started_at_ms}:{shown[-1].sandbox_id}" if more else None


def count(parts: Parts, wanted: SandboxFilter) -> int:
    """How many there are in all."""
    return sum(1 for sandbox in parts.store.sandboxes() if _matches(sandbox, wanted))


def _matches(sandbox: Sandbox, wanted: SandboxFilter) -> bool:
    return (
        sandbox.purpose == "sandbox"
        and VISIBLE.get(sandbox.state) in wanted.states
        and all(sandbox.metadata.get(k) == v for k, v in wanted.metadata.items())
        and (wanted.template is None or wanted.template in (sandbox.template_id, sandbox.template_name))
        and (wanted.started_after_ms is None or sandbox.started_at_ms >= wanted.started_after_ms)
    )


def _place(sandbox: Sandbox) -> tuple[int, str]:
    return sandbox.started_at_ms, sandbox.sandbox_id


def _position(after: str) -> tuple[int, str]:
    started_ms, _, sandbox_id = after.partition(":")
    if not started_ms.isdigit():
        raise InvalidInput(f"page position {after!r} is not one this server gave out")
    return int(started_ms), sandbox_id
