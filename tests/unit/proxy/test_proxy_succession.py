"""Two servers of one node, one after the other: who gets which connection and which request, and what happens when the next fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading

import pytest
from proxy_rig import SANDBOX, Rig, Table, answer, replies, request

from agentenv.core.errors import Unavailable
from agentenv.host.listeners import adopt
from agentenv.host.process import ProcessId
from agentenv.proxy import ProxyServer
from agentenv.proxy.connection import ClientConnection
from agentenv.serving import Doors, Turn, _dial, until_replaced


class Routes(Table):
    """A route table that can be asked which sandboxes are gone."""

    def __init__(self):
        super().__init__()
        self.vanished = 0

    def close_vanished(self):
        self.vanished += 1


class Succession:
    """The old server, and the next one in the same process; `starter` is what the old one starts it with."""

    def __init__(self, rig: Rig, tmp_path) -> None:
        self.rig = rig
        self.routes = Routes()
        self.doors = Doors(rig.proxy, self.routes, [])
        self.next_table = Table()
        self.next_proxy = ProxyServer(self.next_table, tmp_path / "next-api.sock", rig.proxy.settings)
        self.handed: list[int] = []
        self.talk: int | None = None

    def starter(self, listeners, talk):
        self.handed = [os.dup(fd) for fd in listeners]
        self.talk = os.dup(talk)
        return ProcessId(os.getpid(), 0)

    def start_next(self) -> threading.Thread:
        """What the next process does up to GO, in a thread; `turn` is its end of the talk."""
        self.turn = Turn(self.talk)
        thread = threading.Thread(target=self.turn.take)
        thread.start()
        return thread

    async def open_next(self) -> None:
        for sock in adopt(self.handed):
            await self.next_proxy.start(sock=sock)
        self.turn.serving()

    async def hand_over(self, stop: asyncio.Event | None = None) -> asyncio.Task[bool]:
        passing = asyncio.create_task(self.doors.pass_on(self.starter))
        await self.rig.settle(lambda: self.talk is not None)
        thread = self.start_next()
        assert await passing
        seeing_out = asyncio.create_task(self.doors.see_out(30, stop or asyncio.Event()))
        await asyncio.to_thread(thread.join, 10)
        return seeing_out


@pytest.fixture
async def two(rig, tmp_path):
    await rig.start()
    subject = Succession(rig, tmp_path)
    yield subject
    await subject.next_proxy.close(0)


async def test_a_connection_that_was_taken_off_the_listener_just_before_is_served(rig, two, monkeypatch):
    """The loop accepts, and shows the connection to us one or two turns later: the old server may have made way in between."""
    quick = await rig.upstream()
    port = await two.next_proxy.start()
    made = ClientConnection.connection_made

    def made_late(connection, transport):
        if connection.server is rig.proxy:
            rig.proxy.leave_to(lambda: _dial(socket.AF_INET, ("127.0.0.1", port)))
        made(connection, transport)

    monkeypatch.setattr(ClientConnection, "connection_made", made_late)
    client = await rig.client()
    head = await client.ask(request(quick))
    assert (head.status, head.get("connection")) == (200, "close"), head.raw
    assert two.next_table.resolved == 1


async def test_connections_streams_and_requests_each_end_up_where_they_are_served(rig, two):
    go_on = asyncio.Event()

    async def stream(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await go_on.wait()
        await peer.send(b"3\r\ndef\r\n0\r\n\r\n")

    slow = await rig.upstream(stream)
    quick = await rig.upstream()
    streaming, kept, token = await rig.client(), await rig.client(), "X-Access-Token: t\r\ne2b-traffic-access-token: secret\r\n"
    await streaming.send(request(slow))
    await streaming.until(b"abc\r\n")
    assert (await kept.ask(request(quick))).status == 200
    rig.table.error = AssertionError("the old table must not be asked any more")
    two.next_table.sandboxes[SANDBOX].token = "secret"

    seeing_out = await two.hand_over()
    waiting = await rig.client()  # connects while nobody accepts
    await waiting.send(request(quick, extra=token))
    await kept.send(request(quick, extra=token))
    await asyncio.sleep(0.1)
    assert two.next_table.resolved == 0
    await two.open_next()

    for client, closes in ((waiting, False), (kept, True)):
        head = await client.head()
        head.body = await client.body(head)
        assert head.status == 200, head.raw
        assert (head.get("connection") == "close") is closes
        assert b"secret" not in head.body, "the guest has seen the traffic token"
    assert two.next_table.resolved == 2
    assert not seeing_out.done()
    go_on.set()
    assert await streaming.until(b"0\r\n\r\n") == b"3\r\ndef\r\n0\r\n\r\n"
    streaming.close()
    kept.close()
    assert await asyncio.wait_for(seeing_out, 10)
    assert two.routes.vanished > 0
    assert (await waiting.ask(request(quick, extra=token))).status == 200


async def test_api_requests_go_to_the_next_server_too(rig, two, tmp_path):
    await rig.api(replies(answer(b"old")))
    kept = await rig.client()
    ask = b"GET /sandboxes HTTP/1.1\r\nHost: node\r\n\r\n"
    assert (await kept.ask(ask)).body == b"old"  # the proxy keeps its connection to the old API
    rig.api_path = tmp_path / "next-api.sock"
    await rig.api(replies(answer(b"new"), answer(b"new")))
    seeing_out = await two.hand_over()
    await two.open_next()
    head = await kept.ask(ask)
    assert (head.body, head["connection"]) == (b"new", "close")
    kept.close()
    assert await asyncio.wait_for(seeing_out, 10)


@pytest.mark.parametrize("how", ["ends at once", "cannot be started", "ends while it loads"])
async def test_a_next_server_that_does_not_get_ready_changes_nothing(rig, two, how):
    def start(listeners, talk):
        if how == "cannot be started":
            raise Unavailable("no such program")
        if how == "ends while it loads":
            other = socket.socket(fileno=os.dup(talk))
            threading.Timer(0.2, other.close).start()
        return ProcessId(os.getpid(), 0)

    stop, make_way, api = asyncio.Event(), asyncio.Event(), asyncio.create_task(asyncio.sleep(60))
    waiting = asyncio.create_task(until_replaced(two.doors, start, stop, make_way, api))
    make_way.set()
    quick = await rig.upstream()
    await asyncio.sleep(0.5)
    assert not waiting.done()
    client = await rig.client()
    assert (await client.ask(request(quick))).status == 200
    assert "connection" not in (await client.ask(request(quick)))
    stop.set()
    assert await asyncio.wait_for(waiting, 5) is False
    api.cancel()


async def test_a_next_server_that_dies_after_go_is_reported(rig, two):
    seeing_out = await two.hand_over()
    two.turn._socket.close()
    for fd in two.handed:
        os.close(fd)
    assert await asyncio.wait_for(seeing_out, 10) is False


async def test_a_former_server_ends_when_it_is_told_to(rig, two):
    quick = await rig.upstream()
    kept = await rig.client()
    await kept.ask(request(quick))
    stop = asyncio.Event()
    seeing_out = await two.hand_over(stop)
    await two.open_next()
    await asyncio.sleep(0.2)
    assert not seeing_out.done()
    stop.set()
    assert await asyncio.wait_for(seeing_out, 5)
    with contextlib.suppress(ConnectionError):
        await kept.rest()


def test_a_turn_whose_former_server_has_gone_ends(tmp_path):
    ours, theirs = socket.socketpair()
    turn = Turn(os.dup(theirs.fileno()))
    theirs.close()
    threading.Timer(0.2, ours.close).start()
    with pytest.raises(Unavailable, match="server before this one"):
        turn.take()
