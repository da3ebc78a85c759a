"""Workers as the server sees them: four pipes and a process id, and the one cell that runs there now.

Owns the pipes and the process group. Invariants: at most one cell at a time; all output that a cell wrote before its end
comes before its end; output of nobody (a thread that goes on after its cell) is read and dropped, so that it never blocks;
when the client is slow the pipes fill and the cell waits.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import wire
from .limits import EVENT_MAX_BYTES, OUTPUT_PIECE_BYTES, QUEUE_MAX_EVENTS, SPAWNER_DEADLINE_S, START_DEADLINE_S

_PACKAGE = __package__ or ""
_IMPORTS_FROM = str(Path(__file__).parents[_PACKAGE.count(".") + 1])
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from importlib import import_module as i; i(sys.argv[2]).entry()"

_END_DEADLINE_S = 5.0


class WorkerLost(Exception):
    """A worker could not be started, or ended by itself."""


class Execution:
    """One cell on its way: its lines for the client, and whether the client still wants them."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[wire.Line | None] = asyncio.Queue(QUEUE_MAX_EVENTS)
        self.finished = asyncio.Event()
        self.abandoned = asyncio.Event()

    async def put(self, line: wire.Line) -> None:
        """Add a line; waits while too many wait. Dropped when the client is gone."""
        if not self.abandoned.is_set():
            await self.lines.put(line)

    async def finish(self) -> None:
        """No more lines."""
        if not self.finished.is_set():
            self.finished.set()
            if not self.abandoned.is_set():
                await self.lines.put(None)

    def abandon(self) -> None:
        """The client is gone. Frees whoever waits in `put`."""
        self.abandoned.set()
        while not self.lines.empty():
            self.lines.get_nowait()


class Spawner:
    """The server's side of `spawner`. `open` it once; when it is lost, `on_lost` is called and the server should end."""

    def __init__(self, preload: tuple[str, ...], environment: dict[str, str], on_lost: Callable[[], None]) -> None:
        self._preload, self._environment, self._on_lost = preload, environment, on_lost
        self._starting = asyncio.Lock()
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._process: asyncio.subprocess.Process | None = None

    async def open(self) -> None:
        """Start it and wait until its imports are done. WorkerLost."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._socket = ours
        loop = asyncio.get_running_loop()
        self._reply = loop.create_future()
        loop.add_reader(ours, self._receive)
        argv = [sys.executable, "-c", _BOOT, _IMPORTS_FROM, f"{_PACKAGE}.spawner", str(its.fileno()), ",".join(self._preload)]
        self._process = await asyncio.create_subprocess_exec(
            *argv, pass_fds=(its.fileno(),), env=self._environment, stdin=asyncio.subprocess.DEVNULL, cwd="/"
        )
        its.close()
        await self._answer(SPAWNER_DEADLINE_S)

    async def _answer(self, deadline_s: float = START_DEADLINE_S) -> dict[str, Any]:
        if self._reply is None:
            raise WorkerLost("the spawner is not open")
        try:
            return await asyncio.wait_for(self._reply, deadline_s)
        except TimeoutError as late:
            raise WorkerLost(f"the spawner did not answer within {deadline_s:g} s") from late
        finally:
            self._reply = None

    def _receive(self) -> None:
        try:
            message = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            asyncio.get_running_loop().remove_reader(self._socket)
            if self._reply is not None and not self._reply.done():
                self._reply.set_exception(WorkerLost("the spawner ended"))
            self._on_lost()
            return
        told = json.loads(message)
        if "exited" in told:
            exited = self._exits.pop(told["exited"], None)
            if exited is not None and not exited.done():
                exited.set_result(told["status"])
        elif self._reply is not None and not self._reply.done():
            if "started" in told:  # before the next message, which may already tell its end
                self._exits[told["started"]] = asyncio.get_running_loop().create_future()
            self._reply.set_result(told)

    async def start(self, argv: list[str] | None, cwd: str, environment: dict[str, str]) -> Worker:
        """A new worker: `argv`, or a Python worker when None. WorkerLost."""
        request_r, request_w = os.pipe()
        event_r, event_w = os.pipe()
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        its, ours = (request_r, event_w, out_w, err_w), (request_w, event_r, out_r, err_r)
        try:
            async with self._starting:
                self._reply = asyncio.get_running_loop().create_future()
                message = json.dumps({"start": {"argv": argv, "cwd": cwd, "environment": environment}}).encode()
                socket.send_fds(self._socket, [message], list(its))
                told = await self._answer()
            if "failed" in told:
                raise WorkerLost(str(told["failed"]))
        except OSError as problem:
            for descriptor in ours:
                os.close(descriptor)
            raise WorkerLost(f"the spawner cannot be told: {problem.strerror}") from problem
        except WorkerLost:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in its:
                os.close(descriptor)
        pid = int(told["started"])
        return Worker(pid, self._exits[pid], ours)

    async def close(self) -> None:
        """End it and every worker."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


