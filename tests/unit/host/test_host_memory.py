"""What the kernel tells of memory: recorded replies, and replies that lack something (K03)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.host.memory import HostMemory, Memory, parse

MEMINFO = """\
MemTotal:       24735460 kB
MemFree:        17203532 kB
MemAvailable:   22934268 kB
Buffers:          282340 kB
HugePages_Total:       0
"""
PRESSURE = """\
some avg10=4.33 avg60=0.84 avg300=0.24 total=50174860
full avg10=1.20 avg60=0.22 avg300=0.04 total=13701161
"""
ROLLUP = """\
563cdbb4c000-7ffeb699d000 ---p 00000000 00:00 0                          [rollup]
Rss:              177600 kB
Pss:               20480 kB
Pss_Dirty:           112 kB
"""


def test_a_recorded_reply() -> None:
    assert parse(MEMINFO, PRESSURE) == Memory(24155, 22396, 4.33, 1.2)


@pytest.mark.parametrize(
    ("meminfo", "pressure", "unknown"),
    [
        ("", "", ("total_mb", "available_mb")),
        (MEMINFO.replace("MemAvailable", "MemAvail"), PRESSURE, ("available_mb",)),
        (MEMINFO, "", ()),
        ("MemTotal:\n", PRESSURE, ("total_mb", "available_mb")),
    ],
)
def test_what_is_missing_is_unknown_and_not_0(meminfo: str, pressure: str, unknown: tuple[str, ...]) -> None:
    found = parse(meminfo, pressure)
    assert found.unknown == unknown
    assert (found.some_percent is None) == (not pressure)


def test_what_a_process_holds_and_uses(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps_rollup").write_text(ROLLUP)
    (tmp_path / "7" / "stat").write_text("7 (a (b) c) S 1 7 7 0 -1 4194560 10 0 0 0 250 50 0 0 20 0 1 0 100 1 1\n")
    for thread, schedstat in (("7", "9 2000000000 4\n"), ("8", "9 500000000 4\n"), ("9", "")):
        (tmp_path / "7" / "task" / thread).mkdir(parents=True)
        (tmp_path / "7" / "task" / thread / "schedstat").write_text(schedstat)
    memory = HostMemory(tmp_path)
    assert (memory.held_mb(7), memory.cpu_ticks(7)) == (20, 300 + 250)
    assert (memory.held_mb(8), memory.cpu_ticks(8)) == (None, None)


def test_this_host() -> None:
    memory = HostMemory()
    assert memory.now().unknown == ()
    assert (memory.held_mb(os.getpid()) or 0) > 0
    assert (memory.cpu_ticks(os.getpid()) or 0) > 0
