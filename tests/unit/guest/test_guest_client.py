"""The host's calls reach a guest from inside its network namespace, and leave no descriptor behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agentenv.core.clock import SystemClock
from agentenv.core.errors import DeadlineExceeded, Internal, NotFound
from agentenv.guest import client as client_module
from agentenv.guest.client import ENVD_PORT, GuestClient, GuestIdentity
from agentenv.host import netns
from agentenv.testing.fake_orchestrator import ManualClock

NAME = f"aenvtest-guest-{os.getpid()}"
ADDRESS = "127.0.0.1"
FIGURES = {"cpu_count": 1, "cpu_used_pct": 0, "mem_total": 4, "mem_used": 3, "mem_cache": 2, "disk_used": 1, "disk_total": 5}


@pytest.fixture
def namespace(root: None) -> Iterator[str]:
    subprocess.run(["ip", "netns", "add", NAME], check=True)
    subprocess.run(["ip", "-n", NAME, "link", "set", "lo", "up"], check=True)
    yield NAME
    subprocess.run(["ip", "netns", "del", NAME], check=True)


@pytest.fixture
async def heads(namespace: str) -> AsyncIterator[list[bytes]]:
    """An envd in the namespace that answers `/init` and `/metrics`; the requests it got, heads first."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length_bytes = re.search(rb"content-length: (\d+)", head.lower())
                seen.append(head + (await reader.readexactly(int(length_bytes[1])) if length_bytes else b""))
                body = json.dumps(FIGURES).encode() if b"/metrics" in seen[-1] else b""
                status = b"200 OK" if body else b"204 No Content\r\nX-Envd-Version: 9.9.9"
                length = b"Content-Length: %d\r\n" % len(body) if body else b"Connection: close\r\n"
                writer.write(b"HTTP/1.1 " + status + b"\r\n" + length + b"\r\n" + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    with netns.entered(namespace):
        listener = socket.create_server((ADDRESS, ENVD_PORT))
    server = await asyncio.start_server(serve, sock=listener)
    yield seen
    server.close()


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_metrics_are_read_from_inside_the_namespace(namespace: str, heads: list[bytes]) -> None:
    reader = GuestClient(ADDRESS, SystemClock()).metrics_reader(namespace, "the-token")
    for _ in range(3):
        sample = await reader.read(10)
        assert (sample.memory_used_bytes, sample.disk_total_bytes) == (3, 5)
        assert abs(sample.timestamp_ms - SystemClock().now_ms()) < 10_000
    assert len(heads) == 3
    assert b"X-Access-Token: the-token\r\n" in heads[0]
    reader.close()


async def test_a_guest_is_initialised_from_inside_the_namespace(namespace: str, heads: list[bytes]) -> None:
    client = GuestClient(ADDRESS, SystemClock())
    assert await client.initialise(namespace, GuestIdentity("isandbox", "template", "token"), 10) == "9.9.9"
    assert heads[0].startswith(b"POST /init ")


@pytest.mark.parametrize("days", [0, 30, 4000])
async def test_a_guest_learns_what_time_it_is_however_long_it_was_away(namespace: str, heads: list[bytes], days: int) -> None:
    """Case C07. That it then has that time from its first command on is tested with real guests."""
    clock = ManualClock()
    client = GuestClient(ADDRESS, clock)
    for _ in range(2):
        clock.advance_ms(days * 86_400_000)
        await client.initialise(namespace, GuestIdentity("isandbox", "template", "token"), 10)
        told = datetime.fromisoformat(json.loads(heads[-1].partition(b"\r\n\r\n")[2])["timestamp"])
        assert round(told.timestamp() * 1000) == clock.now_ms()


@pytest.mark.parametrize("boots", [True, False])
async def test_a_connection_that_a_booting_guest_did_not_hear_is_tried_anew(
    namespace: str, heads: list[bytes], monkeypatch: pytest.MonkeyPatch, boots: bool
) -> None:
    dial, tries = client_module._dial, 0

    async def deaf_at_first(*where: Any) -> Any:
        nonlocal tries
        tries += 1
        return await (asyncio.get_running_loop().create_future() if tries == 1 else dial(*where))

    monkeypatch.setattr(client_module, "_dial", deaf_at_first)
    monkeypatch.setattr(client_module, "_BOOT_CONNECT_S", 0.1)
    calling = GuestClient(ADDRESS, SystemClock()).initialise(namespace, GuestIdentity("i", "t", "token"), 30 if boots else 1, boots)
    if boots:
        assert await calling == "9.9.9"
    else:
        with pytest.raises(DeadlineExceeded):
            await calling


async def test_nobody_listens(namespace: str) -> None:
    client = GuestClient(ADDRESS, SystemClock())
    reader = client.metrics_reader(namespace, "the-token")
    with pytest.raises(Internal, match="cannot be asked"):
        await reader.read(10)
    before = _descriptors()
    for _ in range(20):
        with pytest.raises(Internal, match="cannot be asked"):
            await reader.read(10)
    with pytest.raises(DeadlineExceeded):
        await client.initialise(namespace, GuestIdentity("isandbox", "template", "token"), 0.3)
    assert _descriptors() == before


async def test_a_namespace_that_is_gone() -> None:
    with pytest.raises(NotFound, match="aenvtest-nothing"):
        await GuestClient(ADDRESS, SystemClock()).metrics_reader("aenvtest-nothing", "the-token").read(10)
