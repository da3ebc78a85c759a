"""The orchestrator: one small method per verb, each run to its end even when the caller goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from agentenv.core.builds import Registry
from agentenv.core.errors import Conflict, Internal
from agentenv.core.lifecycle import VISIBLE, State
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
from agentenv.orchestrator import (
    checkpoint,
    collect,
    create,
    delete,
    evict,
    fork,
    keepers,
    network,
    pause,
    resume,
    rollback,
    search,
    snapshot,
    templates,
    verify,
    warm,
)
from agentenv.orchestrator.images import Images
from agentenv.orchestrator.layer_uses import LayerUse, layer_uses
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.publish import publish
from agentenv.orchestrator.sweep import sweep_soon
from agentenv.orchestrator.verify import Verified
from agentenv.orchestrator.workshop import VmWorkshop
from agentenv.secret.vault import Vault
from agentenv.template.builds import Builds
from agentenv.volume.registry import Volumes

_log = logging.getLogger(__name__)
T = TypeVar("T")
_CREATIONS_KEPT_MS = 3_600_000  # the SDKs repeat for minutes at most


class Orchestrator:
    """Lifecycle of the sandboxes of one node; see `protocol.Orchestrator` for what each call promises."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._keepers: list[asyncio.Task[None]] = []
        limits, ready_deadline_s = parts.config.limits, parts.config.guest.service_deadline_s
        self._images = Images(parts)
        self._builds = Builds(
            parts.store,
            VmWorkshop(parts),
            parts.paths,
            parts.clock,
            limits,
            self._images,
            ready_deadline_s,
            parts.config.network.denied_cidrs,
        )
        builds = self._builds
        parts.shared.file_caches += [builds.files.cache, builds.caches.files, builds.fetcher.files, parts.image_registry.blobs.cache]

    @property
    def volumes(self) -> Volumes:
        """The node's volumes."""
        return self._parts.volumes

    @property
    def secrets(self) -> Vault:
        """The node's secrets."""
        return self._parts.secrets

    @property
    def images(self) -> Images:
        """The node's images."""
        return self._images

    @property
    def builds(self) -> Builds:
        """The node's template builds."""
        return self._builds

    async def open(self) -> None:
        """Settle the builds of an earlier server; start acting on timeouts, stalled VMs and a full disk, and reading metrics."""
        await asyncio.to_thread(self._parts.image_registry.open)
        await self._builds.open()
        self._keepers = keepers.start(self._parts, self._images)

    async def close(self) -> None:
        """Let verbs under way end and let go of all VMs; they go on."""
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        await self._builds.close()
        await self._parts.shared.settle()
        await warm.drain(self._parts)
        await self._write_out_layers()
        for watcher in list(self._parts.shared.watchers):
            watcher.cancel()
        for vm in (*self._parts.shared.vms.values(), *(vm for _, vm in self._parts.shared.formers.values())):
            await vm.close()

    async def _write_out_layers(self) -> None:
        """The machine may go down next."""
        try:
            await asyncio.to_thread(self._parts.layers.write_out)
        except OSError as error:
            _log.error("the layers could not be written out: %s", error)

    def on_gone(self, listener: Callable[[str], None]) -> None:
        """`listener(sandbox_id)` is called at the moment a sandbox's VM stops answering for good or for a while."""
        self._parts.shared.gone_listeners.append(listener)

    async def create(self, request: CreateRequest) -> Sandbox:
        """Start a sandbox from a template."""
        return await self._whole(create.create(self._parts, request), "create")

    async def create_many(self, requests: Sequence[CreateRequest]) -> list[StartOutcome]:
        """Start several at once."""
        return await self._whole(create.create_many(self._parts, requests), "create")

    async def get(self, sandbox_id: str) -> Sandbox:
        """A sandbox that is not ended."""
        return self.peek(sandbox_id)

    def peek(self, sandbox_id: str) -> Sandbox:
        """`get` without waiting, for the proxy's route look-up."""
        sandbox = delete.alive(self._parts, sandbox_id)
        if sandbox.purpose == "build":
            raise delete.missing(sandbox_id)
        return sandbox

    def peek_running(self) -> list[Sandbox]:
        """All sandboxes that have a VM, without waiting."""
        found = (self._parts.store.sandbox(sandbox_id) for sandbox_id in self._parts.shared.vms)
        return [s for s in found if s is not None and s.vm is not None and s.purpose == "sandbox" and s.state in VISIBLE]

    def remembers(self, sandbox_id: str) -> bool:
        """Whether there is, or lately was, such a sandbox."""
        return self._parts.store.sandbox(sandbox_id) is not None

    async def created_by(self, key: str) -> Sandbox | None:
        """The sandbox that a creation with this key made, alive or not, for an hour or as long as its row is kept."""
        found = self._parts.store.created_by(key)
        oldest_ms = self._parts.clock.now_ms() - _CREATIONS_KEPT_MS
        return found if found is not None and found.started_at_ms > oldest_ms else None

    def heard(self, sandbox_id: str) -> None:
        """The agent of a running sandbox has just answered somebody."""
        self._parts.shared.heard_ms[sandbox_id] = self._parts.clock.monotonic_ms()

    def namespace(self, slot: int) -> str:
        """The network namespace of a slot."""
        return self._parts.slots.slot(slot).namespace

    async def search(self, wanted: SandboxFilter, page: Page) -> tuple[list[Sandbox], str | None]:
        """One page of those that are meant."""
        return search.search(self._parts, wanted, page)

    async def count(self, wanted: SandboxFilter) -> int:
        """How many there are in all."""
        return search.count(self._parts, wanted)

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """Expire `timeout_s` from now; 0 acts before this returns."""
        await self._whole(self._set_timeout(sandbox_id, timeout_s), "set timeout")

    async def _set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        parts = self._parts
        async with parts.shared.locked(sandbox_id):
            sandbox = self.peek(sandbox_id)
            if sandbox.state is not State.RUNNING:
                raise Conflict(f"sandbox {sandbox_id} is {sandbox.state}")
            await parts.store.change(sandbox_id, end_at_ms=parts.clock.now_ms() + 1000 * timeout_s)
        parts.shared.expiry_changed.set()
        if timeout_s == 0:
            await evict.expire(parts, sandbox_id)

    async def refresh(self, sandbox_id: str, duration_s: int) -> None:
        """Extend only."""
        parts = self._parts
        async with parts.shared.locked(sandbox_id):
            sandbox = self.peek(sandbox_id)
            await parts.store.change(sandbox_id, end_at_ms=max(sandbox.end_at_ms, parts.clock.now_ms() + 1000 * duration_s))
        parts.shared.expiry_changed.set()

    async def pause(self, sandbox_id: str, memory: bool = True, require_healthy_guest: bool = False) -> None:
        """Capture and free."""
        await self._whole(pause.pause(self._parts, sandbox_id, memory, require_healthy_guest), "pause")

    async def write_out(self) -> None:
        """Put what has been promised until now beyond a crash of the machine."""
        try:
            await asyncio.to_thread(self._parts.write_out, self._parts.paths.home)
            await asyncio.to_thread(self._parts.layers.write_out)
        except OSError as error:
            raise Internal(
                f"it was done, but the node's disk could not be written out: {error.strerror}",
                "it survives the end of any process, and maybe not a crash of the machine; look at the disk",
            ) from error

    async def connect(self, sandbox_id: str, timeout_s: int, memory: bool = True) -> tuple[Sandbox, bool]:
        """Make it run and last."""
        return await self._whole(resume.connect(self._parts, sandbox_id, timeout_s, memory), "connect")

    async def wake(self, sandbox_id: str, timeout_s: int) -> Sandbox | None:
        """What authorised traffic does to a sandbox that sleeps. None when it must stay asleep."""
        return await self._whole(resume.wake(self._parts, sandbox_id, timeout_s), "wake")

    async def resume(self, sandbox_id: str, timeout_s: int, memory: bool = True, on_timeout: OnTimeout | None = None) -> Sandbox:
        """Bring a paused sandbox back."""
        return await self._whole(resume.resume(self._parts, sandbox_id, timeout_s, memory, on_timeout), "resume")

    async def fork(self, sandbox_id: str, count: int, timeout_s: int) -> list[StartOutcome]:
        """Children that go on from this instant."""
        return await self._whole(fork.fork(self._parts, sandbox_id, count, timeout_s), "fork")

    async def checkpoint(self, sandbox_id: str, name: str, memory: bool = True) -> Checkpoint:
        """Keep this instant for the sandbox itself."""
        return await self._whole(checkpoint.checkpoint(self._parts, sandbox_id, name, memory), "checkpoint")

    async def checkpoints(self, sandbox_id: str) -> list[Checkpoint]:
        """Those it has, oldest first."""
        self.peek(sandbox_id)
        return checkpoint.of_sandbox(self._parts, sandbox_id)

    async def remove_checkpoint(self, sandbox_id: str, reference: str) -> None:
        """Forget one."""
        await self._whole(checkpoint.remove(self._parts, sandbox_id, reference), "remove checkpoint")

    async def rollback(self, sandbox_id: str, reference: str = "") -> Sandbox:
        """Back to a checkpoint."""
        return await self._whole(rollback.rollback(self._parts, sandbox_id, reference), "rollback")

    async def snapshot(self, sandbox_id: str, name: str | None, memory: bool = True) -> tuple[Template, str]:
        """Keep this instant as a build of a template."""
        return await self._whole(snapshot.snapshot(self._parts, sandbox_id, name, memory), "snapshot")

    async def set_network(self, sandbox_id: str, wanted: NetworkSettings, allow_internet_access: bool | None) -> None:
        """Replace its network settings."""
        await self._whole(network.set_network(self._parts, sandbox_id, wanted, allow_internet_access), "set network")

    async def kill(self, sandbox_id: str) -> None:
        """End it and free everything."""
        await self._whole(delete.kill(self._parts, sandbox_id), "kill")

    async def logs(self, sandbox_id: str, query: LogQuery) -> list[LogEntry]:
        """The sandbox's life on this node; also of one that has ended, while its row is kept."""
        if self._parts.store.sandbox(sandbox_id) is None:
            raise delete.missing(sandbox_id)
        return await self._parts.store.events(sandbox_id, query)

    async def metrics(self, sandbox_id: str, start_ms: int, end_ms: int | None) -> list[MetricSample]:
        """What it used; also of one that has ended, while its row is kept."""
        if self._parts.store.sandbox(sandbox_id) is None:
            raise delete.missing(sandbox_id)
        history = self._parts.shared.metrics.get(sandbox_id)
        return [] if history is None else history.between(start_ms, end_ms)

    async def latest_metrics(self, sandbox_ids: Iterable[str]) -> dict[str, MetricSample]:
        """The newest sample of each that has one."""
        histories = {sandbox_id: self._parts.shared.metrics.get(sandbox_id) for sandbox_id in sandbox_ids}
        return {sandbox_id: history.latest() for sandbox_id, history in histories.items() if history is not None}

    async def collect(self, everything: bool = False, dry_run: bool = False) -> Collection:
        """Free what nothing reaches, and what caches can give up."""
        goal = collect.everything if everything else None
        return await self._whole(collect.collect(self._parts, goal, dry_run=dry_run), "collect")

    async def templates(self) -> list[Template]:
        """All templates, newest first."""
        return self._parts.store.templates()

    async def template(self, reference: str) -> Template:
        """By id, name or `name:tag`."""
        return templates.named(self._parts.store, reference)

    async def assign_tags(self, target: str, tags: Sequence[str]) -> Build:
        """Give tags to a build."""
        parts = self._parts
        return await self._swept(templates.assign_tags(parts.store, target, tags, parts.clock.now_ms()), "assign tags")

    async def remove_tags(self, name: str, tags: Sequence[str]) -> None:
        """Take tags off a template."""
        parts = self._parts
        await self._swept(templates.remove_tags(parts.store, name, tags, parts.clock.now_ms()), "remove tags")

    async def delete_template(self, reference: str) -> None:
        """Remove a template, or one tag of it."""
        parts = self._parts
        await self._swept(templates.delete(parts.store, reference, parts.clock.now_ms()), "delete template")

    async def set_public(self, reference: str, is_public: bool) -> Template:
        """Note whether a template is for everyone."""
        parts = self._parts
        return await self._whole(templates.set_public(parts.store, reference, is_public, parts.clock.now_ms()), "set public")

    async def push(self, template: str, name: str, account: Registry | None = None, progress: Progress = no_progress) -> Pushed:
        """Publish a template's disk as an image in a registry; only blobs that the registry lacks are sent."""
        return await self._whole(publish(self._parts, template, name, account, progress), "push")

    async def layers(self) -> list[LayerUse]:
        """Every layer of the node's store, what uses it and what it takes; the largest first."""
        return await layer_uses(self._parts)

    async def verify_layer(self, layer_id: str) -> Verified:
        """Compare a layer with its checksum, and make it anew if it is damaged and can be had again."""
        return await self._whole(verify.verify(self._parts, self._images, layer_id), "verify a layer")

    async def _swept(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Work that may leave builds without a name: their bytes are freed soon after."""
        result = await self._whole(work, name)
        sweep_soon(self._parts)
        return result

    async def _whole(self, work: Coroutine[Any, Any, T], name: str) -> T:
        return await asyncio.shield(self._parts.shared.background(work, name))
