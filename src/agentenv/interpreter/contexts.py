"""The contexts of a sandbox: each a language, a folder and a worker that keeps its variables.

Invariants: cells of one context run one after the other, in the order they came; a context outlives its worker, which is
started anew when it was lost; a cell whose client is gone is stopped before the next one starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from . import wire
from .environment import Sandbox
from .languages import BadRequest, Cell, CellRefused, argv_of, environment_of, new_folder, request_of
from .limits import CONTEXTS_MAX, INTERRUPT_GRACE_S
from .worker import Execution, Spawner, Worker, WorkerLost

_log = logging.getLogger(__name__)
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
DEFAULTS = ("python", "javascript")
"""Languages whose default context is there from the start."""


Spare = Callable[[str, str], Worker | None]
"""Gives a worker for a language and folder that was started in advance, or None."""


class NotFound(Exception):
    """No such context; the text goes to the client with status 404."""


class Context:
    """One context. `start` first, `close` in the end."""

    def __init__(self, language: str, cwd: str, spawner: Spawner, sandbox: Sandbox, base_environment: dict[str, str], spare: Spare) -> None:
        self.id = str(uuid.uuid4())
        self.language, self.cwd = language, cwd
        self._spawner, self._sandbox, self._base_environment = spawner, sandbox, base_environment
        self._spare = spare
        self._turn = asyncio.Lock()
        self._worker: Worker | None = None
        self._known: dict[str, str] = {}  # sandbox-wide variables that its worker has
        self._sandbox_id = sandbox.id()
        self._count = 0
        self._folder = new_folder()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def describe(self) -> dict[str, str]:
        """As clients see it."""
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def start(self) -> None:
        """Start a worker if there is none that lives. WorkerLost."""
        if self._worker is not None and not self._worker.is_lost:
            return
        self._known, self._count = {}, 0
        self._worker = self._spare(self.language, self.cwd)
        if self._worker is None or self._worker.is_lost:
            self._worker = await start_worker(self._spawner, self.language, self.cwd, self._base_environment)
        await self._worker.ready()

    def execute(self, code: str, once: dict[str, str], access_token: str | None) -> Execution:
        """Run a cell when its turn comes; its lines are on the execution. Set `abandoned` on it to stop it."""
        execution = Execution()
        task = asyncio.create_task(self._run(execution, code, once, access_token), name=f"cell in {self.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return execution

    async def _run(self, execution: Execution, code: str, once: dict[str, str], access_token: str | None) -> None:
        try:
            async with self._turn:
                if execution.abandoned.is_set():
                    return
                if self._closed:
                    raise CellRefused("ContextRemoved", "the context was removed")
                await self.start()
                await self._begin(execution, code, once, access_token)
                await _first_of(execution.finished, execution.abandoned)
                if not execution.finished.is_set():
                    await self._stop(execution)
        except CellRefused as refused:
            await execution.put(wire.error(refused.name, str(refused)))
        except WorkerLost as lost:
            await execution.put(wire.error("ContextFailed", f"the context's process could not be started: {lost}"))
        finally:
            await execution.finish()

    async def _begin(self, execution: Execution, code: str, once: dict[str, str], access_token: str | None) -> None:
        wanted = await self._sandbox.variables(access_token)
        wanted = self._known if wanted is None else {name: value for name, value in wanted.items() if _VARIABLE.match(name)}
        changed = {name: value for name, value in wanted.items() if self._known.get(name) != value}
        gone = tuple(name for name in self._known if name not in wanted)
        sandbox_id = self._sandbox.id()
        cell = Cell(code, changed, gone, once, reseed=sandbox_id != self._sandbox_id)
        request = await request_of(self.language, cell, self._count + 1, self._folder)
        self._count, self._known, self._sandbox_id = self._count + 1, wanted, sandbox_id
        if self._worker is None:
            raise WorkerLost("it is not there")
        await self._worker.begin(execution, request)

    async def _stop(self, execution: Execution) -> None:
        """Nobody waits for the cell any more: interrupt it, and end its worker when it does not heed."""
        worker = self._worker
        if worker is None:
            return
        worker.interrupt()
        try:
            await asyncio.wait_for(execution.finished.wait(), INTERRUPT_GRACE_S)
        except TimeoutError:
            _log.warning("context %s did not heed an interrupt within %g s; it is started anew", self.id, INTERRUPT_GRACE_S)
            await worker.end()

    async def restart(self) -> None:
        """Lose all variables. A cell that runs ends with an error. WorkerLost."""
        if self._worker is not None:
            await self._worker.end()
        async with self._turn:
            await self.start()

    async def close(self) -> None:
        """End its worker and refuse cells that wait."""
        self._closed = True
        if self._worker is not None:
            await self._worker.end()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


async def start_worker(spawner: Spawner, language: str, cwd: str, environment: dict[str, str]) -> Worker:
    """A new worker for a language; not `ready` yet. WorkerLost."""
    return await spawner.start(argv_of(language), cwd, environment_of(language, environment))


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class Contexts:
    """All contexts, in the order they were made."""

    def __init__(
        self, preload: tuple[str, ...], sandbox: Sandbox, base_environment: dict[str, str], home: str, on_lost: Callable[[], None]
    ) -> None:
        self._spawner = Spawner(preload, base_environment, on_lost)
        self._sandbox, self._base_environment, self._home = sandbox, base_environment, home
        self._all: dict[str, Context] = {}
        self._defaults: dict[str, Context] = {}
        self._making = asyncio.Lock()
        self._spare_worker: Worker | None = None

    async def open(self) -> None:
        """Start the default contexts. WorkerLost when there is no Python; another language that is not there is a warning."""
        await self._spawner.open()
        for language in DEFAULTS:
            try:
                await self.default(language)
            except WorkerLost as lost:
                if language == "python":
                    raise
                _log.warning("no default context for %s: %s", language, lost)
                return
        # One more node, which is then part of the template: the first context of TypeScript, or a second one of JavaScript, need
        # not wait for its start (seconds in an emulated guest). It is not replaced, which would take the cell's CPU.
        self._spare_worker = await start_worker(self._spawner, "javascript", self._home, self._base_environment)
        await self._spare_worker.ready()

    def _take_spare(self, language: str, cwd: str) -> Worker | None:
        if cwd != self._home or argv_of(language) != argv_of("javascript"):
            return None
        spare, self._spare_worker = self._spare_worker, None
        return spare

    async def create(self, language: str, cwd: str | None) -> Context:
        """A new context. BadRequest, WorkerLost."""
        folder = cwd or self._home
        if not os.access(folder, os.X_OK) or not await asyncio.to_thread(Path(folder).is_dir):
            raise BadRequest(f"cwd {folder!r} is not a folder that can be entered")
        if len(self._all) >= CONTEXTS_MAX:
            raise BadRequest(f"this sandbox has {CONTEXTS_MAX} contexts, the most there may be; remove one first")
        context = Context(language, folder, self._spawner, self._sandbox, self._base_environment, self._take_spare)
        self._all[context.id] = context
        try:
            await context.start()
        except BaseException:
            del self._all[context.id]
            await context.close()
            raise
        return context

    async def default(self, language: str) -> Context:
        """The default context of a language, made at its first use, and again when it was removed."""
        async with self._making:
            context = self._defaults.get(language)
            if context is None or context.id not in self._all:
                context = self._defaults[language] = await self.create(language, None)
            return context

    def get(self, context_id: str) -> Context:
        """A context by id. NotFound."""
        context = self._all.get(context_id)
        if context is None:
            raise NotFound(f"Context {context_id} not found")
        return context

    def list(self) -> list[Context]:
        """All of them, oldest first."""
        return list(self._all.values())

    async def remove(self, context_id: str) -> None:
        """End a context. NotFound."""
        context = self.get(context_id)
        del self._all[context_id]
        await context.close()

    async def close(self) -> None:
        """End everything."""
        for context in self.list():
            await context.close()
        await self._spawner.close()