class Worker:
    """A started worker. `ready` first; `end` in the end."""

    def __init__(self, pid: int, exited: asyncio.Future[int], pipes: tuple[int, int, int, int]) -> None:
        self.pid = pid
        self._exited = exited
        self._requests, self._events, *outputs = pipes
        for descriptor in pipes:
            os.set_blocking(descriptor, False)
        self._outputs = dict(zip(outputs, ("stdout", "stderr"), strict=True))
        self._decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in outputs}
        self._event_bytes = bytearray()
        self._readable = asyncio.Event()
        self._first = asyncio.Event()
        self._execution: Execution | None = None
        self.is_lost = False
        self._open = {self._events, *outputs}
        for descriptor in self._open:
            asyncio.get_running_loop().add_reader(descriptor, self._saw, descriptor)
        self._pump = asyncio.create_task(self._run_pump(), name=f"worker {pid}")

    # --- what contexts do ------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait for its first event. WorkerLost."""
        try:
            await asyncio.wait_for(self._first.wait(), START_DEADLINE_S)
        except TimeoutError as late:
            await self.end()
            raise WorkerLost(f"it was not ready within {START_DEADLINE_S:g} s") from late
        if self.is_lost:
            raise WorkerLost(f"it {await self.last_words()}")

    async def begin(self, execution: Execution, request: dict[str, Any] | str) -> None:
        """Run a cell; its lines go to `execution`, which is finished when the cell is, or when the worker is lost."""
        self._execution = execution
        line = request if isinstance(request, str) else json.dumps(request)
        await self._write(line.encode() + b"\n")
        if self.is_lost:
            await self._lose()

    def interrupt(self) -> None:
        """As Ctrl-C does it: the worker and what it runs in the foreground are told."""
        self._signal(signal.SIGINT)

    async def end(self) -> None:
        """End it with all that it started. A cell that runs is told by an error. Idempotent."""
        self._signal(signal.SIGKILL)
        await asyncio.wait({self._pump}, timeout=_END_DEADLINE_S)  # longer only while a slow client takes the last lines

    async def last_words(self) -> str:
        """How it ended, as the end of a sentence."""
        try:
            status = os.waitstatus_to_exitcode(await asyncio.wait_for(asyncio.shield(self._exited), 5.0))
        except TimeoutError:
            return "closed its pipes"
        return f"ended with status {status}" if status >= 0 else f"was killed by signal {-status} ({signal.Signals(-status).name})"

    def _signal(self, number: signal.Signals) -> None:
        if not self._exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    # --- pipes -----------------------------------------------------------------------------------------------------

    def _saw(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)  # until it was read: a full queue must not spin
        self._readable.set()

    async def _run_pump(self) -> None:
        loop = asyncio.get_running_loop()
        while self._events in self._open:
            await self._readable.wait()
            self._readable.clear()
            await self._read_events()
            for descriptor in self._outputs:
                await self._read_output(descriptor)
            for descriptor in self._open:
                loop.add_reader(descriptor, self._saw, descriptor)
        for descriptor in self._outputs:
            await self._drain(descriptor)
        self.is_lost = True
        self._first.set()
        await self._lose()
        for descriptor in (self._requests, self._events, *self._outputs):
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def _read(self, descriptor: int) -> bytes | None:
        """What is there now; None when nothing is, empty at the end."""
        try:
            data = os.read(descriptor, OUTPUT_PIECE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._open.discard(descriptor)
        return data

    async def _read_output(self, descriptor: int) -> bool:
        if descriptor not in self._open or not (data := self._read(descriptor)):
            return False
        text = self._decoders[descriptor].decode(data)
        if text and self._execution is not None:
            await self._execution.put(wire.output(self._outputs[descriptor], text))
        return True

    async def _drain(self, descriptor: int) -> None:
        while await self._read_output(descriptor):
            pass

    async def _read_events(self) -> None:
        while self._events in self._open and (data := self._read(self._events)):
            self._event_bytes += data
            while (end := self._event_bytes.find(b"\n")) >= 0:
                line = bytes(self._event_bytes[:end])
                del self._event_bytes[: end + 1]
                await self._handle(json.loads(line))
            if len(self._event_bytes) > EVENT_MAX_BYTES + 4096:
                self._signal(signal.SIGKILL)  # a worker keeps to the limit by itself; this one is not itself any more
                return

    async def _handle(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        execution = self._execution
        if kind == "ready":
            self._first.set()
        elif execution is None:
            return
        elif kind == "number_of_executions":
            await execution.put({"type": kind, "execution_count": event["execution_count"]})
        elif kind in ("bundle", "error", "end"):
            for descriptor in self._outputs:  # it was written before
                await self._drain(descriptor)
            await self._handle_after_output(execution, kind, event)

    async def _handle_after_output(self, execution: Execution, kind: str, event: dict[str, Any]) -> None:
        if kind == "end":
            for descriptor in self._outputs:
                rest = self._decoders[descriptor].decode(b"", final=True)
                if rest:
                    await execution.put(wire.output(self._outputs[descriptor], rest))
            self._execution = None
            await execution.finish()
        elif kind == "bundle":
            await execution.put(wire.result(event["data"], bool(event["main"])))
        else:
            await execution.put(wire.error(str(event["name"]), str(event["value"]), str(event["traceback"])))

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.is_lost:
            try:
                view = view[os.write(self._requests, view) :]
            except BlockingIOError:
                await self._writable()
            except OSError:
                return  # the pump finds out that it is lost

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        room: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self._requests, _finish, room)
        try:
            await asyncio.wait({room, self._pump}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not self.is_lost:
                loop.remove_writer(self._requests)

    async def _lose(self) -> None:
        execution, self._execution = self._execution, None
        if execution is not None:
            why = f"The context's process {await self.last_words()}. Its variables are gone; the next execution starts anew."
            await execution.put(wire.error("ContextRestarting", why))
            await execution.finish()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
