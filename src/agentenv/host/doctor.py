"""What this host offers, told check by check. Reads and asks only; changes nothing.

Invariants: a check never raises; every check that is not `ok` says what to do next; `fail` means that no sandbox can run
here, `warn` that something will be slower or smaller than it could be.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentenv.config.schema import Config
from agentenv.host.cgroup import Cgroups
from agentenv.host.memory import HostMemory
from agentenv.host.requirements import Finding, check_host
from agentenv.host.tuning import Need

Status = Literal["ok", "warn", "fail"]

HOME_FREE_FAIL_BYTES = 1 << 30
"""Below this not even the base template fits."""
HOME_FREE_WARN_BYTES = 8 << 30
KvmKind = Literal["absent", "usable", "forbidden", "pvm"]


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check. `hint` is the next step, empty when there is none; `need` is for whom it is one of `group`."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    group: str = "sandboxes"
    need: Need = "needed"


def host_checks(config: Config) -> list[Check]:
    """Every check of the host, in the order a person would look at them. The node's own QEMU is looked at elsewhere."""
    return [
        *(_required(finding) for finding in check_host() if finding.requirement.name != "qemu"),
        _namespaces(),
        _kvm(config),
        _memory(config),
        _pressure(),
        _disk(config),
        _cgroup(),
        _ublk(),
    ]


def _required(finding: Finding) -> Check:
    entry = finding.requirement
    if not finding.problem:
        return Check(entry.name, "ok", f"Linux {platform.release()}" if entry.name == "linux" else "present")
    return Check(entry.name, "fail" if entry.required else "warn", f"{finding.problem}; {entry.why}", entry.hint)


def _namespaces() -> Check:
    """Tried for real, in a child: a container may have the files and still forbid the call."""
    pid = os.fork()
    if pid == 0:
        os._exit(_unshare())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return Check("namespaces", "ok", "network and mount namespaces can be made")
    reason = os.strerror(code) if code > 0 else f"signal {-code}"
    return Check(
        "namespaces", "fail", f"cannot make network and mount namespaces: {reason}", "inside a container: run it privileged (CAP_SYS_ADMIN)"
    )


def _unshare() -> int:
    import ctypes

    clone_newns, clone_newnet = 0x00020000, 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    return 0 if libc.unshare(clone_newns | clone_newnet) == 0 else ctypes.get_errno()


def kvm_kind(root: Path = Path("/")) -> KvmKind:
    """What /dev/kvm is good for. `pvm`: ordinary guest kernels never get past their first instructions under it."""
    device = root / "dev/kvm"
    if not device.exists():
        return "absent"
    if (root / "sys/module/kvm_pvm").exists():
        return "pvm"
    return "usable" if os.access(device, os.R_OK | os.W_OK) else "forbidden"


def _kvm(config: Config) -> Check:
    kind, wanted = kvm_kind(), config.vmm.accelerator
    if kind == "usable":
        return Check("kvm", "ok", "usable" if wanted != "tcg" else "usable, but setting vmm.accelerator is tcg: VMs are emulated")
    detail = {
        "absent": "no /dev/kvm: VMs are emulated, many times slower",
        "pvm": "/dev/kvm is of the PVM kind (/sys/module/kvm_pvm): ordinary guests cannot run on it, VMs are emulated, many times slower",
        "forbidden": "/dev/kvm cannot be opened: VMs are emulated, many times slower",
    }[kind]
    if wanted == "kvm":
        return Check(
            "kvm", "fail", f"{detail}; but setting vmm.accelerator asks for kvm", "set vmm.accelerator to auto, or use a machine with KVM"
        )
    hint = "give access to /dev/kvm" if kind == "forbidden" else "use a machine (or an instance type) with virtualisation for full speed"
    return Check("kvm", "warn", detail, hint)


def _memory(config: Config) -> Check:
    available_mb = _meminfo().get("MemAvailable", 0) >> 10
    needed_mb = config.guest.memory_mb + config.limits.memory_reserve_mb
    detail = f"{available_mb} MiB available"
    if available_mb < needed_mb:
        detail += f"; one sandbox and the reserve (limits.memory_reserve_mb) take up to {needed_mb} MiB"
        return Check("memory", "warn", detail, "free some memory, or set guest.memory_mb or limits.memory_reserve_mb lower")
    return Check("memory", "ok", detail)


def _pressure() -> Check:
    if HostMemory().now().some_percent is not None:
        return Check("memory pressure", "ok", "the kernel tells how long tasks wait for memory (PSI)")
    return Check("memory pressure", "warn", "the kernel does not tell how long tasks wait for memory (PSI)", "boot with psi=1")


def _meminfo() -> dict[str, int]:
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        with contextlib.suppress(ValueError, IndexError):
            found[name] = int(rest.split()[0])
    return found


def _disk(config: Config) -> Check:
    folder = config.node.home
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    detail = f"{free_bytes / (1 << 30):.1f} GiB free for {config.node.home}"
    hint = "free some space, or choose another folder: `aenv up --home DIR`"
    if free_bytes < HOME_FREE_FAIL_BYTES:
        return Check("disk", "fail", detail, hint)
    return Check("disk", "warn", detail, hint) if free_bytes < HOME_FREE_WARN_BYTES else Check("disk", "ok", detail)


def _cgroup() -> Check:
    if (version := Cgroups("").version) == 2:
        return Check("cgroup", "ok", "version 2: CPU, memory and threads of each VM are limited, memory of idle ones is reclaimed")
    if version == 1:
        detail = "version 1: CPU, memory and threads of each VM are limited, but memory of idle ones cannot be reclaimed"
        return Check("cgroup", "warn", detail, "boot with systemd.unified_cgroup_hierarchy=1")
    return Check("cgroup", "warn", "not mounted: limits of single sandboxes are not enforced", "mount -t cgroup2 none /sys/fs/cgroup")


def _ublk() -> Check:
    if Path("/dev/ublk-control").exists():
        return Check("ublk", "ok", "available: disks are block devices (Linux 6.5 or newer), and outlive a kill of blockd")
    step = "`modprobe ublk_drv`, then `aenv down` and `aenv up`, makes them devices that outlive a kill of blockd"
    return Check("ublk", "ok", f"absent: disks are files, through FUSE ({step}, where the kernel has it)")


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True
