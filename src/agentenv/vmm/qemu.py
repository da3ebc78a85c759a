"""The portable driver: QEMU's `microvm` machine, on KVM where ordinary guests run on it, else by emulation.

Guest memory is a private mapping of `spec.memory`, whose file is never written. Device state is saved alone
(`xen-save-devices-state`) and loaded by `-incoming file:`, after which QEMU runs the guest by itself.
Machine options that look odd each avoid a trap. The TSC is not calibrated but told (`tsc_early_khz`: nothing can calibrate it under
emulation), nor watched (`tsc=reliable`: by the only other clock, which counts ticks, and a busy host loses some; a guest that doubts its
TSC runs its own guests by fits and starts). There is no PIT and no PIC, and `acpi=on` is how Debian's kernel finds virtio-mmio devices.

QEMU opens what it needs as root and then gives all of it up before the guest runs: a user of its own for each network namespace,
its working folder as root directory, no program started and no privilege regained (seccomp). What it writes by itself goes
to `<work>/out`, the only folder it may change, and is taken from there as bytes of a stranger.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentenv.core.errors import AgentEnvError, DeadlineExceeded, NotFound
from agentenv.core.model import VmIdentity
from agentenv.core.spans import span
from agentenv.host import files, process
from agentenv.host.capped_log import CappedLog, open_for_program
from agentenv.host.process import ProcessId
from agentenv.vmm import failures
from agentenv.vmm.driver import BootSpec, Fill, MemoryExport, MemoryFile, User, VmSpec
from agentenv.vmm.jail import user_of
from agentenv.vmm.qmp import Qmp, QmpError

_MONITOR_DEADLINE_S = 10.0
_START_DEADLINE_S = 30.0  # loading a state takes milliseconds; a host that is out of CPU may stretch it
_STATUS_POLL_S = 0.001
_NOT_YET = ("inmigrate", "prelaunch")
_STATE_BYTES_MAX = 64 << 20
_OUT = "out"
_STATE = "state"
_SECCOMP = "on,obsolete=deny,spawn=deny,resourcecontrol=deny"  # `elevateprivileges=deny` would forbid it to give up being root

_MACHINE = "microvm,rtc=on,pit=off,pic=off,acpi=on,memory-backend=mem,suppress-vmdesc=on"
#: Emulated CPU. `max` less the widest vectors: fewer of them saved, translated and probed makes restores faster. Less fast string
#: instructions, too: an emulator goes through those byte by byte, and kernels copy to programs four times as fast without.
_TCG_CPU = "max,-avx,-avx2,-avx512f,-la57,-erms,-fsrm"


@dataclass(frozen=True, slots=True)
class QemuSettings:
    """How this node runs QEMU: the command that starts it, its version, accelerator and the host's TSC rate."""

    argv: tuple[str, ...]
    version: str
    accelerator: str
    tsc_khz: int
    code_cache_mb: int


async def _nothing() -> None:
    """For a QEMU that loads by itself."""


