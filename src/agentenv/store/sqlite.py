"""The node's memory across restarts: one SQLite file, written by one thread, mirrored in memory for reads.

Invariants: a state changes only through `transition`, which compares and swaps and knows the lifecycle table; writes of
one sandbox come one after the other. The mirror shows a sandbox's change from the moment it is asked for, so that no
task acts on the old state meanwhile, and goes back when the commit fails: when a call has returned, mirror and file
agree. WAL with `synchronous=NORMAL`: a commit survives any death of the process; the last ones may be lost when the
machine dies, and then the file is still consistent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from pydantic import TypeAdapter

from agentenv.core.builds import BuildJob, CachedStep
from agentenv.core.clock import Clock
from agentenv.core.errors import AgentEnvError, Conflict, DataCorrupt, HostNotReady, Internal, NotFound, StorageFull
from agentenv.core.images import Image
from agentenv.core.lifecycle import State, is_allowed
from agentenv.core.model import Checkpoint, LogEntry, LogQuery, Sandbox, Secret, Snapshot, Template, Volume
from agentenv.core.spans import span
from agentenv.core.tasks import wait_done
from agentenv.store import schema
from agentenv.store.shelf import TableShelf

T = TypeVar("T")
_SANDBOX = TypeAdapter(Sandbox)
_SNAPSHOT = TypeAdapter(Snapshot)
_TEMPLATE = TypeAdapter(Template)
_LOG_ENTRY = TypeAdapter(LogEntry)
_FULL_BELOW_BYTES = 64 << 10  # SQLite grows its files by less; an I/O error with less free space means a full disk
_ALL_TEMPLATES = "templates"  # the row lock of all templates together: names are unique among them
_END_OF_TIME_MS = 2**53
_EVENTS_PER_SANDBOX = 2000  # a sandbox's life is tens of events; the bound stops one that is paused in a loop for days


class Store:
    """`open` it once per node; every method is safe to call from any task of that loop."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._worker = ThreadPoolExecutor(1, "store")
        self._sandboxes: dict[str, Sandbox] = {}
        self._created: dict[str, str] = {}  # by the key of its creation: the newest sandbox
        self._snapshots: dict[str, Snapshot] = {}
        self._templates: dict[str, Template] = {}
        self.volumes = TableShelf("volumes", Volume, "volume_id", self._execute)
        self.secrets = TableShelf("secrets", Secret, "secret_id", self._execute)
        self.builds = TableShelf("builds", BuildJob, "build_id", self._execute)
        self.cached_steps = TableShelf("cached_steps", CachedStep, "key", self._execute)
        self.images = TableShelf("images", Image, "digest", self._execute)
        self.checkpoints = TableShelf("checkpoints", Checkpoint, "checkpoint_id", self._execute)
        self._rows: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one writer per sandbox

    async def open(self) -> None:
        """Create or open the file and load it. DataCorrupt or HostNotReady name the file and what to do."""
        await self._run(self._open)

    async def close(self) -> None:
        """Finish pending writes and close."""
        await self._run(lambda: self._db.close())
        self._worker.shutdown()

    # --- sandboxes -------------------------------------------------------------------------------------------------

    def sandbox(self, sandbox_id: str) -> Sandbox | None:
        """A sandbox in any state, or None."""
        return self._sandboxes.get(sandbox_id)

    def created_by(self, key: str) -> Sandbox | None:
        """The newest sandbox that a creation with this key made, in any state."""
        return self._sandboxes.get(self._created.get(key, ""))

    def sandboxes(self) -> list[Sandbox]:
        """All sandboxes in any state."""
        return list(self._sandboxes.values())

    async def add_sandbox(self, sandbox: Sandbox) -> None:
        """Record a new sandbox. Conflict when the id exists."""
        async with self._row(sandbox.sandbox_id):
            if sandbox.sandbox_id in self._sandboxes:
                raise Conflict(f"sandbox {sandbox.sandbox_id} exists already")
            await self._write_sandbox(replace(sandbox, updated_at_ms=self._clock.now_ms()))

    async def transition(self, sandbox_id: str, expected: State, new: State, event: LogEntry | None = None, /, **changes: Any) -> Sandbox:
        """Move a sandbox from `expected` to `new`, with `changes` and `event` in the same commit. Conflict when it is not in `expected`."""
        if not is_allowed(expected, new):
            raise Internal(f"{expected} -> {new} is not in the lifecycle table")
        async with self._row(sandbox_id):
            current = self._known(sandbox_id)
            if current.state is not expected:
                raise Conflict(f"sandbox {sandbox_id} is {current.state}, not {expected}")
            return await self._write_sandbox(replace(current, state=new, updated_at_ms=self._clock.now_ms(), **changes), event)

    async def change(self, sandbox_id: str, **changes: Any) -> Sandbox:
        """Change other fields than the state."""
        if "state" in changes:
            raise Internal("a state changes only through `transition`")
        async with self._row(sandbox_id):
            return await self._write_sandbox(replace(self._known(sandbox_id), updated_at_ms=self._clock.now_ms(), **changes))

    async def forget_sandbox(self, sandbox_id: str) -> None:
        """Drop the row and the log of a killed sandbox."""
        async with self._row(sandbox_id):
            await self._execute(
                ("DELETE FROM sandboxes WHERE sandbox_id = ?", (sandbox_id,)),
                ("DELETE FROM events WHERE sandbox_id = ?", (sandbox_id,)),
                mirror=lambda: self._drop(sandbox_id),
            )

    def _drop(self, sandbox_id: str) -> None:
        dropped = self._sandboxes.pop(sandbox_id, None)
        creation = dropped.creation if dropped is not None else None
        if creation is not None and self._created.get(creation.key) == sandbox_id:
            del self._created[creation.key]

    def _row(self, sandbox_id: str) -> asyncio.Lock:
        return self._rows.setdefault(sandbox_id, asyncio.Lock())

    def _known(self, sandbox_id: str) -> Sandbox:
        if sandbox_id not in self._sandboxes:
            raise NotFound(f"sandbox {sandbox_id} does not exist")
        return self._sandboxes[sandbox_id]

    async def _write_sandbox(self, sandbox: Sandbox, event: LogEntry | None = None) -> Sandbox:
        """The caller holds the row. Mirror and file agree at the end, also when the commit fails or the caller is cancelled."""
        before = self._sandboxes.get(sandbox.sandbox_id)
        self._sandboxes[sandbox.sandbox_id] = sandbox
        row = (sandbox.sandbox_id, sandbox.state.value, sandbox.updated_at_ms, json.dumps(asdict(sandbox)))
        try:
            added = () if event is None else _adding(sandbox.sandbox_id, event)
            await self._execute(("INSERT OR REPLACE INTO sandboxes VALUES (?, ?, ?, ?)", row), *added)
        except Exception:
            if before is None:
                del self._sandboxes[sandbox.sandbox_id]
            else:
                self._sandboxes[sandbox.sandbox_id] = before
            raise
        if sandbox.creation is not None and (before is None or before.creation is None):
            self._created[sandbox.creation.key] = sandbox.sandbox_id
        return sandbox

    # --- snapshots and templates -----------------------------------------------------------------------------------

    def snapshot(self, snapshot_id: str) -> Snapshot:
        """A snapshot by id. NotFound."""
        if snapshot_id not in self._snapshots:
            raise NotFound(f"snapshot {snapshot_id} does not exist")
        return self._snapshots[snapshot_id]

    def snapshots(self) -> list[Snapshot]:
        """All snapshots."""
        return list(self._snapshots.values())

    async def add_snapshot(self, snapshot: Snapshot) -> None:
        """Record a finished snapshot."""
        await self._execute(
            ("INSERT INTO snapshots VALUES (?, ?)", (snapshot.snapshot_id, json.dumps(asdict(snapshot)))),
            mirror=lambda: self._snapshots.update({snapshot.snapshot_id: snapshot}),
        )

    async def change_snapshot(self, snapshot_id: str, change: Callable[[Snapshot], Snapshot]) -> bool:
        """Give a snapshot other layers with the same content: what `change` makes of it. False when that is the same, or it is gone."""
        async with self._row(snapshot_id):
            if snapshot_id not in self._snapshots or (after := change(self._snapshots[snapshot_id])) == self._snapshots[snapshot_id]:
                return False

            def mirror() -> None:
                if snapshot_id in self._snapshots:  # else it was removed meanwhile
                    self._snapshots[snapshot_id] = after

            statement = "UPDATE snapshots SET body = ? WHERE snapshot_id = ?"
            await self._execute((statement, (json.dumps(asdict(after)), snapshot_id)), mirror=mirror)
            return True

    async def remove_snapshot(self, snapshot_id: str) -> None:
        """Forget a snapshot; its files are the garbage collector's. No error when it is gone."""
        await self._execute(
            ("DELETE FROM snapshots WHERE snapshot_id = ?", (snapshot_id,)),
            mirror=lambda: self._snapshots.pop(snapshot_id, None),
        )

    def template(self, template_id: str) -> Template | None:
        """A template by id, or None."""
        return self._templates.get(template_id)

    def templates(self) -> list[Template]:
        """All templates, newest first."""
        return sorted(self._templates.values(), key=lambda t: (t.created_at_ms, t.template_id), reverse=True)

    async def change_templates(self, change: Callable[[list[Template]], Template]) -> Template:
        """Record the template that `change` makes of those there are: add, replace, or forget it when it has no builds.

        Changes come one after the other. Errors of `change` pass through and change nothing. Conflict when an alias is taken.
        The mirror follows the commit: until then what the former template names is still in use.
        """
        async with self._row(_ALL_TEMPLATES):
            template = change(self.templates())
            template_id = template.template_id
            if not template.builds:
                forget = ("DELETE FROM templates WHERE template_id = ?", (template_id,))
                await self._execute(forget, mirror=lambda: self._templates.pop(template_id, None))
                return template
            self._check_aliases(template)
            row = (template_id, template.spawn_count, template.last_spawned_at_ms, json.dumps(asdict(template)))
            put = ("INSERT OR REPLACE INTO templates VALUES (?, ?, ?, ?)", row)
            await self._execute(put, mirror=lambda: self._templates.update({template_id: template}))
            return template

    async def count_spawn(self, template_id: str, at_ms: int) -> None:
        """One more sandbox was made from a template. Nothing when it is gone."""
        async with self._row(_ALL_TEMPLATES):
            template = self._templates.get(template_id)
            if template is None:
                return
            counted = replace(template, spawn_count=template.spawn_count + 1, last_spawned_at_ms=at_ms)
            statement = "UPDATE templates SET spawn_count = ?, last_spawned_at_ms = ? WHERE template_id = ?"
            values = (counted.spawn_count, at_ms, template_id)
            await self._execute((statement, values), mirror=lambda: self._templates.update({template_id: counted}))

    def _check_aliases(self, template: Template) -> None:
        for other in self._templates.values():
            if other.template_id != template.template_id:
                taken = {other.template_id, *other.aliases} & {template.template_id, *template.aliases}
                if taken:
                    raise Conflict(f"the name '{min(taken)}' belongs to another template", "choose another name")

    # --- the log of each sandbox -----------------------------------------------------------------------------------

    async def add_event(self, sandbox_id: str, entry: LogEntry) -> None:
        """Append to a sandbox's log; the oldest entries beyond a bound go."""
        await self._execute(*_adding(sandbox_id, entry))

    async def events(self, sandbox_id: str, query: LogQuery) -> list[LogEntry]:
        """A part of a sandbox's log, oldest first, or newest first when read backward. Reads no more of it than it takes to fill it."""
        order, compare = ("DESC", "<=") if query.backward else ("ASC", ">=")
        cursor_ms = query.cursor_ms if query.cursor_ms is not None else _END_OF_TIME_MS if query.backward else 0
        sql = f"SELECT body FROM events WHERE sandbox_id = ? AND timestamp_ms {compare} ? ORDER BY timestamp_ms {order}, rowid {order}"

        def read() -> list[LogEntry]:
            entries = (_LOG_ENTRY.validate_json(row[0]) for row in self._db.execute(sql, (sandbox_id, cursor_ms)))
            return list(itertools.islice(filter(query.matches, entries), query.limit))

        return await self._run(read)

    # --- the one thread that touches the file ----------------------------------------------------------------------

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    async def _execute(self, *statements: tuple[str, tuple[Any, ...]], mirror: Callable[[], object] = lambda: None) -> None:
        """Commit the statements together, then change the mirror. Both happen also when the caller is cancelled meanwhile."""

        def work() -> None:
            try:
                with self._db:
                    for sql, values in statements:
                        self._db.execute(sql, values)
            except sqlite3.Error as error:
                raise self._refused(error) from error

        commit = asyncio.ensure_future(self._run(work))
        with span("record"):
            cancelled = await wait_done(commit)
        commit.result()
        mirror()
        if cancelled is not None:
            raise cancelled

    def _refused(self, error: Exception) -> AgentEnvError:
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_FULL or (code is not None and code & 0xFF == sqlite3.SQLITE_IOERR and _is_full(self._path.parent)):
            return StorageFull(f"no room for the node's database {self._path}", "free some space; nothing was lost")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return DataCorrupt(f"the node's database {self._path} is damaged: {error}", "restore it from a copy, or move it away")
        return Internal(f"the node's database refused a write: {error}")

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(self._path, isolation_level="DEFERRED", check_same_thread=True, timeout=5)
            self._path.chmod(0o600)  # it holds the sandboxes' tokens
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            if (found := schema.version(self._db)) > schema.VERSION:
                known = f"this server knows {schema.VERSION}"
                raise HostNotReady(f"{self._path} has schema {found}, {known}", "use the version that wrote it")
            schema.upgrade(self._db)
            load = self._db.execute
            self._sandboxes = {s.sandbox_id: s for (b,) in load("SELECT body FROM sandboxes") for s in [_SANDBOX.validate_json(b)]}
            by_age = sorted(self._sandboxes.values(), key=lambda s: s.started_at_ms)
            self._created = {s.creation.key: s.sandbox_id for s in by_age if s.creation is not None}
            self._snapshots = {s.snapshot_id: s for (b,) in load("SELECT body FROM snapshots") for s in [_SNAPSHOT.validate_json(b)]}
            templates = [(_TEMPLATE.validate_json(b), *u) for b, *u in load("SELECT body, spawn_count, last_spawned_at_ms FROM templates")]
            self._templates = {t.template_id: replace(t, spawn_count=n, last_spawned_at_ms=at) for t, n, at in templates}
            self.volumes.load(self._db)
            self.secrets.load(self._db)
            self.builds.load(self._db)
            self.cached_steps.load(self._db)
            self.images.load(self._db)
            self.checkpoints.load(self._db)
        except (sqlite3.DatabaseError, ValueError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:  # an upgrade needs a little room
                raise self._refused(error) from error
            raise DataCorrupt(
                f"the node's database {self._path} cannot be read: {error}", "restore it from a copy, or move it away"
            ) from error


def _adding(sandbox_id: str, entry: LogEntry) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The statements that append to a sandbox's log, whose oldest entries beyond a bound go."""
    prune = "DELETE FROM events WHERE rowid IN (SELECT rowid FROM events WHERE sandbox_id = ? ORDER BY rowid DESC LIMIT -1 OFFSET ?)"
    return (
        ("INSERT INTO events VALUES (?, ?, ?)", (sandbox_id, entry.timestamp_ms, json.dumps(asdict(entry)))),
        (prune, (sandbox_id, _EVENTS_PER_SANDBOX)),
    )


def _is_full(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < _FULL_BELOW_BYTES
