"""The guest's side of a restore: takes its identity, or stays deaf. And its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from agentenv.core.clock import Clock
from agentenv.core.errors import DeadlineExceeded, Internal, NotFound, Unavailable
from agentenv.core.model import MetricSample
from agentenv.guest.client import GuestIdentity
from agentenv.guest.commands import Command, CommandRefused, Ended, OnOutput, OnStart
from agentenv.guest.provision import Place
from agentenv.testing.failpoints import Failpoints
from agentenv.testing.fake_slots import FakeNetwork
from agentenv.testing.fake_vmm import FakeProcess, FakeProcesses

ENVD_VERSION = "0.6.13"


class FakeGuest:
    """Stands in for `guest.client.GuestClient`. Points: `guest.initialise`, `guest.initialise:done`, `guest.answers`,
    `guest.freeze`, `guest.freeze:done`, `guest.thaw`, `guest.run`, `guest.execute`, `guest.execute:done`, `guest.look`,
    `guest.grow_disk`, `guest.grow_disk:done`, `guest.provision`, `guest.provision:done`;
    `guest.metrics` cannot fail."""

    def __init__(self, processes: FakeProcesses, network: FakeNetwork, clock: Clock, points: Failpoints | None = None) -> None:
        self._processes, self._network, self._clock = processes, network, clock
        self._points = points or Failpoints()
        self.connected: set[FakeMetricsReader] = set()  # readers that hold a connection
        self.commands: list[str] = []  # all that `run` was asked for
        self.answers_to: Callable[[str], tuple[int, str]] = lambda command: (0, "")
        self.folders = {"/", "/tmp"}  # that every guest has
        self.provision = FakeProvision(self)

    async def initialise(
        self, namespace: str, identity: GuestIdentity, deadline_s: float, boots: bool = False, clock_behind_ms: int = 0
    ) -> str:
        """Give the guest in `namespace` its identity. Waits for ever when there is none that runs: the caller gives up."""
        await self._points.hit("guest.initialise")
        if int(namespace.rsplit("-", 1)[1]) not in self._network.present:
            raise NotFound(f"network namespace {namespace} does not exist")
        process = self._processes.in_namespace(namespace)
        if process is None or not process.running:
            await asyncio.get_running_loop().create_future()
        else:
            process.identity = identity
        await self._points.hit("guest.initialise:done")
        return ENVD_VERSION

    async def answers(self, namespace: str, deadline_s: float) -> bool:
        """At once, or not at all."""
        await self._points.hit("guest.answers")
        process = self._processes.in_namespace(namespace)
        return process is not None and process.running and not process.hung

    async def freeze(self, namespace: str, deadline_s: float) -> None:
        """No more writes to the disk, and memory with it. Unavailable when the guest does not answer."""
        await self._points.hit("guest.freeze")
        process = self._processes.in_namespace(namespace)
        if process is None or not process.running or process.hung:
            raise Unavailable("the guest did not answer /fsfreeze")
        process.frozen = True
        await self._points.hit("guest.freeze:done")

    async def thaw(self, namespace: str, deadline_s: float) -> None:
        """Writes go on. A call that fails comes to the same: the guest thaws by itself a little later."""
        process = self._processes.in_namespace(namespace)
        if process is not None and process.running:
            process.frozen = False
        await self._points.hit("guest.thaw")
        if process is None or not process.running or process.hung:
            raise Unavailable("the guest did not answer /fsthaw")

    async def execute(
        self, namespace: str, command: Command, on_output: OnOutput, deadline_s: float, on_start: OnStart = lambda: None
    ) -> Ended:
        """As `run`; what a command of a build does to memory and disk is one block, named by the command."""
        await self._points.hit("guest.execute")
        process = self._processes.in_namespace(namespace)
        if process is None or not process.running:
            raise Internal("the guest was lost")
        if process.identity is not None and process.identity.access_token not in ("", command.access_token):
            raise CommandRefused("unauthenticated: a token is needed")
        on_start()
        text = command.argv[-1]
        self.commands.append(text)
        code, output = self.answers_to(text)
        if code == 0 and text != "true":  # which changes nothing
            process.write(text[:40], "done")
        if output:
            on_output("stdout", output.encode())
        await self._points.hit("guest.execute:done")
        return Ended(code, f"exit status {code}")

    async def run(self, namespace: str, command: str, deadline_s: float, access_token: str = "") -> tuple[int, str]:
        """Every command works and says nothing, unless `answers_to` says otherwise. Internal for a wrong token or no guest."""
        await self._points.hit("guest.run")
        process = self._processes.in_namespace(namespace)
        if process is None or not process.running:
            raise Internal(f"the guest was lost while it ran `{command}`")
        if process.identity is not None and process.identity.access_token not in ("", access_token):
            raise Internal("envd refused the command: unauthenticated")
        self.commands.append(command)
        return self.answers_to(command)

    def metrics_reader(self, namespace: str, access_token: str) -> FakeMetricsReader:
        """A reader of what `FakeProcess` says of itself."""
        return FakeMetricsReader(self, namespace, access_token)

    async def figures(self, namespace: str, access_token: str, deadline_s: float) -> MetricSample:
        """One reading. Deaf guests, and those that stand still, let the deadline pass."""
        await self._points.hit("guest.metrics", can_fail=False)
        process = self._processes.in_namespace(namespace)
        if process is not None:
            process.metrics_asked += 1
        if process is None or not process.running or process.deaf:
            await self._clock.sleep_ms(1000 * deadline_s)
            raise DeadlineExceeded(f"the guest's metrics did not come within {deadline_s:g} s")
        if process.metrics_error is not None:
            raise process.metrics_error
        if process.identity is None or process.identity.access_token != access_token:
            raise Internal("the guest answered /metrics with 401")
        machine = process.spec.machine
        memory_bytes, disk_bytes = machine.memory_mb << 20, machine.disk_mb << 20
        cpu_percent = process.cpu_used_percent
        return MetricSample(
            self._clock.now_ms(), machine.vcpu_count, cpu_percent, memory_bytes // 4, memory_bytes, memory_bytes // 8, 1 << 20, disk_bytes
        )


class FakeMetricsReader:
    """Stands in for `guest.metrics.MetricsReader`. A guest sees one reading at a time, over one connection."""

    def __init__(self, guest: FakeGuest, namespace: str, access_token: str) -> None:
        self._guest = guest
        self._namespace, self._access_token = namespace, access_token

    async def read(self, deadline_s: float) -> MetricSample:
        """The figures of now."""
        self._guest.connected.add(self)
        try:
            return await self._guest.figures(self._namespace, self._access_token, deadline_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop the connection."""
        self._guest.connected.discard(self)

    def is_orphan(self) -> bool:
        """Whether the VM at its other end is gone or stands still."""
        process = self._guest._processes.in_namespace(self._namespace)
        return process is None or not process.running


