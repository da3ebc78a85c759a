"""What a program says is kept to a bound, and never waited for."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from agentenv.host.capped_log import CappedLog, open_for_program


async def _settled(log: Path, wanted: bytes) -> None:
    for _ in range(1000):
        if log.exists() and wanted in log.read_bytes():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{wanted!r} is not in {log}")


async def test_what_is_said_before_and_after_the_start_is_kept(tmp_path: Path) -> None:
    program = open_for_program(tmp_path / "fifo")
    os.write(program, b"before\n")
    log = CappedLog(tmp_path / "fifo", tmp_path / "log")
    log.start()
    os.write(program, b"after\n")
    await _settled(tmp_path / "log", b"before\nafter\n")
    log.close()
    log.close()
    again = CappedLog(tmp_path / "fifo", tmp_path / "log")  # as a new server does
    again.start()
    os.write(program, b"later\n")
    os.close(program)
    await _settled(tmp_path / "log", b"before\nafter\nlater\n")
    again.close()


async def test_both_files_together_stay_below_twice_the_bound(tmp_path: Path) -> None:
    program = open_for_program(tmp_path / "fifo")
    log = CappedLog(tmp_path / "fifo", tmp_path / "log", max_bytes=10_000)
    log.start()
    for number in range(200):
        os.write(program, f"{number:06} ".encode() * 100)
        log.take()
    sizes = [(tmp_path / name).stat().st_size for name in ("log", "log.1")]
    assert all(0 < size <= 10_000 for size in sizes), sizes
    assert (tmp_path / "log").read_bytes().endswith(b"000199 ")
    log.close()
    os.close(program)


async def test_a_program_that_nobody_reads_does_not_stand_still(tmp_path: Path) -> None:
    program = open_for_program(tmp_path / "fifo")
    said = 0
    try:
        while said < 10 << 20:
            said += os.write(program, bytes(4096))
    except BlockingIOError:
        pass
    assert 0 < said <= 1 << 20
    os.close(program)


async def test_without_a_program_there_is_nothing_to_keep(tmp_path: Path) -> None:
    log = CappedLog(tmp_path / "fifo", tmp_path / "log")
    log.start()
    log.take()
    log.close()
    assert not (tmp_path / "log").exists()
