"""A control group for each VM: CPU, memory and number of threads, so that one guest cannot take the host from the others.

    <root>/<node>/<vm>                 version 2: `cpu`, `memory`, `pids`, `io` in one tree
    <root>/<controller>/<node>/<vm>    version 1: a tree for each; no `memory.high`, no reclaim, no pressure

Invariants: a VM without a group works (a host without control groups is slower to protect, not broken), so nothing here fails a start;
what cannot be set is in `lacking`, for `aenv doctor`. A group outlives the server with its VM and is found by its name.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentenv.core.quotas import Quotas

_log = logging.getLogger(__name__)
ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "memory", "pids", "io")
_V1_CONTROLLERS = ("cpu", "memory", "pids")
_PERIOD_US = 100_000
_THREADS_MAX = 256  # a VMM has some tens; a guest cannot make more of them
_OOM_FIRST = 500  # of the host's processes VMs go first when its memory is used up
_OOM_LAST = -900


@dataclass(frozen=True, slots=True)
class Share:
    """What one VM may use. `memory_mb` is of its whole VMM: the guest's and the VMM's own; 0 is no limit."""

    memory_mb: int
    quotas: Quotas = field(default_factory=Quotas)
    vcpu_count: int = 1


class Cgroups:
    """The groups of one node, called `name`. Everything here blocks for well under a millisecond, but for `reclaim`."""

    def __init__(self, name: str, root: Path = ROOT) -> None:
        self._name, self._root = name, root
        self.version = 2 if (root / "cgroup.controllers").exists() else 1 if (root / "memory").is_dir() else 0
        self.lacking: list[str] = []

    def open(self) -> None:
        """Make the node's own group and let it hand its controllers on. Idempotent."""
        self.lacking = [] if self.version == 2 else [f"control groups are version {self.version}" if self.version else "no control groups"]
        if self.version == 2:
            self._open_unified()
        elif self.version == 1:
            for controller in _V1_CONTROLLERS:
                self._try(f"{controller} cannot be limited", partial((self._root / controller / self._name).mkdir, exist_ok=True))

    def _open_unified(self) -> None:
        own = self._root / self._name
        self._try("no group can be made", partial(own.mkdir, exist_ok=True))
        for folder in (self._root, own):
            offered = _read(folder / "cgroup.controllers").split()
            for controller in _CONTROLLERS:
                if controller in offered:
                    what = f"{controller} cannot be limited"
                    self._try(what, partial((folder / "cgroup.subtree_control").write_text, f"+{controller}"))
                elif folder == self._root:
                    self.lacking.append(f"the host does not offer {controller}")

    def put(self, vm: str, pid: int, share: Share) -> None:
        """Put the process, with all its threads, into the group `vm` with this share; the OOM killer takes it first. Idempotent."""
        set_oom_score(pid, _OOM_FIRST)
        folders = [folder for _, folder in self._folders(vm)]
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
        self.share(vm, share)
        for folder in folders:
            self._write(folder / "cgroup.procs", str(pid))

    def share(self, vm: str, share: Share) -> None:
        """Change what a group may use."""
        for controller, folder in self._folders(vm):
            for file, value in self._settings(controller, share).items():
                self._write(folder / file, value)

    def remove(self, vm: str) -> None:
        """Remove a group whose process is gone. OSError (busy) when it is not; no error when there is none."""
        for _, folder in self._folders(vm):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()

    def keep_only(self, vms: Set[str]) -> None:
        """Remove the groups of an earlier life that have no VM any more."""
        for vm in self.present() - vms:
            with contextlib.suppress(OSError):
                self.remove(vm)

    def present(self) -> set[str]:
        """The groups that exist."""
        found = set()
        for _, folder in self._folders(""):
            with contextlib.suppress(OSError):
                found |= {entry.name for entry in folder.iterdir() if entry.is_dir()}
        return found

    def close(self) -> None:
        """Remove the node's own group, if no VM is left."""
        self.keep_only(set())
        for _, folder in self._folders(""):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def memory_bytes(self, vm: str) -> int | None:
        """What the group's processes hold, clean pages that they were the first to read included; None when it is not known."""
        file = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        for controller, folder in self._folders(vm):
            if controller in ("memory", ""):
                text = _read(folder / file).strip()
                return int(text) if text.isdigit() else None
        return None

    def killed_for_memory(self, vm: str) -> bool:
        """Whether the kernel has killed a process of the group for want of memory, of the host's or within the group's limit."""
        file = "memory.events.local" if self.version == 2 else "memory.oom_control"
        for controller, folder in self._folders(vm):
            if controller in ("memory", ""):
                words = dict(line.split(maxsplit=1) for line in _read(folder / file).splitlines() if " " in line)
                return int(words.get("oom_kill", 0)) > 0
        return False

    def reclaim(self, vm: str, size_bytes: int) -> bool:
        """Ask the kernel to take that much back from a group, clean pages first. False where it cannot. Blocks for up to seconds."""
        if self.version != 2:
            return False
        try:
            (self._root / self._name / vm / "memory.reclaim").write_text(str(size_bytes))
        except BlockingIOError:  # EAGAIN: it has less to give
            return True
        except OSError:
            return False
        return True

    def _folders(self, vm: str) -> list[tuple[str, Path]]:
        if self.version == 2:
            return [("", self._root / self._name / vm)]
        return [(c, self._root / c / self._name / vm) for c in _V1_CONTROLLERS] if self.version == 1 else []

    def _settings(self, controller: str, share: Share) -> dict[str, str]:
        """What is written where; a controller's own only on version 1."""
        cpu = share.quotas.cpu_percent
        quota_us = cpu * _PERIOD_US // 100
        memory = str(share.memory_mb << 20) if share.memory_mb else ""
        if self.version == 2:
            return {
                "cpu.max": f"{quota_us if cpu else 'max'} {_PERIOD_US}",
                "cpu.weight": str(100 * share.vcpu_count),
                "memory.max": memory or "max",
                "memory.oom.group": "1",
                "pids.max": str(_THREADS_MAX),
            }
        return {
            "cpu": {"cpu.cfs_quota_us": str(quota_us if cpu else -1), "cpu.shares": str(1024 * share.vcpu_count)},
            "memory": {"memory.limit_in_bytes": memory or "-1"},
            "pids": {"pids.max": str(_THREADS_MAX)},
        }[controller]

    def _write(self, path: Path, value: str) -> None:
        try:
            path.write_text(value)
        except OSError as error:
            _log.debug("%s: %s", path, error)

    def _try(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self.lacking.append(f"{what}: {error.strerror}")


def protect_from_oom(pid: int) -> None:
    """Let the kernel's OOM killer take this process last: without it the others could not be looked after."""
    set_oom_score(pid, _OOM_LAST)


def set_oom_score(pid: int, adjustment: int) -> None:
    """Set /proc/PID/oom_score_adj; a process that has ended, or a host that forbids it, is no error."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(f"{adjustment}\n")


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def node_name(tag: str) -> str:
    """How the node with this tag calls its group."""
    return f"agentenv-{tag}"
