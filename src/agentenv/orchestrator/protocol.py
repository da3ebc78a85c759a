"""What the API, the proxy and tests may ask of the orchestrator. The real one is `service.Orchestrator`.

Every call raises classes of `agentenv.core.errors` only. All are safe to cancel: the work goes on or is undone as a whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

from agentenv.core.builds import Registry
from agentenv.core.images import Image
from agentenv.core.model import (
    Build,
    Checkpoint,
    CreateRequest,
    LogEntry,
    LogQuery,
    MetricSample,
    OnTimeout,
    Page,
    Sandbox,
    SandboxFilter,
    StartOutcome,
    Template,
)
from agentenv.core.network import NetworkSettings
from agentenv.core.storage import Collection
from agentenv.host.command import Progress, no_progress
from agentenv.image.push import Pushed
from agentenv.orchestrator.layer_uses import LayerUse
from agentenv.orchestrator.verify import Verified
from agentenv.secret.vault import Vault
from agentenv.template.builds import Builds
from agentenv.volume.registry import Volumes


class ImageLibrary(Protocol):
    """The images of a node; `images.Images` is the real one."""

    def all(self) -> list[Image]:
        """Every image, the one used last first."""
        ...

    def find(self, text: str) -> Image:
        """By name, digest, or the beginning of a digest. NotFound, InvalidInput."""
        ...

    async def remove(self, text: str) -> Image:
        """Forget a name, and the image with its last one. NotFound, InvalidInput."""
        ...

    async def pull(self, text: str, account: Registry | None = None, progress: Progress = no_progress) -> Image:
        """The image that a name means at its registry now."""
        ...

    async def receive(self, name: str, chunks: AsyncIterator[bytes], progress: Progress = no_progress) -> Image:
        """The image in an archive that arrives in pieces."""
        ...


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

    @property
    def images(self) -> ImageLibrary:
        """The node's images."""
        ...

    async def push(self, template: str, name: str, account: Registry | None = None, progress: Progress = no_progress) -> Pushed:
        """Publish a template's disk as an image; `progress` may be called on any thread."""
        ...

    async def layers(self) -> list[LayerUse]:
        """Every layer of the node's disk, the largest first."""
        ...

    async def verify_layer(self, layer_id: str) -> Verified:
        """Read a layer and compare it with its checksum; a damaged one that can be had again is made anew. NotFound."""
        ...

    @property
    def builds(self) -> Builds:
        """The node's template builds."""
        ...

    async def create(self, request: CreateRequest) -> Sandbox:
        """Start a sandbox from a template; returns once its guest answers. NotFound: unknown template. LimitReached: node full."""
        ...

    async def created_by(self, key: str) -> Sandbox | None:
        """The sandbox of an earlier `create` with that `creation.key`, alive or not, as long as it is remembered (an hour at most)."""
        ...

    async def create_many(self, requests: Sequence[CreateRequest]) -> list[StartOutcome]:
        """Start several at once, each with its own outcome, in the order of the requests. NotFound, LimitReached when none can start."""
        ...

    async def get(self, sandbox_id: str) -> Sandbox:
        """NotFound when it does not exist or is being killed."""
        ...

    async def search(self, wanted: SandboxFilter, page: Page) -> tuple[list[Sandbox], str | None]:
        """Sandboxes by start time and the position of the next page (None on the last)."""
        ...

    async def count(self, wanted: SandboxFilter) -> int:
        """How many sandboxes `search` would find in all."""
        ...

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """Expire `timeout_s` from now, may shorten; 0 acts now by the sandbox's policy. Conflict when not running."""
        ...

    async def refresh(self, sandbox_id: str, duration_s: int) -> None:
        """Extend only."""
        ...

    async def pause(self, sandbox_id: str, memory: bool = True, require_healthy_guest: bool = False) -> None:
        """With its memory, or its disk alone. Conflict when already paused. On failure the sandbox runs on.

        Unavailable when its guest does not answer, and `memory` is false or `require_healthy_guest` true.
        """
        ...

    async def write_out(self) -> None:
        """What calls have answered until now survives a crash of the machine, too, once this has returned. Internal."""
        ...

    async def connect(self, sandbox_id: str, timeout_s: int, memory: bool = True) -> tuple[Sandbox, bool]:
        """Make it run and last at least `timeout_s` from now (never shortens). True when it had to be resumed.

        `memory` false boots a paused one from its disk. GuestUnresponsive when its memory is of no use.
        """
        ...

    async def resume(self, sandbox_id: str, timeout_s: int, memory: bool = True, on_timeout: OnTimeout | None = None) -> Sandbox:
        """The oldest form: Conflict when it runs already. May give it a new policy at its timeout."""
        ...

    async def fork(self, sandbox_id: str, count: int, timeout_s: int) -> list[StartOutcome]:
        """`count` copies that go on from this instant; the source runs on (or stays paused). Each child has its own outcome."""
        ...

    async def checkpoint(self, sandbox_id: str, name: str, memory: bool = True) -> Checkpoint:
        """Keep this instant of a running or paused sandbox, for itself to go back to. `name` may be empty.

        InvalidInput, Conflict (the name is taken), LimitReached.
        """
        ...

    async def checkpoints(self, sandbox_id: str) -> list[Checkpoint]:
        """The checkpoints of a sandbox, oldest first. NotFound."""
        ...

    async def remove_checkpoint(self, sandbox_id: str, reference: str) -> None:
        """Forget the checkpoint of that id or name; its children become its parent's. NotFound."""
        ...

    async def rollback(self, sandbox_id: str, reference: str = "") -> Sandbox:
        """Make it what it was at a checkpoint (empty: at the one it descends from). A paused one stays paused.

        InvalidInput when it has none, NotFound. As before after any failure.
        """
        ...

    async def snapshot(self, sandbox_id: str, name: str | None, memory: bool = True) -> tuple[Template, str]:
        """Keep this instant of a running or paused sandbox under `name` (`[namespace/]name[:tag]`); the template, and the tag in it."""
        ...

    async def set_network(self, sandbox_id: str, wanted: NetworkSettings, allow_internet_access: bool | None) -> None:
        """Replace all network settings that can change while it runs. Conflict when it does not."""
        ...

    async def kill(self, sandbox_id: str) -> None:
        """End it, running or paused, and free everything. NotFound the second time."""
        ...

    async def logs(self, sandbox_id: str, query: LogQuery) -> list[LogEntry]:
        """A part of the sandbox's life on this node; also of one that has ended, while it is remembered. NotFound."""
        ...

    async def metrics(self, sandbox_id: str, start_ms: int, end_ms: int | None) -> list[MetricSample]:
        """What it used from `start_ms` to `end_ms` (both included; None: until now), oldest first; also when it has ended. NotFound."""
        ...

    async def latest_metrics(self, sandbox_ids: Iterable[str]) -> dict[str, MetricSample]:
        """The newest sample of each that has one; the others are left out."""
        ...

    async def collect(self, everything: bool = False, dry_run: bool = False) -> Collection:
        """Free what nothing reaches, and of caches what was used longest ago until `storage.low_percent` is used, or all of it.

        A dry run changes nothing and tells what would go.
        """
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
