"""How much memory the host has left, whether it is short of it, and what a process really holds. Reads /proc only.

A field that the kernel does not tell is None, never 0, and named in `Memory.unknown`: a policy that reads 0 for ever acts never, or always.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PRESSURE = re.compile(r"^(some|full) avg10=(\d+\.\d+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Memory:
    """The host's memory now. `some_percent` and `full_percent`: of the last ten seconds some, or all, tasks waited for memory."""

    total_mb: int | None
    available_mb: int | None
    some_percent: float | None = None
    full_percent: float | None = None

    @property
    def unknown(self) -> tuple[str, ...]:
        """What the kernel should tell and does not. Pressure is an option of it, which `aenv doctor` looks for."""
        return tuple(name for name in ("total_mb", "available_mb") if getattr(self, name) is None)


def parse(meminfo: str, pressure: str) -> Memory:
    """From the texts of /proc/meminfo and /proc/pressure/memory."""
    sizes_kb = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in meminfo.splitlines()) if rest.split()}
    waits = {name: float(percent) for name, percent in _PRESSURE.findall(pressure)}
    total_kb, available_kb = sizes_kb.get("MemTotal"), sizes_kb.get("MemAvailable")
    return Memory(
        None if total_kb is None else total_kb >> 10,
        None if available_kb is None else available_kb >> 10,
        waits.get("some"),
        waits.get("full"),
    )


class HostMemory:
    """Of the host whose /proc is at `proc`."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def now(self) -> Memory:
        """As it is now. Takes well under a millisecond."""
        return parse(self._read("meminfo"), self._read("pressure/memory"))

    def held_mb(self, pid: int) -> int | None:
        """What a process holds by itself, and its part of what it shares (PSS). None when it is gone. Blocks for milliseconds."""
        match = re.search(r"^Pss:\s+(\d+) kB$", self._read(f"{pid}/smaps_rollup"), re.MULTILINE)
        return None if match is None else int(match[1]) >> 10

    def cpu_ticks(self, pid: int) -> int | None:
        """The CPU time a process has used, or has waited for while others had it, in clock ticks; None when it is gone.

        So one that would be busy is not taken for idle on a host that is short of CPU. Waits of threads that have ended are not known.
        """
        fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
        if len(fields) <= 12:
            return None
        waits = (self._read(f"{pid}/task/{thread}/schedstat").split() for thread in self._threads(pid))
        waited_ns = sum(int(figures[1]) for figures in waits if len(figures) > 1)
        return int(fields[11]) + int(fields[12]) + waited_ns * _TICKS_PER_S // 1_000_000_000

    def _threads(self, pid: int) -> list[str]:
        with contextlib.suppress(OSError):
            return [entry.name for entry in (self._proc / str(pid) / "task").iterdir()]
        return []

    def _read(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self._proc / name).read_text()
        return ""
