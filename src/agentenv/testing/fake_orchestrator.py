"""An orchestrator in memory: the same answers as the real one without a VM, a disk or a second of waiting.

It keeps the lifecycle table (every state change is checked against it), timeouts by policy on whatever clock it is given,
filters, paging and the node's limit. Tests steer it: `fail_next` makes one call fail, `hold` stops a verb in its
intermediate state until released.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentenv.config.limits import LimitsConfig
from agentenv.core import checkpoints as tree
from agentenv.core import ids, templates
from agentenv.core.builds import BuildJob, CachedStep, Registry
from agentenv.core.clock import Clock, SystemClock, rfc3339
from agentenv.core.disk_size import with_disk
from agentenv.core.errors import (
    AgentEnvError,
    Conflict,
    GuestUnresponsive,
    Internal,
    InvalidInput,
    LimitReached,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from agentenv.core.lifecycle import CAPTURING, SERVING, VISIBLE, State, is_allowed
from agentenv.core.model import (
    Build,
    Checkpoint,
    CreateRequest,
    LogEntry,
    LogQuery,
    Machine,
    MetricSample,
    OnTimeout,
    Page,
    Sandbox,
    SandboxFilter,
    StartOutcome,
    Template,
    new_sandbox,
)
from agentenv.core.network import NetworkSettings
from agentenv.core.paths import NodePaths
from agentenv.core.references import DEFAULT_TAG, parse_new_name
from agentenv.core.storage import Collection, DiskUse
from agentenv.host.command import Progress, no_progress
from agentenv.image.manifest import Descriptor
from agentenv.image.push import Pushed
from agentenv.orchestrator import templates as administration
from agentenv.orchestrator.layer_uses import LayerUse
from agentenv.orchestrator.verify import Verified
from agentenv.secret.vault import Vault
from agentenv.template.builds import Builds
from agentenv.testing.fake_store import MemoryShelf
from agentenv.testing.fake_workshop import FakeImages, FakeWorkshop
from agentenv.volume import mounts
from agentenv.volume.registry import Volumes

_GONE = frozenset({State.KILLING, State.KILLED})
_HOLDS_ROOM = SERVING | CAPTURING | {State.CREATING, State.RESUMING, State.ROLLING_BACK}


class ManualClock:
    """A clock that moves only when told to; sleepers wake when it passes their time."""

    def __init__(self, start_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = float(start_ms)
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the epoch."""
        return int(self._now_ms)

    def monotonic_ms(self) -> float:
        """The same clock; it never steps back."""
        return self._now_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait until `advance_ms` has moved far enough."""
        if duration_ms <= 0:
            await asyncio.sleep(0)
            return
        sleeper = (self._now_ms + duration_ms, asyncio.Event())
        self._sleepers.append(sleeper)
        try:
            await sleeper[1].wait()
        finally:
            self._sleepers.remove(sleeper)

    def advance_ms(self, duration_ms: float) -> None:
        """Move forward and wake whoever is due."""
        self._now_ms += duration_ms
        for due_ms, woken in self._sleepers:
            if due_ms <= self._now_ms:
                woken.set()


def make_template(name: str = "base", created_at_ms: int = 1_700_000_000_000) -> Template:
    """A template that a test can create sandboxes from."""
    machine = Machine(vcpu_count=1, memory_mb=512, disk_mb=8192)
    build = Build(ids.new_build_id(), ids.new_snapshot_id(), machine, "0.6.13", created_at_ms)
    return templates.first(build, (name,), "builtin", (DEFAULT_TAG,), created_at_ms)


class TemplateBook:
    """Implements `orchestrator.templates.TemplateStore` in memory."""

    def __init__(self, templates: Iterable[Template], sandboxes: dict[str, Sandbox]) -> None:
        self._by_id = {template.template_id: template for template in templates}
        self._sandboxes = sandboxes
        self.builds: MemoryShelf[BuildJob] = MemoryShelf("build_id")
        self.cached_steps: MemoryShelf[CachedStep] = MemoryShelf("key")

    def templates(self) -> list[Template]:
        """All templates, newest first."""
        return sorted(self._by_id.values(), key=lambda template: (template.created_at_ms, template.template_id), reverse=True)

    def sandboxes(self) -> list[Sandbox]:
        """All sandboxes in any state."""
        return list(self._sandboxes.values())

    async def change_templates(self, change: Callable[[list[Template]], Template]) -> Template:
        """Keep what `change` makes; one without builds goes."""
        template = change(self.templates())
        self._by_id.pop(template.template_id, None)
        if template.builds:
            self._by_id[template.template_id] = template
        return template

    def count_spawn(self, template_id: str, at_ms: int) -> None:
        """One more sandbox was made from it, if it is still there."""
        if (used := self._by_id.get(template_id)) is not None:
            self._by_id[template_id] = replace(used, spawn_count=used.spawn_count + 1, last_spawned_at_ms=at_ms)


class FakeOrchestrator:
    """Implements `orchestrator.protocol.Orchestrator`. `sandboxes_running` is the node's limit."""

    def __init__(self, clock: Clock | None = None, templates: Iterable[Template] | None = None, sandboxes_running: int = 200) -> None:
        self.clock: Clock = clock or SystemClock()
        self.sandboxes_running = sandboxes_running
        self.written_out = 0
        self.hung: set[str] = set()  # sandboxes whose guest does not answer
        self._sandboxes: dict[str, Sandbox] = {}
        self._book = TemplateBook(templates if templates is not None else [make_template()], self._sandboxes)
        self._checkpoints: defaultdict[str, dict[str, Checkpoint]] = defaultdict(dict)  # by sandbox, then by id
        self._logs: defaultdict[str, list[LogEntry]] = defaultdict(list)
        self._metrics: defaultdict[str, list[MetricSample]] = defaultdict(list)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._failures: defaultdict[str, deque[BaseException]] = defaultdict(deque)
        self._holds: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}
        self.home = TemporaryDirectory(prefix="aenv-fake-")  # goes when this is collected
        self.volumes = Volumes(MemoryShelf("volume_id"), Path(self.home.name) / "volumes", self.clock)
        self.secrets = Vault(MemoryShelf("secret_id"), Path(self.home.name) / "secret-key", self.clock)
        self.workshop = FakeWorkshop(self._book.templates)
        self.images = FakeImages(self.workshop)
        paths = NodePaths(Path(self.home.name), Path(self.home.name) / "run")
        self.verified: dict[str, Verified] = {}
        self.builds = Builds(self._book, self.workshop, paths, self.clock, LimitsConfig(disk_reserve_mb=0), self.images, 600)
        self.builds.files.open()

    # -- steering, for tests

    def fail_next(self, verb: str, error: BaseException) -> None:
        """The next call of `verb` fails with `error` after its first state change; a fork also asks for `fork_child`, once a child."""
        self._failures[verb].append(error)

    @contextmanager
    def hold(self, verb: str) -> Iterator[asyncio.Event]:
        """Calls of `verb` stop in their intermediate state until the block ends; the event tells that one has got there."""
        arrived, release = self._holds[verb] = (asyncio.Event(), asyncio.Event())
        try:
            yield arrived
        finally:
            release.set()
            del self._holds[verb]

    def add_sample(self, sandbox_id: str, cpu_used_percent: float = 12.5, timestamp_ms: int | None = None) -> MetricSample:
        """A sandbox uses that much CPU, a quarter of its memory and an eighth of its disk, now or at the given time."""
        machine = self._sandboxes[sandbox_id].machine
        memory_bytes, disk_bytes = machine.memory_mb << 20, machine.disk_mb << 20
        at_ms = self.clock.now_ms() if timestamp_ms is None else timestamp_ms
        sizes_bytes = (memory_bytes // 4, memory_bytes, memory_bytes // 16, disk_bytes // 8, disk_bytes)
        self._metrics[sandbox_id].append(MetricSample(at_ms, machine.vcpu_count, cpu_used_percent, *sizes_bytes))
        return self._metrics[sandbox_id][-1]

    def peek(self, sandbox_id: str) -> Sandbox:
        """The stored sandbox, killed ones too. KeyError when it never was."""
        return self._sandboxes[sandbox_id]

    # -- the protocol

    async def push(self, template: str, name: str, account: Registry | None = None, progress: Progress = no_progress) -> Pushed:
        """The registry takes all but `denied` from callers without credentials."""
        administration.resolve(self._book, template)
        await asyncio.to_thread(progress, "pack the layers", 1, 1)
        if "denied" in name and account is None:
            raise PermissionDenied(f"image '{name}': denied", "give credentials")
        return Pushed(name, f"sha256:{'d' * 64}", (Descriptor("", f"sha256:{'e' * 64}", 2000),))

    async def layers(self) -> list[LayerUse]:
        """The layers of its images."""
        users: defaultdict[str, list[str]] = defaultdict(list)
        for image in self.images.all():
            for layer_id in image.layer_ids:
                users[layer_id].append(f"image {image.names[0]}")
        return [LayerUse(layer_id, 1000, tuple(names)) for layer_id, names in users.items()]

    async def verify_layer(self, layer_id: str) -> Verified:
        """What `verified` says of it, else that it is intact."""
        if layer_id not in {layer.layer_id for layer in await self.layers()}:
            raise NotFound(f"there is no layer {layer_id!r}", "`aenv layers` lists those there are")
        return self.verified.get(layer_id, Verified(layer_id, "intact", "sha256:0"))

    async def create(self, request: CreateRequest) -> Sandbox:
        """Start a sandbox from a template."""
        self._expire_due()
        template, build = administration.resolve(self._book, request.template)
        self._check_room()
        volume_mounts = mounts.resolve(self.volumes, request.volume_mounts)
        machine = with_disk(build.machine, request.disk_mb, f"template {template.name}")
        sandbox = replace(new_sandbox(request, template, build, self.clock.now_ms()), machine=machine, volume_mounts=volume_mounts)
        self._sandboxes[sandbox.sandbox_id] = sandbox
        try:
            await self._work("create")
        except BaseException:
            self._end(sandbox.sandbox_id, "create failed")
            raise
        self._book.count_spawn(template.template_id, self.clock.now_ms())
        self._change(sandbox.sandbox_id, creation=request.creation)
        return self._run(sandbox.sandbox_id, now_ms=self.clock.now_ms(), timeout_s=request.timeout_s, started=True)

    async def create_many(self, requests: Sequence[CreateRequest]) -> list[StartOutcome]:
        """One after the other."""
        for request in requests:
            administration.resolve(self._book, request.template)
        self._check_room()
        return [await self._outcome(request) for request in requests]

    async def _outcome(self, request: CreateRequest) -> StartOutcome:
        try:
            return StartOutcome(await self.create(request))
        except AgentEnvError as error:
            return StartOutcome(None, error.status, str(error))

    async def created_by(self, key: str) -> Sandbox | None:
        """The newest sandbox of a creation with that key, for an hour."""
        oldest_ms = self.clock.now_ms() - 3_600_000
        found = [s for s in self._sandboxes.values() if s.creation is not None and s.creation.key == key and s.started_at_ms > oldest_ms]
        return found[-1] if found else None

    async def get(self, sandbox_id: str) -> Sandbox:
        """NotFound when it does not exist or is being killed."""
        self._expire_due()
        return self._alive(sandbox_id)

    async def search(self, wanted: SandboxFilter, page: Page) -> tuple[list[Sandbox], str | None]:
        """Filter, then sort by start time and id, then cut the page."""
        self._expire_due()
        found = sorted(
            (sandbox for sandbox in self._sandboxes.values() if _matches(sandbox, wanted)), key=_order, reverse=not page.ascending
        )
        if page.after is not None:
            last = _parse_position(page.after)
            found = [sandbox for sandbox in found if (_order(sandbox) > last if page.ascending else _order(sandbox) < last)]
        part = found[: page.limit]
        more = len(found) > len(part)
        return part, f"{rfc3339(part[-1].started_at_ms)}__{part[-1].sandbox_id}" if more and part else None

    async def count(self, wanted: SandboxFilter) -> int:
        """How many there are in all."""
        self._expire_due()
        return sum(_matches(sandbox, wanted) for sandbox in self._sandboxes.values())

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """Expire `timeout_s` from now; 0 acts now by the sandbox's policy."""
        async with self._locked(sandbox_id, State.RUNNING) as sandbox:
            self._change(sandbox.sandbox_id, end_at_ms=self.clock.now_ms() + timeout_s * 1000)
        self._expire_due()

    async def refresh(self, sandbox_id: str, duration_s: int) -> None:
        """Extend only."""
        async with self._locked(sandbox_id, State.RUNNING) as sandbox:
            self._change(sandbox_id, end_at_ms=max(sandbox.end_at_ms, self.clock.now_ms() + duration_s * 1000))

    async def pause(self, sandbox_id: str, memory: bool = True, require_healthy_guest: bool = False) -> None:
        """Conflict when already paused. On failure the sandbox runs on."""
        async with self._locked(sandbox_id, State.RUNNING):
            unresponsive = sandbox_id in self.hung
            if unresponsive and (require_healthy_guest or not memory):
                raise Unavailable(f"the guest of sandbox {sandbox_id} did not answer; it runs on")
            self._move(sandbox_id, State.PAUSING)
            try:
                await self._work("pause")
            except BaseException:
                if self._sandboxes[sandbox_id].state not in _GONE:
                    self._move(sandbox_id, State.RUNNING)
                raise
            self._alive(sandbox_id)
            mode = "full" if memory else "filesystem"
            self._move(sandbox_id, State.PAUSED, snapshot_id=ids.new_snapshot_id(), pause_mode=mode, guest_unresponsive=unresponsive)

    async def write_out(self) -> None:
        """Count it."""
        await self._work("write_out")
        self.written_out += 1

    async def connect(self, sandbox_id: str, timeout_s: int, memory: bool = True) -> tuple[Sandbox, bool]:
        """Make it run and last at least `timeout_s` from now."""
        async with self._locked(sandbox_id, State.RUNNING, State.PAUSED) as sandbox:
            if sandbox.state is State.PAUSED:
                return await self._resume(sandbox_id, timeout_s, memory), True
            end_at_ms = max(sandbox.end_at_ms, self.clock.now_ms() + timeout_s * 1000)
            return self._change(sandbox_id, end_at_ms=end_at_ms), False

    async def resume(self, sandbox_id: str, timeout_s: int, memory: bool = True, on_timeout: OnTimeout | None = None) -> Sandbox:
        """Conflict when it runs already."""
        async with self._locked(sandbox_id, State.PAUSED):
            await self._resume(sandbox_id, timeout_s, memory)
            return self._change(sandbox_id, **({} if on_timeout is None else {"on_timeout": on_timeout}))

    async def fork(self, sandbox_id: str, count: int, timeout_s: int) -> list[StartOutcome]:
        """`count` copies; the source runs on, or stays paused."""
        async with self._locked(sandbox_id, State.RUNNING, State.PAUSED) as sandbox:
            was_running = sandbox.state is State.RUNNING
            if was_running:
                self._move(sandbox_id, State.FORKING)
            try:
                await self._work("fork")
                self._alive(sandbox_id)
                return [await self._fork_child(sandbox, timeout_s) for _ in range(count)]
            finally:
                if was_running and self._sandboxes[sandbox_id].state not in _GONE:
                    self._move(sandbox_id, State.RUNNING)

    async def snapshot(self, sandbox_id: str, name: str | None, memory: bool = True) -> tuple[Template, str]:
        """Keep this instant as a build of a template; the source runs on, or stays paused."""
        wanted = None if name is None else parse_new_name(name)
        templates.snapshot_home(self._book.templates(), wanted)
        async with self._locked(sandbox_id, State.RUNNING, State.PAUSED) as source:
            was_running = source.state is State.RUNNING
            if was_running:
                self._move(sandbox_id, State.SNAPSHOTTING)
            try:
                await self._work("snapshot")
                self._alive(sandbox_id)
            finally:
                if was_running and self._sandboxes[sandbox_id].state not in _GONE:
                    self._move(sandbox_id, State.RUNNING)
        now_ms, snapshot_id = self.clock.now_ms(), ids.new_snapshot_id()
        build = Build(ids.new_build_id(), snapshot_id, source.machine, source.envd_version, now_ms, dict(source.env_vars), sandbox_id)
        template = await self._book.change_templates(lambda present: templates.with_snapshot(present, build, wanted, now_ms))
        return template, (wanted and wanted.tag) or DEFAULT_TAG

    async def checkpoint(self, sandbox_id: str, name: str, memory: bool = True) -> Checkpoint:
        """Keep this instant; the sandbox runs on, or stays paused."""
        async with self._locked(sandbox_id, State.RUNNING, State.PAUSED) as sandbox:
            present = self._checkpoints[sandbox_id]
            tree.check_name(present.values(), name)
            await self._work("checkpoint")
            now_ms = self.clock.now_ms()
            kept = Checkpoint(ids.new_checkpoint_id(), sandbox_id, ids.new_snapshot_id(), name, sandbox.checkpoint_id, memory, now_ms)
            present[kept.checkpoint_id] = kept
            self._change(sandbox_id, checkpoint_id=kept.checkpoint_id)
            return kept

    async def checkpoints(self, sandbox_id: str) -> list[Checkpoint]:
        """Oldest first."""
        self._alive(sandbox_id)
        return list(self._checkpoints[sandbox_id].values())

    async def remove_checkpoint(self, sandbox_id: str, reference: str) -> None:
        """Its children become its parent's."""
        async with self._locked(sandbox_id, State.RUNNING, State.PAUSED) as sandbox:
            present = self._checkpoints[sandbox_id]
            gone = tree.named(present.values(), sandbox_id, reference)
            present.update({child.checkpoint_id: child for child in tree.orphans(present.values(), gone)})
            del present[gone.checkpoint_id]
            if sandbox.checkpoint_id == gone.checkpoint_id:
                self._change(sandbox_id, checkpoint_id=gone.parent_id)

    async def rollback(self, sandbox_id: str, reference: str = "") -> Sandbox:
        """Back to a checkpoint, running or paused as before."""
        async with self._locked(sandbox_id, State.RUNNING, State.PAUSED) as sandbox:
            target = tree.target(self._checkpoints[sandbox_id].values(), sandbox, reference)
            was_running = sandbox.state is State.RUNNING
            if was_running:
                self._move(sandbox_id, State.ROLLING_BACK)
            try:
                await self._work("rollback")
                self._alive(sandbox_id)
            finally:
                if was_running and self._sandboxes[sandbox_id].state not in _GONE:
                    self._move(sandbox_id, State.RUNNING)
            return self._change(sandbox_id, checkpoint_id=target.checkpoint_id)

    async def set_network(self, sandbox_id: str, wanted: NetworkSettings, allow_internet_access: bool | None) -> None:
        """Replace what can change while it runs."""
        async with self._locked(sandbox_id, State.RUNNING) as sandbox:
            network = replace(wanted, mask_request_host=sandbox.network.mask_request_host, https_ports=sandbox.network.https_ports)
            self._change(sandbox_id, network=network, allow_internet_access=allow_internet_access)

    async def kill(self, sandbox_id: str) -> None:
        """End it, whatever it is doing. NotFound the second time."""
        self._expire_due()
        self._alive(sandbox_id)
        self._move(sandbox_id, State.KILLING, reason="killed by the caller")
        try:
            await self._work("kill")
        finally:
            self._move(sandbox_id, State.KILLED)

    async def logs(self, sandbox_id: str, query: LogQuery) -> list[LogEntry]:
        """A part of the sandbox's life; of killed ones too."""
        self._expire_due()
        if sandbox_id not in self._sandboxes:
            raise _not_found(sandbox_id)
        entries, cursor_ms = filter(query.matches, self._logs[sandbox_id]), query.cursor_ms
        if query.backward:
            return [entry for entry in reversed(list(entries)) if cursor_ms is None or entry.timestamp_ms <= cursor_ms][: query.limit]
        return [entry for entry in entries if entry.timestamp_ms >= (cursor_ms or 0)][: query.limit]

    async def metrics(self, sandbox_id: str, start_ms: int, end_ms: int | None) -> list[MetricSample]:
        """What tests have added, oldest first; of killed ones too."""
        if sandbox_id not in self._sandboxes:
            raise _not_found(sandbox_id)
        found = sorted(self._metrics[sandbox_id], key=lambda sample: sample.timestamp_ms)
        return [sample for sample in found if start_ms <= sample.timestamp_ms and (end_ms is None or sample.timestamp_ms <= end_ms)]

    async def latest_metrics(self, sandbox_ids: Iterable[str]) -> dict[str, MetricSample]:
        """The newest of each that has one."""
        return {sandbox_id: self._metrics[sandbox_id][-1] for sandbox_id in sandbox_ids if self._metrics.get(sandbox_id)}

    async def collect(self, everything: bool = False, dry_run: bool = False) -> Collection:
        """Only uploads are cached here; the disk is half full, so none goes unless all do."""
        cache = self.builds.files.cache
        cold = cache.cold() if everything else []
        gone = tuple(item for item in cold if dry_run or cache.evict(item))
        return Collection(sum(item.size_bytes for item in gone), gone, DiskUse(1 << 30, 1 << 30))

    async def templates(self) -> list[Template]:
        """All templates, newest first."""
        return self._book.templates()

    async def template(self, reference: str) -> Template:
        """By id, name or `name:tag`."""
        return administration.named(self._book, reference)

    async def assign_tags(self, target: str, tags: Sequence[str]) -> Build:
        """Give tags to a build."""
        return await administration.assign_tags(self._book, target, tags, self.clock.now_ms())

    async def remove_tags(self, name: str, tags: Sequence[str]) -> None:
        """Take tags off a template."""
        await administration.remove_tags(self._book, name, tags, self.clock.now_ms())

    async def delete_template(self, reference: str) -> None:
        """Remove a template, or one tag of it."""
        self._expire_due()
        await administration.delete(self._book, reference, self.clock.now_ms())

    async def set_public(self, reference: str, is_public: bool) -> Template:
        """Note whether a template is for everyone."""
        return await administration.set_public(self._book, reference, is_public, self.clock.now_ms())

    # -- inside

    async def _work(self, verb: str) -> None:
        """What a real verb would spend its time on."""
        await asyncio.sleep(0)
        if verb in self._holds:
            arrived, release = self._holds[verb]
            arrived.set()
            await release.wait()
        if self._failures[verb]:
            raise self._failures[verb].popleft()

    @asynccontextmanager
    async def _locked(self, sandbox_id: str, *states: State) -> AsyncIterator[Sandbox]:
        """One verb at a time per sandbox. NotFound when it is gone, Conflict when it is in none of `states`."""
        self._expire_due()
        self._alive(sandbox_id)
        async with self._locks[sandbox_id]:
            sandbox = self._alive(sandbox_id)
            if sandbox.state not in states:
                raise Conflict(f'Sandbox "{sandbox_id}" is {sandbox.state}', f"the call needs it {' or '.join(states)}")
            yield sandbox

    async def _resume(self, sandbox_id: str, timeout_s: int, memory: bool) -> Sandbox:
        self._check_room()
        if memory and self._sandboxes[sandbox_id].guest_unresponsive:
            raise GuestUnresponsive(f"the guest of sandbox {sandbox_id} did not answer when it was paused")
        self._move(sandbox_id, State.RESUMING)
        try:
            await self._work("resume")
        except BaseException:
            if self._sandboxes[sandbox_id].state not in _GONE:
                self._move(sandbox_id, State.PAUSED)
            raise
        self._alive(sandbox_id)
        return self._run(sandbox_id, now_ms=self.clock.now_ms(), timeout_s=timeout_s)

    async def _fork_child(self, source: Sandbox, timeout_s: int) -> StartOutcome:
        try:
            self._check_room()
            now_ms = self.clock.now_ms()
            child = replace(
                source,
                sandbox_id=ids.new_sandbox_id(),
                state=State.CREATING,
                started_at_ms=now_ms,
                timeout_s=timeout_s,
                pause_mode="full",
                creation=None,
                metadata=dict(source.metadata),
                env_vars=dict(source.env_vars),
                access_token=ids.new_token() if source.access_token else "",
                traffic_token=None if source.traffic_token is None else ids.new_token(),
                updated_at_ms=now_ms,
            )
            self._sandboxes[child.sandbox_id] = child
            try:
                await self._work("fork_child")
            except BaseException:
                self._end(child.sandbox_id, "fork failed")
                raise
            return StartOutcome(self._run(child.sandbox_id, now_ms=now_ms, timeout_s=timeout_s))
        except AgentEnvError as error:
            return StartOutcome(error_status=error.status, error_message=str(error))

    def _run(self, sandbox_id: str, *, now_ms: int, timeout_s: int, started: bool = False) -> Sandbox:
        self._alive(sandbox_id)
        changes: dict[str, Any] = {"end_at_ms": now_ms + timeout_s * 1000, "snapshot_id": None, "guest_unresponsive": False}
        if started:
            changes["started_at_ms"] = now_ms  # the clock of a life starts when the sandbox is usable
        return self._move(sandbox_id, State.RUNNING, **changes)

    def _expire_due(self) -> None:
        now_ms = self.clock.now_ms()
        for sandbox in list(self._sandboxes.values()):
            if sandbox.state is not State.RUNNING or sandbox.end_at_ms > now_ms:
                continue
            if sandbox.on_timeout == "pause":
                self._move(sandbox.sandbox_id, State.PAUSING)
                mode = "full" if sandbox.auto_pause_memory else "filesystem"
                self._move(sandbox.sandbox_id, State.PAUSED, snapshot_id=ids.new_snapshot_id(), pause_mode=mode)
            else:
                self._end(sandbox.sandbox_id, "its timeout passed")

    def _end(self, sandbox_id: str, reason: str) -> None:
        if self._sandboxes[sandbox_id].state not in _GONE:
            self._move(sandbox_id, State.KILLING, reason=reason)
            self._move(sandbox_id, State.KILLED)

    def _check_room(self) -> None:
        running = sum(sandbox.state in _HOLDS_ROOM for sandbox in self._sandboxes.values())
        if running >= self.sandboxes_running:
            raise LimitReached(f"{running} sandboxes run, the limit of this node", "kill or pause one, or raise limits.sandboxes_running")

    def _alive(self, sandbox_id: str) -> Sandbox:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.state in _GONE:
            raise _not_found(sandbox_id)
        return sandbox

    def _move(self, sandbox_id: str, new: State, **changes: Any) -> Sandbox:
        old = self._sandboxes[sandbox_id].state
        if not is_allowed(old, new):
            raise Internal(f"{sandbox_id}: {old} -> {new} is not in the lifecycle table")
        entry = LogEntry(self.clock.now_ms(), "info", "lifecycle", f"{old} -> {new}", {"sandbox_id": sandbox_id})
        self._logs[sandbox_id].append(entry)
        return self._change(sandbox_id, state=new, **changes)

    def _change(self, sandbox_id: str, **changes: Any) -> Sandbox:
        sandbox = replace(self._sandboxes[sandbox_id], updated_at_ms=self.clock.now_ms(), **changes)
        self._sandboxes[sandbox_id] = sandbox
        return sandbox


def _not_found(sandbox_id: str) -> NotFound:
    return NotFound(f"Sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it")


def _order(sandbox: Sandbox) -> tuple[int, str]:
    return (sandbox.started_at_ms, sandbox.sandbox_id)


def _matches(sandbox: Sandbox, wanted: SandboxFilter) -> bool:
    if VISIBLE.get(sandbox.state) not in wanted.states:
        return False
    if wanted.template is not None and wanted.template not in (sandbox.template_id, sandbox.template_name):
        return False
    if wanted.started_after_ms is not None and sandbox.started_at_ms < wanted.started_after_ms:
        return False
    return all(sandbox.metadata.get(key) == value for key, value in wanted.metadata.items())


def _parse_position(position: str) -> tuple[int, str]:
    at, separator, sandbox_id = position.partition("__")
    try:
        at_ms = round(datetime.fromisoformat(at).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise InvalidInput("the position of a page is not one of ours", "use the token of the previous page unchanged") from error
    if not separator or not sandbox_id:
        raise InvalidInput("the position of a page is not one of ours", "use the token of the previous page unchanged")
    return at_ms, sandbox_id
