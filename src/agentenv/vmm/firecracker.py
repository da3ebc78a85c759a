"""The production driver: Firecracker, started by its jailer, on KVM.

A VM is booted from the kernel or loaded from a saved state over a private mapping of `spec.memory`. Saving writes the state to a
file and, to another, the pages that changed since the boot, the load or the last time, at their places (a "Diff" snapshot): that file
is a writable layer of `blockd`, lent to the jail for this, so no page is copied twice. Whether it keeps what it has told of is the
caller's to know: after a failure it asks for all pages. Names inside the jail are the same for every VM, since the state has them in it.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.core.errors import AgentEnvError, HostNotReady, NotFound, Unsupported
from agentenv.core.model import VmIdentity
from agentenv.host import files, mounts, process
from agentenv.host.capped_log import CappedLog, open_for_program
from agentenv.host.process import ProcessId
from agentenv.vmm import failures
from agentenv.vmm.driver import BootSpec, Fill, MemoryExport, MemoryFile, User, VmSpec
from agentenv.vmm.firecracker_api import FirecrackerApi
from agentenv.vmm.firecracker_requests import (
    CpuTemplate,
    RateLimits,
    Request,
    boot_requests,
    disk_request,
    load_requests,
    numbers,
    save_request,
)
from agentenv.vmm.jail import CAPTURE, GROUP, Jail, inside, user_of

MIN_VERSION = (1, 12)
"""The first that can be given another network device when it loads a state."""
_START_DEADLINE_S = 30.0
_SAVE_DEADLINE_S = 120.0  # writes what changed; a disk may be slow
_VERSION_DEADLINE_S = 10.0
_STATE_BYTES_MAX = 64 << 20
_POWERED_OFF = re.compile(rb"reboot: (Power down|System halted)")
"""What a kernel says on the console, whatever its log level."""
_LAST_WORDS_BYTES = 32
_QUIET = ("--level", "Warning")


@dataclass(frozen=True, slots=True)
class FirecrackerSettings:
    """How this node runs Firecracker."""

    firecracker: Path
    jailer: Path
    version: str
    cpu_model: str
    limits: RateLimits = field(default_factory=RateLimits)
    cpu_template: CpuTemplate = field(default_factory=CpuTemplate)
    virtualization: str = "kvm"


def installed_version(firecracker: Path, jailer: Path) -> str:
    """The version of both programs. HostNotReady: one is missing, they differ, or are too old."""
    hint = "install firecracker and jailer of one release, 1.12 or newer"
    versions = {program: _version_of(program, hint) for program in (firecracker, jailer)}
    version = versions[firecracker]
    if version != versions[jailer]:
        raise HostNotReady(f"{firecracker} is version {version}, but {jailer} is {versions[jailer]}", hint)
    if numbers(version) < MIN_VERSION:
        raise HostNotReady(f"{firecracker} is version {version}, older than {'.'.join(map(str, MIN_VERSION))}", hint)
    return version


def _version_of(program: Path, hint: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_VERSION_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostNotReady(f"{program} cannot be run: {error}", hint) from error
    match = re.match(r"(?:Firecracker|Jailer) v(\d+\.\d+\.\d+\S*)", done.stdout)
    if match is None:
        raise HostNotReady(f"{program} does not tell its version: {(done.stdout or done.stderr)[:80]!r}", hint)
    return match.group(1)


class FirecrackerVm:
    """One Firecracker process."""

    def __init__(self, pid: ProcessId, spec: VmSpec) -> None:
        self.process = pid
        self._spec = spec
        self._api = FirecrackerApi(inside(pid.pid, "api.sock"))
        self._said = b""
        self._ending: asyncio.Task[None] | None = None
        self._stands: bool | None = None  # paused; None: not known
        self._log = CappedLog(spec.work / "output", spec.work / "vmm.log", seen=self._hear)
        self._log.start()

    def _hear(self, content: bytes) -> None:
        """End the VMM of a guest that has powered off: Firecracker has no power switch, and would keep it for ever."""
        self._said = self._said[-_LAST_WORDS_BYTES:] + content
        if self._ending is None and _POWERED_OFF.search(self._said):
            self._ending = asyncio.create_task(asyncio.to_thread(process.kill, self.process))

    @property
    def writer(self) -> User | None:
        """The user of its jail."""
        return user_of(self._spec.namespace), GROUP

    async def configure(self, requests: Sequence[Request]) -> None:
        """Ask for each thing in turn, once it listens. Unavailable, with its last words, when it ends; Internal when it refuses."""
        await failures.started(self.ended(), self._requests(requests), self._spec.work / "vmm.log")

    async def _requests(self, requests: Sequence[Request]) -> None:
        await self._api.wait_listening(_START_DEADLINE_S)
        for method, path, body in requests:
            await self._api.call(method, path, body, _START_DEADLINE_S)

    @property
    def waits_for_room(self) -> bool:
        """Firecracker passes a failed write on to the guest."""
        return False

    async def pause(self) -> None:
        """Stop the virtual CPUs and drain device I/O."""
        self._stands = None
        await self._api.call("PATCH", "/vm", {"state": "Paused"})
        self._stands = True

    async def resume(self) -> None:
        """Let the virtual CPUs run."""
        self._stands = None
        await self._api.call("PATCH", "/vm", {"state": "Resumed"})
        self._stands = False

    async def disk_grown(self) -> None:
        """Have the disk opened again, and the guest told how large it is."""
        await self._requests([disk_request()])

    async def stalled(self) -> bool:
        """Whether it was paused. Firecracker itself is asked when that is not known, as after a restart of the server."""
        if self._stands is None:
            self._stands = (await self._api.call("GET", "/"))["state"] == "Paused"
        return self._stands

    async def save_state(self, path: Path, memory: MemoryFile | None = None) -> None:
        """Write device and CPU state of the paused VM to `path`, and its memory to `memory`."""
        if memory is None:
            raise Unsupported("Firecracker saves no state without memory", "give it a file for the memory")
        pid, made = self.process.pid, inside(self.process.pid, "state-out")
        try:
            await asyncio.to_thread(mounts.lend, pid, memory.path, CAPTURE)
            try:
                await self._api.call("PUT", "/snapshot/create", save_request(memory.is_whole), _SAVE_DEADLINE_S)
            finally:
                await asyncio.shield(asyncio.to_thread(mounts.take_back, pid, CAPTURE))
            await asyncio.to_thread(files.take, made, path, _STATE_BYTES_MAX)
        except (AgentEnvError, OSError) as error:
            raise failures.failed_save(path, self.process, error) from error

    async def kill(self) -> None:
        """End the process and wait until it is gone."""
        await asyncio.to_thread(process.kill, self.process)
        await self.close()

    async def ended(self) -> str:
        """Return, with a reason, when the process is gone."""
        await process.wait_ended(self.process)
        self._log.take()
        return failures.why_ended(self._spec.work / "vmm.log")

    async def close(self) -> None:
        """Let go of the VM; it goes on."""
        self._log.close()
        await self._api.close()


class FirecrackerDriver:
    """Starts Firecracker processes."""

    fills_memory = False
    code_cache_mb = 0

    def __init__(self, settings: FirecrackerSettings) -> None:
        self._settings = settings

    def identity(self, kernel_sha256: str, initramfs_sha256: str) -> VmIdentity:
        """What snapshots made here depend on. Not the TSC's rate: a state has it, and a load has KVM keep to it, or fails."""
        s = self._settings
        cpu = s.cpu_template.identity or s.cpu_model
        return VmIdentity("firecracker", s.virtualization, cpu, s.version, kernel_sha256, initramfs_sha256, 0)

    @property
    def memory(self) -> MemoryExport:
        """Devices, if there are some, which outlive `blockd`; else files that all jails may read."""
        return MemoryExport("auto", (0, GROUP))

    def user(self, namespace: str) -> User | None:
        """The user of its jail."""
        return user_of(namespace), GROUP

    async def boot(self, spec: VmSpec, boot: BootSpec) -> FirecrackerVm:
        """Start from the kernel. What it says on its console is in `work`/vmm.log, and bounded."""
        files = ((boot.kernel, "kernel", False), (boot.initramfs, "initramfs", False))
        return await self._start(spec, files, boot_requests(spec, boot, self._settings.limits, self._settings.cpu_template))

    async def restore(self, spec: VmSpec, state: Path, fill: Fill | None = None) -> FirecrackerVm:
        """Load `state` over the memory of `spec` and run."""
        if fill is not None:
            raise Unsupported("Firecracker maps memory as it loads a state, and writes to it then", "have all of it in one file")
        if not state.is_file():
            raise NotFound(f"the VM state {state} does not exist", "the snapshot is damaged; delete it")
        files = ((state, "state", False), (spec.memory, "memory", False))
        return await self._start(spec, files, load_requests(spec, self._settings.version, self._settings.limits))

    async def adopt(self, spec: VmSpec, process_id: ProcessId) -> FirecrackerVm:
        """Take over a VM started by a former server."""
        if not process.is_alive(process_id):
            raise NotFound(f"the VMM of {spec.name} (pid {process_id.pid}) is gone")
        return FirecrackerVm(process_id, spec)

    async def _start(self, spec: VmSpec, files: tuple[tuple[Path, str, bool], ...], requests: Sequence[Request]) -> FirecrackerVm:
        s = self._settings
        jail = Jail(s.firecracker, s.jailer, spec.name, spec.work, spec.namespace, (*files, (spec.disk, "disk", True)))
        pid = await asyncio.to_thread(_spawn, jail)
        vm = FirecrackerVm(pid, spec)
        try:
            await vm.configure(requests)
        except BaseException:
            await asyncio.shield(vm.kill())
            raise
        return vm


def _spawn(jail: Jail) -> ProcessId:
    jail.folder.mkdir(parents=True, exist_ok=True)
    output = open_for_program(jail.work / "output")
    try:
        return process.spawn(
            jail.command(_QUIET), jail.work / "vmm.log", jail.work, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, output=output
        )
    finally:
        os.close(output)