class QemuVm:
    """One QEMU process."""

    def __init__(self, pid: ProcessId, spec: VmSpec) -> None:
        self.process = pid
        self._spec = spec
        self._qmp: Qmp | None = None
        self._connecting = asyncio.Lock()
        self._log = CappedLog(spec.work / "output", spec.work / "vmm.log")
        self._log.start()

    @property
    def writer(self) -> User | None:
        """None: its memory is read from outside."""
        return None

    async def wait_started(self, load: Callable[[], Awaitable[None]] = _nothing) -> None:
        """Do `load`, and return when the guest's CPUs run.

        Only then does QEMU pass on what is sent to the guest: it drops anything before.
        """
        await failures.started(self.ended(), self._loaded(load), self._spec.work / "vmm.log")

    async def load(self, state: Path, fill: Fill) -> None:
        """Have memory filled, then the state loaded. For a QEMU that waits to be told (`-incoming defer`)."""
        with span("load"):
            await asyncio.to_thread(_lend, state, self._spec)
            await self._monitor()  # it answers once memory is mapped
        with span("fill"):
            await fill(self.process)
        with span("load"):
            await self._call("migrate-incoming", uri=f"file:/{_STATE}")

    async def _loaded(self, load: Callable[[], Awaitable[None]]) -> None:
        await load()
        clock = asyncio.get_running_loop().time
        end = clock() + _START_DEADLINE_S
        # Asked, not waited for: the RESUME event may overtake the answer that says it is still to come.
        with span("load"):
            while _status(await self._call("query-status")) in _NOT_YET:
                if clock() > end:
                    raise DeadlineExceeded(f"the VM's state was not loaded within {_START_DEADLINE_S:g} s", "the host may be overloaded")
                await asyncio.sleep(_STATUS_POLL_S)

    async def _monitor(self) -> Qmp:
        async with self._connecting:
            if self._qmp is None or self._qmp.closed:
                self._qmp = await Qmp.connect(self._spec.work / "qmp.sock", _MONITOR_DEADLINE_S)
            return self._qmp

    async def _call(self, command: str, **arguments: object) -> object:
        return await (await self._monitor()).call(command, _MONITOR_DEADLINE_S, arguments)

    @property
    def waits_for_room(self) -> bool:
        """QEMU stops the VM, and repeats the write when it runs again."""
        return True

    async def pause(self) -> None:
        """Stop the virtual CPUs and drain device I/O."""
        await self._call("stop")

    async def resume(self) -> None:
        """Let the virtual CPUs run."""
        await self._call("cont")

    async def disk_grown(self) -> None:
        """Look at the size of the disk again, and tell the guest."""
        size_bytes = self._spec.machine.disk_mb << 20
        await self._call("block_resize", device="root", size=size_bytes)

    async def stalled(self) -> bool:
        """Whether QEMU stopped the VM because a write to its disk failed."""
        return _status(await self._call("query-status")) == "io-error"

    async def save_state(self, path: Path, memory: MemoryFile | None = None) -> None:
        """Write device and CPU state of the paused VM to `path`; `memory` stays as it is."""
        try:
            await self._call("xen-save-devices-state", filename=f"/{_OUT}/state", live=False)
            if await asyncio.to_thread(files.take, self._spec.work / _OUT / "state", path, _STATE_BYTES_MAX) == 0:
                raise QmpError("QEMU wrote an empty state file")
        except (AgentEnvError, OSError) as error:
            raise failures.failed_save(path, self.process, error) from error

    async def kill(self) -> None:
        """End the process and wait until it is gone."""
        await self.close()
        await asyncio.to_thread(process.kill, self.process)

    async def ended(self) -> str:
        """Return, with a reason, when the process is gone."""
        await process.wait_ended(self.process)
        self._log.take()
        return failures.why_ended(self._spec.work / "vmm.log")

    async def close(self) -> None:
        """Close the monitor connection and stop keeping its log; the VM goes on."""
        self._log.close()
        if self._qmp is not None:
            await self._qmp.close()
            self._qmp = None


def clock_arguments(settings: QemuSettings) -> str:
    """What a guest's kernel is told of its TSC: the rate, and, where it is emulated from the host's, that nothing has to watch it. Pure."""
    return f"tsc_early_khz={settings.tsc_khz}" + (" tsc=reliable" if settings.accelerator == "tcg" else "")


class QemuDriver:
    """Starts QEMU processes."""

    fills_memory = True

    def __init__(self, settings: QemuSettings) -> None:
        self._settings = settings

    def identity(self, kernel_sha256: str, initramfs_sha256: str) -> VmIdentity:
        """What snapshots made here depend on."""
        s = self._settings
        cpu = f"{_cpu(s.accelerator)} {cpu_name(Path('/proc/cpuinfo').read_text())}" if s.accelerator == "kvm" else _cpu(s.accelerator)
        return VmIdentity("qemu", s.accelerator, cpu, s.version, kernel_sha256, initramfs_sha256, s.tsc_khz, _MACHINE)

    @property
    def code_cache_mb(self) -> int:
        """As it is set, where the CPU is emulated."""
        return 0 if self._settings.accelerator == "kvm" else self._settings.code_cache_mb

    @property
    def memory(self) -> MemoryExport:
        """Files, which are found again in the memory of its process."""
        return MemoryExport()

    def user(self, namespace: str) -> User | None:
        """Ours."""
        return None

    async def boot(self, spec: VmSpec, boot: BootSpec) -> QemuVm:
        """Start from the kernel. What it says on its console is in `work`/vmm.log, and bounded."""
        cmdline = f"console=ttyS0 reboot=t panic=-1 quiet mitigations=off {clock_arguments(self._settings)} {boot.cmdline}"
        start = ["-kernel", str(boot.kernel), "-initrd", str(boot.initramfs), "-append", cmdline]
        return await self._start(spec, start)

    async def restore(self, spec: VmSpec, state: Path, fill: Fill | None = None) -> QemuVm:
        """Load `state` and run."""
        if not state.is_file():
            raise NotFound(f"the VM state {state} does not exist", "the snapshot is damaged; delete it")
        if fill is None:
            return await self._start(spec, ["-incoming", f"file:{state}"])
        return await self._start(spec, ["-incoming", "defer"], lambda vm: vm.load(state, fill))

    async def adopt(self, spec: VmSpec, process_id: ProcessId) -> QemuVm:
        """Take over a VM started by a former server."""
        if not process.is_alive(process_id):
            raise NotFound(f"the VMM of {spec.name} (pid {process_id.pid}) is gone")
        return QemuVm(process_id, spec)

    async def _start(self, spec: VmSpec, extra: list[str], load: Callable[[QemuVm], Awaitable[None]] | None = None) -> QemuVm:
        with span("spawn"):
            pid = await asyncio.to_thread(_spawn, [*command_line(self._settings, spec), *extra], spec)
        vm = QemuVm(pid, spec)
        try:
            await vm.wait_started(partial(load, vm) if load else _nothing)
        except BaseException:
            await asyncio.shield(vm.kill())
            raise
        return vm


