from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_qemu import FakeQemu

from agentenv.core.errors import AgentEnvError, DeadlineExceeded, Internal, Unavailable
from agentenv.vmm.qmp import Qmp, QmpError

Request = dict[str, Any]


@pytest.fixture
async def qemu(tmp_path: Path) -> AsyncIterator[FakeQemu]:
    qemu = FakeQemu(tmp_path / "qmp.sock")
    await qemu.start()
    yield qemu
    await qemu.stop()


async def test_commands_are_answered_in_order_with_their_arguments(qemu: FakeQemu) -> None:
    async def echo(qemu: FakeQemu, request: Request) -> None:
        await qemu.send({"return": request["arguments"], "id": request["id"]})

    qemu.answers["echo"] = echo
    qmp = await Qmp.connect(qemu.socket, 5)
    results = await asyncio.gather(*(qmp.call("echo", 5, {"n": n}) for n in range(20)))
    assert results == [{"n": n} for n in range(20)]
    assert [request["execute"] for request in qemu.requests] == ["qmp_capabilities"] + ["echo"] * 20
    await qmp.close()


async def test_a_monitor_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    qemu = FakeQemu(tmp_path / "qmp.sock")
    connecting = asyncio.create_task(Qmp.connect(qemu.socket, 5))
    await asyncio.sleep(0.01)
    await qemu.start()
    qmp = await connecting
    assert not qmp.closed
    await qmp.close()
    await qemu.stop()


async def test_events_between_are_skipped(qemu: FakeQemu) -> None:
    async def noisy(qemu: FakeQemu, request: Request) -> None:
        event = {"event": "STOP", "timestamp": {"seconds": 1}}
        await qemu.send(event, {"event": "RESUME", "data": {"id": request["id"]}}, {"return": "mine", "id": request["id"]}, event)

    qemu.answers["stop"] = noisy
    qmp = await Qmp.connect(qemu.socket, 5)
    assert [await qmp.call("stop") for _ in range(3)] == ["mine"] * 3
    await qmp.close()


async def test_a_refusal_carries_qemus_words_and_the_connection_goes_on(qemu: FakeQemu) -> None:
    async def refuse(qemu: FakeQemu, request: Request) -> None:
        await qemu.send({"error": {"class": "GenericError", "desc": "no such disk"}, "id": request["id"]})

    qemu.answers["eject"] = refuse
    qmp = await Qmp.connect(qemu.socket, 5)
    with pytest.raises(QmpError, match="eject: no such disk"):
        await qmp.call("eject")
    assert await qmp.call("stop") == {}
    await qmp.close()


@pytest.mark.parametrize("raw", [b"", b'{"return": {}, "i'], ids=["before its reply", "amid its reply"])
async def test_a_monitor_that_closes_is_unavailable_at_once(qemu: FakeQemu, raw: bytes) -> None:
    async def die(qemu: FakeQemu, request: Request) -> None:
        await qemu.send(raw=raw)
        qemu.hang_up()

    qemu.answers["stop"] = die
    qmp = await Qmp.connect(qemu.socket, 5)
    with pytest.raises((Unavailable, Internal)):
        await asyncio.wait_for(qmp.call("stop"), 5)
    assert qmp.closed
    again = await Qmp.connect(qemu.socket, 5)
    assert await again.call("cont") == {}
    await again.close()


async def test_a_late_answer_is_not_the_next_commands(qemu: FakeQemu) -> None:
    async def late(qemu: FakeQemu, request: Request) -> None:
        await asyncio.sleep(0.05)
        await qemu.send({"return": "late", "id": request["id"]})

    qemu.answers["slow"] = late
    qmp = await Qmp.connect(qemu.socket, 5)
    with pytest.raises(DeadlineExceeded, match="slow"):
        await qmp.call("slow", 0.01)
    assert qmp.closed, "whoever uses it next must connect anew"
    again = await Qmp.connect(qemu.socket, 5)
    assert await again.call("stop") == {}
    await again.close()


async def test_an_answer_to_a_cancelled_command_is_skipped(qemu: FakeQemu) -> None:
    async def late(qemu: FakeQemu, request: Request) -> None:
        await asyncio.sleep(0.02)
        await qemu.send({"return": "late", "id": request["id"]})

    qemu.answers["slow"] = late
    qmp = await Qmp.connect(qemu.socket, 5)
    task = asyncio.create_task(qmp.call("slow"))
    await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await qmp.call("stop") == {}
    await qmp.close()


NOT_QMP = {"text": b"not json\r\n", "list": b"[1, 2]\r\n", "bytes": b"\xff\xfe\r\n", "endless": b"x" * (5 << 20) + b"\r\n"}


@pytest.mark.parametrize("raw", NOT_QMP.values(), ids=NOT_QMP)
async def test_an_answer_that_is_no_qmp_is_an_error_of_ours(qemu: FakeQemu, raw: bytes) -> None:
    async def babble(qemu: FakeQemu, request: Request) -> None:
        await qemu.send(raw=raw)

    qemu.answers["stop"] = babble
    qmp = await Qmp.connect(qemu.socket, 5)
    with pytest.raises(AgentEnvError, match="stop"):
        await qmp.call("stop")
    assert qmp.closed


async def test_nobody_there_within_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"0\.02 s"):
        await Qmp.connect(tmp_path / "nothing.sock", 0.02)


async def test_a_failed_connect_gives_the_monitor_free(qemu: FakeQemu) -> None:
    """QEMU talks to one client at a time: a connection left open would lock everybody out."""
    qemu.greets = False
    with pytest.raises(Unavailable):
        await Qmp.connect(qemu.socket, 0.02)
    qemu.greets = True
    qmp = await Qmp.connect(qemu.socket, 5)
    assert await qmp.call("stop") == {}
    assert qemu.connections == 2
    await qmp.close()
