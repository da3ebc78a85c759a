"""What the API, the proxy and tests may ask of the orchestrator. The real one is `service.Orchestrator`.

Every call raises classes of `agentenv.core.errors` only. All are safe to cancel: the work goes on or is undone as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from agentenv.core.model import Build, CreateRequest, ForkOutcome, LogEntry, MetricSample, Page, Sandbox, SandboxFilter, Template
from agentenv.secret.vault import Vault
from agentenv.volume.registry import Volumes


class Orchestrator(Protocol):
    """Lifecycle of the sandboxes of one node, and what they may use."""

    @property
    def volumes(self) -> Volumes:
        """The node's volumes."""
        ...

    @property
    def secrets(self) -> Vault:
        """The node's secrets."""
        ...

    async def create(self, request: CreateRequest) -> Sandbox:
        """Start a sandbox from a template; returns once its guest answers. NotFound: unknown template. LimitReached: node full."""
        ...

    async def get(self, sandbox_id: str) -> Sandbox:
        """NotFound when it does not exist or is being killed."""
        ...

    async def search(self, wanted: SandboxFilter, page: Page) -> tuple[list[Sandbox], str | None]:
        """Sandboxes by start time and the position of the next page (None on the last)."""
        ...

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """Expire `timeout_s` from now, may shorten; 0 acts now by the sandbox's policy. Conflict when not running."""
        ...

    async def refresh(self, sandbox_id: str, duration_s: int) -> None:
        """Extend only."""
        ...

    async def pause(self, sandbox_id: str) -> None:
        """Conflict when already paused. On failure the sandbox runs on."""
        ...

    async def connect(self, sandbox_id: str, timeout_s: int) -> tuple[Sandbox, bool]:
        """Make it run and last at least `timeout_s` from now (never shortens). True when it had to be resumed."""
        ...

    async def resume(self, sandbox_id: str, timeout_s: int) -> Sandbox:
        """The oldest form: Conflict when it runs already."""
        ...

    async def fork(self, sandbox_id: str, count: int, timeout_s: int) -> list[ForkOutcome]:
        """`count` copies that go on from this instant; the source runs on (or stays paused). Each child has its own outcome."""
        ...

    async def snapshot(self, sandbox_id: str, name: str | None) -> tuple[Template, str]:
        """Keep this instant of a running or paused sandbox under `name` (`[namespace/]name[:tag]`); the template, and the tag in it."""
        ...

    async def kill(self, sandbox_id: str) -> None:
        """End it, running or paused, and free everything. NotFound the second time."""
        ...

    async def logs(self, sandbox_id: str, start_ms: int, limit: int) -> list[LogEntry]:
        """The sandbox's life on this node, oldest first."""
        ...

    async def metrics(self, sandbox_id: str, start_ms: int, end_ms: int | None) -> list[MetricSample]:
        """What it used from `start_ms` to `end_ms` (both included; None: until now), oldest first; also when it has ended. NotFound."""
        ...

    async def latest_metrics(self, sandbox_ids: Iterable[str]) -> dict[str, MetricSample]:
        """The newest sample of each that has one; the others are left out."""
        ...

    async def templates(self) -> list[Template]:
        """All templates, newest first."""
        ...

    async def template(self, reference: str) -> Template:
        """By id, name or `name:tag`. NotFound, InvalidInput."""
        ...

    async def assign_tags(self, target: str, tags: Sequence[str]) -> Build:
        """Give tags to the build that `target` names, taking them from others. NotFound, InvalidInput, LimitReached."""
        ...

    async def remove_tags(self, name: str, tags: Sequence[str]) -> None:
        """Take tags off a template; a build goes with its last tag, a template with its last build. NotFound; InvalidInput: `default`."""
        ...

    async def delete_template(self, reference: str) -> None:
        """Remove a template, or only the tag that is named. NotFound; InvalidInput while it is in use, and for the node's own."""
        ...

    async def set_public(self, reference: str, is_public: bool) -> Template:
        """Note whether a template is for everyone. NotFound."""
        ...