def _status(reply: object) -> str:
    return str(reply.get("status", "")) if isinstance(reply, dict) else ""


def cpu_name(cpuinfo: str) -> str:
    """The model that /proc/cpuinfo tells: what a guest on KVM sees of the host."""
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else "unknown"


def _cpu(accelerator: str) -> str:
    return "host" if accelerator == "kvm" else _TCG_CPU


def command_line(s: QemuSettings, spec: VmSpec) -> list[str]:
    """How QEMU is started for `spec`; a boot or a restore adds its own end."""
    accelerator = "kvm" if s.accelerator == "kvm" else f"tcg,thread=multi,tb-size={s.code_cache_mb}"
    size = f"{spec.machine.memory_mb}M"
    memory = f"memory-backend-file,id=mem,size={size},mem-path={spec.memory},share=off,readonly=on,rom=off,merge=off,dump=off"
    # Past the host's page cache: what the guest wrote must be in the stack when it is sealed. Also, QEMU tries a failed flush of a file in
    # that cache never again, and the VM could not go on after a full disk.
    # Opened for writing at once: by the time the guest writes, QEMU is nobody who could open it.
    drive = f"id=root,file={spec.disk},format=raw,if=none,cache=none,aio=threads,discard=unmap,file.locking=off,auto-read-only=off"
    rates = {"bps-total": spec.quotas.disk_bytes_per_s, "iops-total": spec.quotas.disk_operations_per_s}
    drive += "".join(f",throttling.{name}={rate}" for name, rate in rates.items() if rate)
    network = f"tap,id=net,ifname={spec.tap},script=no,downscript=no"
    user = user_of(spec.namespace)
    return [
        *s.argv,
        *("-name", f"{spec.name},process=aenv-vm"),
        *("-accel", accelerator, "-cpu", _cpu(s.accelerator), "-smp", str(spec.machine.vcpu_count), "-m", size, "-M", _MACHINE),
        *("-object", memory),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        # Together with what QEMU says. It never waits for a reader: this chardev makes its descriptors non-blocking.
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
        *("-drive", drive, "-device", "virtio-blk-device,drive=root"),
        *("-netdev", network, "-device", f"virtio-net-device,netdev=net,mac={spec.guest_mac}"),
        *("-device", "virtio-rng-device"),
        *("-global", "migration.send-configuration=off"),
        *("-qmp", f"unix:{spec.work / 'qmp.sock'},server=on,wait=off"),
        *("-run-with", f"user={user}:{user},chroot={spec.work}", "-sandbox", _SECCOMP),
    ]


def _spawn(argv: list[str], spec: VmSpec) -> ProcessId:
    user = user_of(spec.namespace)
    out = spec.work / _OUT
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chown(out, user, user)
    output = open_for_program(spec.work / "output")
    try:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        return process.spawn(argv, spec.work / "vmm.log", spec.work, spec.namespace, environment, output)
    finally:
        os.close(output)


def _lend(state: Path, spec: VmSpec) -> None:
    """Put a copy where QEMU can read it: by the time it is told to, it is nobody, in a root directory of its own."""
    copy = spec.work / _STATE
    shutil.copyfile(state, copy)
    os.chown(copy, -1, user_of(spec.namespace))
    copy.chmod(0o440)
