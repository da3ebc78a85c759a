"""Reading a guest's metrics: one kept connection, and no trust in what comes over it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core.errors import DeadlineExceeded, Internal
from agentenv.core.model import MetricSample
from agentenv.guest.metrics import BODY_MAX_BYTES, HEAD_MAX_BYTES, MetricsReader, parse_figures, parse_head
from agentenv.testing.fake_orchestrator import ManualClock

FIGURES: dict[str, Any] = {
    "ts": 1, "cpu_count": 2, "cpu_used_pct": 12.34, "mem_total": 512 << 20, "mem_used": 100 << 20, "mem_cache": 50 << 20,
    "mem_total_mib": 512, "mem_used_mib": 100, "disk_used": 1 << 30, "disk_total": 8 << 30,
}  # fmt: skip
JSON_LEAF = st.none() | st.booleans() | st.floats() | st.integers() | st.text()
BODY = json.dumps(FIGURES).encode()


def reply(body: bytes = BODY, status: str = "200 OK", length: int | None = None) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length or len(body)}\r\n\r\n".encode() + body


class Guest:
    """A server on loopback that answers every request with what `answers` has next."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []  # None: close the connection
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()
        self.connections = 0
        self.closed_by_us = asyncio.Event()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                self.asked.set()
                answer = self.answers.pop(0)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed_by_us.set()
        finally:
            writer.close()

    def reader(self) -> MetricsReader:
        return MetricsReader(lambda: asyncio.open_connection("127.0.0.1", self.port, limit=HEAD_MAX_BYTES), "the-token", ManualClock())


@pytest.fixture
async def guest() -> AsyncIterator[Guest]:
    guest = Guest()
    server = await asyncio.start_server(guest.serve, "127.0.0.1", 0)
    guest.port = server.sockets[0].getsockname()[1]
    yield guest
    server.close()


async def test_readings_share_one_connection_and_bear_the_hosts_time(guest: Guest) -> None:
    guest.answers = [reply(), reply()]
    reader = guest.reader()
    samples = [await reader.read(5), await reader.read(5)]
    now_ms = ManualClock().now_ms()
    assert samples == [MetricSample(now_ms, 2, 12.34, 100 << 20, 512 << 20, 50 << 20, 1 << 30, 8 << 30)] * 2
    assert (guest.connections, len(guest.requests)) == (1, 2)
    assert guest.requests[0].startswith(b"GET /metrics HTTP/1.1\r\n")
    assert b"\r\nX-Access-Token: the-token\r\n" in guest.requests[0]
    reader.close()
    await asyncio.wait_for(guest.closed_by_us.wait(), 5)
    reader.close()


async def test_a_connection_that_the_guest_closed_is_replaced(guest: Guest) -> None:
    guest.answers = [reply(), None, reply()]
    reader = guest.reader()
    await reader.read(5)
    with pytest.raises(Internal, match="closed the connection"):
        await reader.read(5)
    await reader.read(5)
    assert guest.connections == 2
    reader.close()


