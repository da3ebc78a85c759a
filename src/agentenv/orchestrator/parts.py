"""What the verbs work with: the adapters of one node, and the few things verbs share in memory.

Everything here can be rebuilt from the database, blockd and /proc after a restart. Only the metrics of the past are nowhere
else: a restart begins them anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from agentenv.block.client import BlockClient
from agentenv.block.supervisor import BlockServer
from agentenv.config.schema import Config
from agentenv.core.cleanup import Cleanup
from agentenv.core.clock import Clock
from agentenv.core.errors import AgentEnvError
from agentenv.core.model import LogEntry, RunningVm, VmIdentity
from agentenv.core.paths import NodePaths
from agentenv.core.storage import DiskUse
from agentenv.guest.client import GuestClient
from agentenv.host.cgroup import Cgroups
from agentenv.host.file_cache import FileCache
from agentenv.host.files import disk_use, write_out
from agentenv.host.memory import HostMemory
from agentenv.image.convert import Converter
from agentenv.image.native import NativeImages
from agentenv.image.push import Publisher
from agentenv.image.registry import Registry
from agentenv.network.slots import SlotPool
from agentenv.orchestrator.metric_history import MetricHistory
from agentenv.orchestrator.warm_pool import WarmPool
from agentenv.secret.vault import Vault
from agentenv.snapshot.capture import Capturer
from agentenv.snapshot.layers import LayerStore
from agentenv.store.sqlite import Store
from agentenv.vmm.driver import BootSpec, Vm, Vmm
from agentenv.volume.registry import Volumes
from agentenv.volume.server import VolumeServers

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Parts:
    """The adapters of one node."""

    config: Config
    paths: NodePaths
    clock: Clock
    store: Store
    blocks: BlockClient
    block_server: BlockServer
    slots: SlotPool
    vmm: Vmm
    guest: GuestClient
    layers: LayerStore
    capturer: Capturer
    identity: VmIdentity
    volumes: Volumes
    volume_servers: VolumeServers
    secrets: Vault
    boot: BootSpec
    shared: Shared
    cgroups: Cgroups
    image_registry: Registry
    image_converter: Converter
    native_images: NativeImages
    image_publisher: Publisher
    disk_use: Callable[[Path], DiskUse] = disk_use
    write_out: Callable[[Path], None] = write_out
    host_memory: HostMemory = field(default_factory=HostMemory)


@dataclass
class Shared:
    """Live handles and locks of one server process."""

    starts_at_once: int
    vms: dict[str, Vm] = field(default_factory=dict)  # by sandbox id
    formers: dict[str, tuple[RunningVm, Vm]] = field(default_factory=dict)  # by sandbox id: a rollback stopped it, and it may go on
    warm: WarmPool = field(default_factory=WarmPool)
    expiry_changed: asyncio.Event = field(default_factory=asyncio.Event)
    gone_listeners: list[Callable[[str], None]] = field(default_factory=list)
    watchers: set[asyncio.Task[None]] = field(default_factory=set)
    snapshots_in_use: dict[str, int] = field(default_factory=dict)
    sweeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    sweep_wanted: bool = False
    collecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    file_caches: list[FileCache] = field(default_factory=list)  # they give way when the node's disk gets full
    expiring: set[str] = field(default_factory=set)
    expiry_retry_at_ms: dict[str, int] = field(default_factory=dict)  # not before then, after a failure
    held_mb: dict[str, tuple[int, int]] = field(default_factory=dict)  # by life of a VM: size of its machine, what it holds (MiB)
    metrics: dict[str, MetricHistory] = field(default_factory=dict)  # by sandbox id, until its row is forgotten
    troubles: dict[str, str] = field(default_factory=dict)  # by part of the node: what it cannot do now
    heard_ms: dict[str, float] = field(default_factory=dict)  # by sandbox id: when its agent last answered anybody, by the monotonic clock
    unfreed: list[Cleanup] = field(default_factory=list)  # what could not be freed yet; `repair` tries again
    _locks: dict[str, tuple[asyncio.Lock, int]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.starting = asyncio.Semaphore(self.starts_at_once)

    @contextlib.asynccontextmanager
    async def locked(self, name: str) -> AsyncIterator[None]:
        """One verb at a time for each sandbox (or stack); others wait their turn in order. A free lock is taken without waiting."""
        lock, users = self._locks.get(name) or (asyncio.Lock(), 0)
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(name)
            if users > 1:  # the last one out drops the lock
                self._locks[name] = (lock, users - 1)

    def is_locked(self, name: str) -> bool:
        """Whether a verb holds, or waits for, this sandbox."""
        return name in self._locks

    @contextlib.contextmanager
    def using(self, snapshot_id: str) -> Iterator[None]:
        """Keep the sweep off a snapshot that no record names yet, or no longer."""
        self.snapshots_in_use[snapshot_id] = self.snapshots_in_use.get(snapshot_id, 0) + 1
        try:
            yield
        finally:
            self.snapshots_in_use[snapshot_id] -= 1
            if not self.snapshots_in_use[snapshot_id]:
                del self.snapshots_in_use[snapshot_id]

    def let_go(self, sandbox_id: str) -> Vm | None:
        """Take a sandbox's live VM out of the table: from now on it is the caller's to end."""
        return self.vms.pop(sandbox_id, None)

    def gone(self, sandbox_id: str) -> None:
        """Tell those who hold connections into a sandbox that its VM stops now."""
        self.heard_ms.pop(sandbox_id, None)
        for listener in self.gone_listeners:
            listener(sandbox_id)

    def background(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run work that the caller may stop waiting for but that must reach its end. Its failure is logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, AgentEnvError):
            _log.error("%s failed", task.get_name(), exc_info=error)

    async def settle(self) -> None:
        """Wait until no background work is left."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


def said(parts: Parts, sandbox_id: str, message: str, level: str = "info", **fields: str) -> LogEntry:
    """Add to the server's log; the same for the sandbox's own, for whoever writes that down together with something else."""
    _log.log(logging.getLevelName("WARNING" if level == "warn" else level.upper()), "%s: %s %s", sandbox_id, message, fields or "")
    return LogEntry(parts.clock.now_ms(), level, "orchestrator", message, fields)  # type: ignore[arg-type]


async def note(parts: Parts, sandbox_id: str, message: str, level: str = "info", **fields: str) -> None:
    """Add to the sandbox's own log and to the server's. Never fails a verb: what it did is done, written down or not."""
    entry = said(parts, sandbox_id, message, level, **fields)
    try:
        await parts.store.add_event(sandbox_id, entry)
    except AgentEnvError as error:
        _log.warning("%s: its log could not be written: %s", sandbox_id, error)
