"""What the API, the proxy and tests may ask of the orchestrator. The real one is `service.Orchestrator`.

Every call raises classes of `agentenv.core.errors` only. All are safe to cancel: the work goes on or is undone as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from agentenv.core.model import CreateRequest, ForkOutcome, LogEntry, MetricSample, Page, Sandbox, SandboxFilter, Template
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
