"""VMs in memory. `FakeProcesses` is the machine and survives a killed server; `FakeVmm` is one server's driver.

A VM's guest writes the same block to its memory and to its disk (`FakeProcess.write`), so that a restore from a memory and
a disk of different instants is seen: it is a violation. VMMs write memory themselves (`Vm.writer`) if the machine has a
writer. What must never happen is collected in `violations`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.core.errors import Internal, NotFound, Unavailable
from agentenv.core.model import VmIdentity
from agentenv.guest.client import GuestIdentity
from agentenv.host.process import ProcessId
from agentenv.testing.failpoints import Failpoints
from agentenv.testing.fake_blocks import Content, FakeDevices
from agentenv.vmm.driver import BootSpec, Fill, MemoryExport, MemoryFile, User, VmSpec

_STATE = {"device": "state"}


@dataclass
class FakeProcess:
    """One VMM process with its guest."""

    process: ProcessId
    spec: VmSpec
    devices: FakeDevices
    base_memory: Content
    running: bool = True
    stalled: bool = False
    frozen: bool = False  # its files stand still
    diverged: Content = field(default_factory=dict)
    unsaved: Content = field(default_factory=dict)  # what a VMM that writes memory itself has not told of yet
    identity: GuestIdentity | None = None
    last_words: str = ""
    deaf: bool = False  # its envd lets every call for metrics wait
    hung: bool = False  # its envd answers nothing
    metrics_error: BaseException | None = None
    metrics_asked: int = 0
    cpu_used_percent: float = 0.0
    seen_disk_bytes: int = 0  # the size of its disk that the guest's kernel knows, once it has been told of another one
    file_system_bytes: int = 0  # what its root file system was made to have
    doomed: bool = False  # someone has tried to kill it, and failed
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def memory_path(self) -> Path:
        """The memory file it maps privately."""
        return self.spec.memory

    @property
    def memory(self) -> Content:
        """What the guest's memory holds."""
        return self.base_memory | self.diverged

    def write(self, block: str, value: str) -> bool:
        """The guest writes to memory and disk in one instant; False when it, or its file system, stands still."""
        if not self.running or self.frozen or self.gone.is_set():
            return False
        self.diverged[block] = self.unsaved[block] = value
        self.devices.write(self.spec.disk, block, value)
        return True


class FakeProcesses:
    """All VMM processes of the machine."""

    def __init__(self, writer: User | None = None) -> None:
        self.writer = writer
        self.devices: FakeDevices | None = None
        self.violations: list[str] = []
        self._pids = itertools.count(1000)
        self.ticks = itertools.count(1)  # when a process was started: each its own
        self._alive: dict[int, FakeProcess] = {}

    def alive(self) -> list[FakeProcess]:
        """Those that live."""
        return list(self._alive.values())

    def find(self, pid: int) -> FakeProcess | None:
        """A living process by pid."""
        return self._alive.get(pid)

    def in_namespace(self, namespace: str) -> FakeProcess | None:
        """The living process in a network namespace. One that outlived its kill is in a former namespace of that name."""
        return next((p for p in self._alive.values() if p.spec.namespace == namespace and not p.doomed), None)

    def start(self, spec: VmSpec, boots: bool = False, waits: bool = False) -> FakeProcess:
        """A new process that has opened its memory and disk. NotFound when one does not exist.

        A guest that boots knows what is on its disk, and nothing else. One that `waits` does not run before `run`.
        """
        if self.devices is None:
            raise Internal("the fake machine has no block devices")
        memory, disk = self.devices.read(spec.memory), self.devices.read(spec.disk)
        if other := self.in_namespace(spec.namespace):
            self.violations.append(f"{spec.name} was started in the namespace of {other.spec.name}")
        if boots and memory:
            self.violations.append(f"{spec.name} was booted on memory that holds {memory}")
        spec.work.mkdir(parents=True, exist_ok=True)
        process = FakeProcess(ProcessId(next(self._pids), next(self.ticks)), spec, self.devices, memory)
        if boots:
            process.diverged, process.unsaved = dict(disk), dict(disk)
            process.seen_disk_bytes = self.devices.at(spec.disk).virtual_size_bytes
        self._alive[process.process.pid] = process
        for path in (spec.memory, spec.disk):
            self.devices.map(path, 1)
        process.running = boots
        if not boots and not waits:
            self.run(process)
        return process

    def run(self, process: FakeProcess) -> None:
        """Its guest goes on."""
        disk = process.devices.read(process.spec.disk)
        if process.memory != disk:
            self.violations.append(f"{process.spec.name} was restored from memory {process.memory} and disk {disk} of different instants")
        process.running = True

    def end(self, process: FakeProcess, last_words: str = "its VMM was killed") -> None:
        """The process is gone. Idempotent."""
        if self._alive.pop(process.process.pid, None) is not None:
            for path in (process.spec.memory, process.spec.disk):
                process.devices.map(path, -1)
            process.last_words = last_words
            process.gone.set()

    def end_strays(self, vms: Path, kept: set[Path]) -> int:
        """What `orchestrator.reconcile.kill_strays` does for real processes."""
        strays = [process for process in self.alive() if process.spec.work not in kept]
        for process in strays:
            self.end(process)
        for folder in vms.iterdir() if vms.is_dir() else ():
            if folder not in kept:
                folder.rmdir()
        return len(strays)