async def test_an_idle_connection_that_was_closed_costs_no_reading(guest: Guest) -> None:
    async def once(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stream.readuntil(b"\r\n\r\n")
        writer.write(reply())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(once, "127.0.0.1", 0)
    guest.port = server.sockets[0].getsockname()[1]
    reader = guest.reader()
    for _ in range(3):
        await reader.read(5)
        await asyncio.sleep(0.05)  # until its end has come over
    reader.close()
    server.close()


async def test_a_late_answer_is_never_taken_for_the_next(guest: Guest) -> None:
    guest.answers = [b"", reply(b'{"late": 1}')]
    reader = guest.reader()
    with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
        await reader.read(0.1)
    await asyncio.wait_for(guest.closed_by_us.wait(), 5)
    guest.answers = [reply()]
    assert (await reader.read(5)).cpu_count == 2
    assert guest.connections == 2
    reader.close()


async def test_a_cancelled_reading_drops_the_connection(guest: Guest) -> None:
    guest.answers = [b""]
    task = asyncio.create_task(guest.reader().read(60))
    await asyncio.wait_for(guest.asked.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(guest.closed_by_us.wait(), 5)


@pytest.mark.parametrize(
    "answer",
    [
        reply(b'{"code":401}', "401 Unauthorized"),
        reply(b"{}"),
        reply(b"[1]"),
        reply(b"nonsense"),
        reply(b"\xff\xfe\xfd"),
        reply(b"[" * 4000),
        reply(b'{"cpu_count": ' + b"9" * 4000 + b"}"),
        reply(length=BODY_MAX_BYTES + 1),
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        b"x" * (1 << 20),
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 20),
        b"\r\n\r\n",
    ],
)
async def test_an_answer_that_is_none_of_envds_is_an_error_and_closes(guest: Guest, answer: bytes) -> None:
    guest.answers = [answer, reply()]
    reader = guest.reader()
    with pytest.raises(Internal, match="metrics"):
        await reader.read(5)
    assert (await reader.read(5)).cpu_count == 2, "the connection was used again after nonsense"
    assert guest.connections == 2
    reader.close()


async def test_a_guest_that_cannot_be_reached(guest: Guest) -> None:
    guest.port = 1
    with pytest.raises(Internal, match="cannot be asked"):
        await guest.reader().read(5)


@pytest.mark.parametrize("name", [name for name in FIGURES if name not in ("ts", "mem_total_mib", "mem_used_mib")])
@pytest.mark.parametrize("value", [None, True, "1", -1, 2**63, float("nan"), float("inf"), [], "missing"])
def test_an_impossible_figure(name: str, value: Any) -> None:
    figures = {**FIGURES, name: value}
    if value == "missing":
        del figures[name]
    with pytest.raises(Internal, match=name):
        parse_figures(json.dumps(figures).encode(), 0)


@pytest.mark.parametrize(("name", "value"), [("cpu_used_pct", 100.01), ("cpu_count", 65536)])
def test_a_figure_beyond_its_limit(name: str, value: float) -> None:
    with pytest.raises(Internal, match=name):
        parse_figures(json.dumps(FIGURES | {name: value}).encode(), 0)


@given(st.binary(max_size=200) | st.recursive(JSON_LEAF, st.lists).map(lambda value: json.dumps(value).encode()))
def test_a_body_without_the_figures_is_an_error(body: bytes) -> None:
    with pytest.raises(Internal, match="metrics"):
        parse_figures(body, 0)


@given(st.dictionaries(st.sampled_from(list(FIGURES)), JSON_LEAF))
def test_any_figures_are_possible_ones_or_an_error(changes: dict[str, Any]) -> None:
    try:
        sample = parse_figures(json.dumps(FIGURES | changes).encode(), 7)
    except Internal:
        return
    assert sample.timestamp_ms == 7
    assert 0 <= sample.cpu_used_percent <= 100
    assert all(0 <= getattr(sample, name) < 2**63 for name in MetricSample.__dataclass_fields__)


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        (b"content-length: 250\r\n", 250),
        (b"a: b\r\nContent-Length:0 \r\nc: d\r\n", 0),
        (b"content-length: 2\r\ncontent-length: 3\r\n", None),
        (b"content-length: -1\r\n", None),
        (b"content-length: 1e3\r\n", None),
        (b"x-content-length: 2\r\n", None),
        (b"content-length: %d\r\n" % (BODY_MAX_BYTES + 1), None),
        (b"", None),
    ],
)
def test_heads(lines: bytes, size: int | None) -> None:
    head = b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n"
    if size is None:
        with pytest.raises(Internal, match="size"):
            parse_head(head)
    else:
        assert parse_head(head) == size


@given(st.binary(max_size=300) | st.binary(max_size=100).map(lambda noise: b"HTTP/1.1 200 OK\r\ncontent-length: " + noise + b"\r\n\r\n"))
def test_any_head_is_a_size_or_an_error(head: bytes) -> None:
    try:
        size = parse_head(head)
    except Internal:
        return
    assert 0 <= size <= BODY_MAX_BYTES