class FakeProvision:
    """Stands in for `guest.provision.Provision`: every owner is known, and what is made is one block more."""

    def __init__(self, guest: FakeGuest) -> None:
        self._guest = guest

    async def look(self, namespace: str, owner: str, path: str) -> Place:
        """`folders` are there."""
        await self._guest._points.hit("guest.look")
        self._process(namespace)
        return Place(0, 0, path in self._guest.folders)

    async def grow_disk(self, namespace: str, size_bytes: int) -> None:
        """Up to what the guest's kernel knows of. Internal when that is not what the host says."""
        await self._guest._points.hit("guest.grow_disk")
        process = self._process(namespace)
        if process.seen_disk_bytes != size_bytes:
            raise Internal(f"the guest's disk has {process.seen_disk_bytes} bytes, not {size_bytes}")
        process.file_system_bytes = size_bytes
        await self._guest._points.hit("guest.grow_disk:done")

    async def make_user(self, namespace: str, name: str) -> None:
        """A block."""
        await self._write(namespace, f"user {name}")

    async def make_folder(self, namespace: str, path: str, uid: int, gid: int) -> None:
        """A block."""
        await self._write(namespace, f"folder {path}")

    async def unpack(
        self, namespace: str, archive: Path, folder: str, uid: int, gid: int, deadline_s: float, *, is_apart: bool = False
    ) -> None:
        """A block."""
        await self._write(namespace, f"files {folder} {archive.stat().st_size}")

    async def _write(self, namespace: str, name: str) -> None:
        await self._guest._points.hit("guest.provision")
        if not self._process(namespace).write(name[:40], "done"):
            raise Internal("the guest was lost")
        await self._guest._points.hit("guest.provision:done")

    def _process(self, namespace: str) -> FakeProcess:
        process = self._guest._processes.in_namespace(namespace)
        if process is None or not process.running:
            raise Internal("the guest was lost")
        return process