class FakeVm:
    """One server's handle of a VM. Points: `vm.pause`, `vm.resume`, `vm.save_state`, `vm.disk_grown`, `vm.kill`; `vm.ended` cannot fail."""

    def __init__(self, fake: FakeProcess, processes: FakeProcesses, points: Failpoints) -> None:
        self.fake = fake
        self.process = fake.process
        self._processes, self._points = processes, points

    @property
    def writer(self) -> User | None:
        """As the machine's VMMs are."""
        return self._processes.writer

    @property
    def waits_for_room(self) -> bool:
        """Those that write memory themselves do not."""
        return self.writer is None

    async def pause(self) -> None:
        """Stop the guest."""
        await self._points.hit("vm.pause")
        self._require_alive()
        self.fake.running = False
        await self._points.hit("vm.pause:done")

    async def resume(self) -> None:
        """Let the guest run."""
        await self._points.hit("vm.resume")
        self._require_alive()
        self.fake.running, self.fake.stalled = True, False

    async def disk_grown(self) -> None:
        """Its guest sees how large the disk is."""
        await self._points.hit("vm.disk_grown")
        self._require_alive()
        self.fake.seen_disk_bytes = self.fake.devices.at(self.fake.spec.disk).virtual_size_bytes

    async def stalled(self) -> bool:
        """Whether a disk write failed (tests set `fake.stalled`), or it was paused before one could."""
        await self._points.hit("vm.stalled")
        self._require_alive()
        return self.fake.stalled if self.waits_for_room else not self.fake.running

    async def save_state(self, path: Path, memory: MemoryFile | None = None) -> None:
        """Write a state file, and memory."""
        await self._points.hit("vm.save_state")
        self._require_alive()
        if (memory is not None) != (self.writer is not None):
            self._processes.violations.append(f"{self.fake.spec.name} was saved with {memory} although its writer is {self.writer}")
        elif memory is not None:
            self._save_memory(memory)
        if self.fake.running:
            self._processes.violations.append(f"the state of {self.fake.spec.name} was saved while its guest ran")
        path.write_text(json.dumps(_STATE))
        await self._points.hit("vm.save_state:done")

    def _save_memory(self, file: MemoryFile) -> None:
        for block, value in (self.fake.memory if file.is_whole else self.fake.unsaved).items():
            self.fake.devices.write(file.path, block, value)
        self.fake.unsaved = {}

    async def kill(self) -> None:
        """End it."""
        try:
            await self._points.hit("vm.kill")
        except Exception:
            self.fake.doomed = True
            raise
        self._processes.end(self.fake)

    async def ended(self) -> str:
        """Wait for the end."""
        await self.fake.gone.wait()
        await self._points.hit("vm.ended", can_fail=False)
        return self.fake.last_words

    async def close(self) -> None:
        """Nothing is held."""

    def _require_alive(self) -> None:
        if self.fake.gone.is_set():
            raise Unavailable(f"the VMM of {self.fake.spec.name} is gone")


class FakeVmm:
    """Stands in for a driver. Points: `vmm.boot`, `vmm.boot:started`, `vmm.restore`, `vmm.restore:started`, `vmm.adopt`."""

    code_cache_mb = 64

    def __init__(self, processes: FakeProcesses, points: Failpoints | None = None) -> None:
        self.fills_memory = processes.writer is None
        self._processes = processes
        self._points = points or Failpoints()

    def identity(self, kernel_sha256: str, initramfs_sha256: str) -> VmIdentity:
        """A fixed one."""
        return VmIdentity("fake", "none", "none", "1", kernel_sha256, initramfs_sha256, 1_000_000)

    @property
    def memory(self) -> MemoryExport:
        """As the real ones do it."""
        return MemoryExport() if self._processes.writer is None else MemoryExport("auto", (0, 1))

    def user(self, namespace: str) -> User | None:
        """The same for all."""
        return self._processes.writer

    async def boot(self, spec: VmSpec, boot: BootSpec) -> FakeVm:
        """Start from nothing."""
        await self._points.hit("vmm.boot")
        vm = FakeVm(self._processes.start(spec, boots=True), self._processes, self._points)
        try:
            await self._points.hit("vmm.boot:started")
        except Exception:
            self._processes.end(vm.fake)
            raise
        return vm

    async def restore(self, spec: VmSpec, state: Path, fill: Fill | None = None) -> FakeVm:
        """Start from a state file. Fails before the process exists or after it (then it is gone again), like the real one."""
        await self._points.hit("vmm.restore")
        if not state.is_file() or json.loads(state.read_text()) != _STATE:
            raise NotFound(f"the VM state {state} does not exist")
        vm = FakeVm(self._processes.start(spec, waits=fill is not None), self._processes, self._points)
        try:
            if fill is not None:
                await fill(vm.process)
                self._processes.run(vm.fake)
            await self._points.hit("vmm.restore:started")
        except Exception:
            self._processes.end(vm.fake)
            raise
        return vm

    async def adopt(self, spec: VmSpec, process: ProcessId) -> FakeVm:
        """Take over a living process. NotFound."""
        await self._points.hit("vmm.adopt")
        found = self._processes.find(process.pid)
        if found is None or found.process != process or found.spec != spec:
            raise NotFound(f"the VMM of {spec.name} is gone")
        return FakeVm(found, self._processes, self._points)
