"""A VMM that ends under a start or a save is no fault of ours: who asked may ask again."""

from __future__ import annotations

import asyncio
from collections import namedtuple
from pathlib import Path

import pytest

from agentenv.core.errors import AgentEnvError, Internal, StorageFull, Unavailable
from agentenv.host import process
from agentenv.vmm import failures

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("lives", "free_bytes", "error", "expected"),
    [
        (True, 1 << 30, Internal("refused"), Internal),
        (True, 1 << 30, OSError(2, "gone"), Internal),
        (True, 1 << 30, Unavailable("it does not answer"), Unavailable),
        (True, 1 << 20, Internal("no room"), StorageFull),
        (False, 1 << 30, Internal("refused"), Unavailable),
        (False, 1 << 30, OSError(2, "gone"), Unavailable),
        (False, 1 << 20, OSError(28, "no room"), Unavailable),
    ],
)
def test_what_a_failed_save_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool, free_bytes: int, error: Exception, expected: type[AgentEnvError]
) -> None:
    monkeypatch.setattr(failures.shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free_bytes))
    vmm = process.spawn(["sleep", "60"], tmp_path / "log", tmp_path)
    if not lives:
        process.kill(vmm)
    state = tmp_path / "vm.state"
    state.write_text("half")
    found = failures.failed_save(state, vmm, error)
    process.kill(vmm)
    assert type(found) is expected
    assert not state.exists()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, "the guest powered off or its VMM was killed"),
        ("\n", "the guest powered off or its VMM was killed"),
        ("one\r\ntwo\n", "its VMM ended: one / two"),
        ("\n".join("abcdefg"), "its VMM ended: c / d / e / f / g"),
        ("x" * 9000 + "\x1b[2J", f"its VMM ended: {'x' * 200} / [2J"),
        ("[    9.1] reboot: Power down\r\n", "the guest powered off"),
        ("[    9.1] reboot: System halted\r\n", "the guest halted"),
        ("[    9.1] reboot: Restarting system\r\n", "the guest rebooted, which a sandbox does not outlive"),
        ("Kernel panic - not syncing: sysrq triggered crash\n" + "CPU: 0\n" * 60, "the guest's kernel panicked: sysrq triggered crash"),
        (
            "Call Trace:\n---[ end Kernel panic - not syncing: killed init ]---\n",
            "the guest's kernel panicked: killed init",
        ),
        ("reboot: Power down\n" + "later\n" * 5, "its VMM ended: later / later / later / later / later"),
    ],
)
def test_why_a_vmm_has_ended(tmp_path: Path, said: str | None, reason: str) -> None:
    log = tmp_path / "vmm.log"
    if said is not None:
        log.write_text(said, newline="")
    assert failures.why_ended(log) == reason


async def _after(seconds: float, result: str = "", error: Exception | None = None) -> str:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return result


async def _nothing(seconds: float, error: Exception | None = None) -> None:
    await _after(seconds, error=error)


async def test_a_start_whose_vmm_ends_may_be_repeated_whoever_sees_it_first(tmp_path: Path) -> None:
    log = tmp_path / "vmm.log"
    await failures.started(_after(60), _nothing(0), log)
    with pytest.raises(Unavailable, match=r"the VM did not start: killed.*vmm\.log"):
        await failures.started(_after(0, "killed"), _nothing(60), log)
    with pytest.raises(Unavailable, match="the VM did not start: killed"):
        await failures.started(_after(0.02, "killed"), _nothing(0, Internal("connection lost")), log)
    with pytest.raises(Internal, match="refused"):
        await failures.started(_after(60), _nothing(0, Internal("refused")), log)
