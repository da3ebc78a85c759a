from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core import ids, templates
from agentenv.core.errors import Conflict, DataCorrupt, HostNotReady, Internal, NotFound, StorageFull
from agentenv.core.lifecycle import State
from agentenv.core.model import (
    Build,
    Creation,
    LogEntry,
    LogLevel,
    LogQuery,
    Machine,
    RunningVm,
    Sandbox,
    Snapshot,
    Template,
    VmIdentity,
    Volume,
)
from agentenv.core.references import Reference
from agentenv.store import sqlite as sqlite_module
from agentenv.store.schema import STEPS, upgrade
from agentenv.store.sqlite import Store
from agentenv.testing.fake_orchestrator import ManualClock

MACHINE = Machine(2, 256, 1024)
IDENTITY = VmIdentity("qemu", "tcg", "max", "10.0", "a" * 64, "b" * 64, 2_000_000)
VM = RunningVm("run12345", 3, "mem-1", "disk-1", ("m1",), ("d1", "d2"), "u1", 4242, 99)


def sandbox(**changes: object) -> Sandbox:
    plain = Sandbox(ids.new_sandbox_id(), "t1", "base", State.CREATING, MACHINE, "0.6", 1, 2, 3)
    return replace(plain, **changes)  # type: ignore[arg-type]


def template(template_id: str, *aliases_then_snapshot: str) -> Template:
    """A template with one build; the last word is its snapshot when it begins with s and a digit."""
    words = list(aliases_then_snapshot)
    snapshot_id = words.pop() if words[-1][:1] == "s" and words[-1][1:].isdigit() else "s1"
    made = templates.first(Build(ids.new_build_id(), snapshot_id, MACHINE, "0.6", 1), tuple(words), "built", ["default"], 1)
    return replace(made, template_id=template_id)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(tmp_path / "home" / "node.db", ManualClock())
    await store.open()
    yield store
    await store.close()


async def _reopened(store: Store) -> Store:
    other = Store(store._path, ManualClock())
    await other.open()
    return other


async def _assert_agrees(store: Store) -> None:
    """Mirror and file say the same."""
    other = await _reopened(store)
    for name in ("sandboxes", "snapshots", "templates"):
        assert {repr(item) for item in getattr(store, name)()} == {repr(item) for item in getattr(other, name)()}
    await other.close()


async def test_the_newest_sandbox_of_a_key_is_found_until_it_is_forgotten(store: Store) -> None:
    older, newer = (sandbox(started_at_ms=at_ms) for at_ms in (10, 20))
    for made in (older, newer):
        await store.add_sandbox(made)
        await store.transition(made.sandbox_id, State.CREATING, State.RUNNING, creation=Creation("key", "print"))
    await store.change(older.sandbox_id, reason="written once more")
    for opened in (store, await _reopened(store)):
        found = opened.created_by("key")
        assert found is not None
        assert found.sandbox_id == newer.sandbox_id
        assert opened.created_by("other") is None
    await opened.close()
    await store.forget_sandbox(older.sandbox_id)
    assert store.created_by("key") is not None
    await store.forget_sandbox(newer.sandbox_id)
    assert store.created_by("key") is None


async def test_everything_is_the_same_after_a_restart(store: Store) -> None:
    texts = {"ü": "日本\n", "": "empty"}
    full = sandbox(vm=VM, metadata=texts, env_vars={"A": "b=c"}, access_token="t", snapshot_id="s1", reason='"')
    await store.add_sandbox(full)
    await store.add_snapshot(Snapshot("s1", MACHINE, IDENTITY, ("m",), ("d", "e"), 5))
    await store.change_templates(lambda _: template("t1", "base", "s1"))
    await store.count_spawn("t1", 77)
    await store.add_event(full.sandbox_id, LogEntry(7, "warn", "x", "hello", {"a": "b"}))
    other = await _reopened(store)
    assert other.sandbox(full.sandbox_id) == replace(full, updated_at_ms=ManualClock().now_ms())
    assert other.snapshot("s1") == store.snapshot("s1")
    found = other.template("t1")
    assert found == store.template("t1")
    assert found is not None
    assert (found.spawn_count, found.last_spawned_at_ms) == (1, 77)
    assert await other.events(full.sandbox_id, LogQuery()) == [LogEntry(7, "warn", "x", "hello", {"a": "b"})]
    await other.close()


async def test_a_state_changes_by_compare_and_swap_and_by_the_table_only(store: Store) -> None:
    one = sandbox()
    await store.add_sandbox(one)
    with pytest.raises(Conflict):
        await store.add_sandbox(one)
    running = await store.transition(one.sandbox_id, State.CREATING, State.RUNNING, vm=VM)
    assert (running.state, running.vm) == (State.RUNNING, VM)
    with pytest.raises(Conflict, match="running, not creating"):
        await store.transition(one.sandbox_id, State.CREATING, State.RUNNING)
    with pytest.raises(Internal):
        await store.transition(one.sandbox_id, State.RUNNING, State.PAUSED)
    with pytest.raises(Internal):
        await store.change(one.sandbox_id, state=State.PAUSED)
    for work in (store.transition("inothere", State.CREATING, State.RUNNING), store.change("inothere", reason="x")):
        with pytest.raises(NotFound):
            await work
    await _assert_agrees(store)


async def test_of_many_who_swap_at_once_one_wins(store: Store) -> None:
    one = sandbox()
    await store.add_sandbox(one)
    await store.transition(one.sandbox_id, State.CREATING, State.RUNNING)
    moves = [store.transition(one.sandbox_id, State.RUNNING, new) for new in (State.PAUSING, State.FORKING, State.KILLING) * 10]
    outcomes = await asyncio.gather(*moves, return_exceptions=True)
    assert sum(isinstance(outcome, Sandbox) for outcome in outcomes) == 1
    assert all(isinstance(outcome, (Sandbox, Conflict)) for outcome in outcomes)
    await _assert_agrees(store)


async def test_a_change_is_seen_at_once_by_whoever_counts(store: Store) -> None:
    """Admission counts rows: one that is being added must be among them before the commit."""
    one = sandbox()
    adding = asyncio.ensure_future(store.add_sandbox(one))
    await asyncio.sleep(0)
    assert store.sandbox(one.sandbox_id) is not None
    await adding


def _refuse(store: Store, message: str = "disk I/O error", code: int = sqlite3.SQLITE_IOERR) -> None:
    """Every write fails from now on, as the file's own engine would make it fail."""

    class _Refusing:
        def __enter__(self) -> None:
            error = sqlite3.OperationalError(message)
            error.sqlite_errorcode = code
            raise error

        def __exit__(self, *_exc: object) -> None: ...

        def close(self) -> None: ...

    store._db = _Refusing()  # type: ignore[assignment]


@pytest.mark.parametrize("cancelled", [False, True], ids=["failed", "failed behind a cancelled caller"])
async def test_mirror_and_file_agree_after_a_failed_commit(store: Store, cancelled: bool) -> None:
    one = sandbox()
    await store.add_sandbox(one)
    await store.change_templates(lambda _: template("t0", "kept"))
    good = store._db
    _refuse(store)
    works = (
        store.transition(one.sandbox_id, State.CREATING, State.RUNNING),
        store.change(one.sandbox_id, reason="x"),
        store.add_sandbox(sandbox()),
        store.add_snapshot(Snapshot("s1", MACHINE, IDENTITY, (), (), 1)),
        store.change_templates(lambda _: template("t", "n")),
        store.change_templates(lambda present: replace(present[0], builds=())),
        store.count_spawn("t0", 1),
        store.forget_sandbox(one.sandbox_id),
    )
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.sleep(0)
    if cancelled:
        for task in tasks:
            task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, (Internal, asyncio.CancelledError)) for outcome in outcomes), outcomes
    store._db = good
    await _assert_agrees(store)
    assert [s.state for s in store.sandboxes()] == [State.CREATING]


async def test_a_cancelled_caller_leaves_the_commit_and_the_mirror_whole(store: Store) -> None:
    one = sandbox()
    await store.add_sandbox(one)
    tasks = [
        asyncio.ensure_future(store.transition(one.sandbox_id, State.CREATING, State.RUNNING)),
        asyncio.ensure_future(store.add_snapshot(Snapshot("s1", MACHINE, IDENTITY, (), (), 1))),
    ]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in await asyncio.gather(*tasks, return_exceptions=True))
    await _assert_agrees(store)
    assert store.snapshot("s1")


async def test_a_failure_takes_back_its_own_change_only(store: Store) -> None:
    """Two writes of one row at once: the second is not built on the first, which fails."""
    one = sandbox()
    await store.add_sandbox(one)
    good = store._db
    _refuse(store)
    first = asyncio.ensure_future(store.change(one.sandbox_id, reason="first"))
    second = asyncio.ensure_future(store.change(one.sandbox_id, timeout_s=77))
    with pytest.raises(Internal):
        await first
    store._db = good
    await asyncio.gather(second, return_exceptions=True)
    await _assert_agrees(store)
    row = store.sandbox(one.sandbox_id)
    assert row is not None
    assert row.reason == ""


@pytest.fixture
def tiny_disk(tmp_path: Path, root: None) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def _add_many(store: Store) -> None:
    for _ in range(200):
        await store.add_sandbox(sandbox(env_vars={"A": "x" * 5000}))


async def test_a_full_disk_is_said_loses_nothing_and_ends_when_there_is_room(tiny_disk: Path) -> None:
    store = Store(tiny_disk / "node.db", ManualClock())
    await store.open()
    filler = tiny_disk / "filler"
    filler.write_bytes(b"x" * (os.statvfs(tiny_disk).f_bavail * 4096 - 16384))
    with pytest.raises(StorageFull, match=r"node\.db"):
        await _add_many(store)
    filler.unlink()
    await _assert_agrees(store)
    await store.add_sandbox(sandbox())
    await _assert_agrees(store)
    await store.close()


async def test_a_file_that_may_not_grow_is_a_full_disk(store: Store) -> None:
    await store._run(lambda: store._db.execute("PRAGMA max_page_count = 12"))
    with pytest.raises(StorageFull):
        await _add_many(store)
    await store._run(lambda: store._db.execute("PRAGMA max_page_count = 100000"))
    await _assert_agrees(store)


@pytest.mark.parametrize("damage", [b"not a database at all, but long enough to have a header" * 40, b"SQLite format 3\0" + b"\xff" * 4096])
async def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "node.db"
    path.write_bytes(damage)
    store = Store(path, ManualClock())
    with pytest.raises(DataCorrupt, match=r"node\.db"):
        await store.open()
    store._worker.shutdown()
    assert path.read_bytes() == damage, "the evidence was changed"


async def test_a_row_that_is_no_sandbox_is_damage(store: Store) -> None:
    await store.add_sandbox(sandbox())
    await store._run(lambda: (store._db.execute("UPDATE sandboxes SET body = '{}'"), store._db.commit()))
    with pytest.raises(DataCorrupt):
        await _reopened(store)


async def test_damage_met_while_writing_is_said_as_damage(store: Store) -> None:
    _refuse(store, "database disk image is malformed", sqlite3.SQLITE_CORRUPT)
    with pytest.raises(DataCorrupt):
        await store.add_sandbox(sandbox())


async def test_another_schema_is_refused(store: Store) -> None:
    await store._run(lambda: store._db.execute("PRAGMA user_version = 99"))
    with pytest.raises(HostNotReady, match="schema 99"):
        await _reopened(store)


async def test_tokens_are_readable_by_the_owner_only(store: Store) -> None:
    assert store._path.stat().st_mode & 0o777 == 0o600


async def test_a_log_keeps_the_newest_entries_of_each_sandbox(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_module, "_EVENTS_PER_SANDBOX", 5)
    for number in range(12):
        await store.add_event("a", LogEntry(number, "info", "x", str(number)))
    await store.add_event("b", LogEntry(0, "info", "x", "of b"))
    assert [e.message for e in await store.events("a", LogQuery())] == ["7", "8", "9", "10", "11"]
    assert [e.message for e in await store.events("a", LogQuery(cursor_ms=9, limit=2))] == ["9", "10"]
    assert [e.message for e in await store.events("b", LogQuery())] == ["of b"]
    await store.forget_sandbox("a")
    assert await store.events("a", LogQuery()) == []


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (LogQuery(), "abcdef"),
        (LogQuery(limit=2), "ab"),
        (LogQuery(limit=0), ""),
        (LogQuery(cursor_ms=2), "cdef"),
        (LogQuery(backward=True), "fedcba"),
        (LogQuery(backward=True, limit=2), "fe"),
        (LogQuery(backward=True, cursor_ms=2), "dcba"),
        (LogQuery(backward=True, cursor_ms=0), "a"),
        (LogQuery(level="warn"), "cf"),
        (LogQuery(level="warn", backward=True, limit=1), "f"),
        (LogQuery(level="error"), "f"),
        (LogQuery(search="d"), "d"),
        (LogQuery(search="%"), ""),
        (LogQuery(search="c", level="error"), ""),
    ],
)
async def test_a_log_is_read_by_time_direction_level_and_text(store: Store, query: LogQuery, expected: str) -> None:
    levels: list[LogLevel] = ["debug", "info", "warn", "info", "debug", "error"]
    for name, level, at_ms in zip("abcdef", levels, (0, 1, 2, 2, 3, 4), strict=True):  # two of them in one millisecond
        await store.add_event("s", LogEntry(at_ms, level, "x", name))
        await store.add_event("other", LogEntry(at_ms, level, "x", name.upper()))
    assert "".join(entry.message for entry in await store.events("s", query)) == expected


async def test_the_newest_entries_are_found_without_reading_the_others(store: Store) -> None:
    plan = "EXPLAIN QUERY PLAN SELECT body FROM events WHERE sandbox_id = ? AND timestamp_ms <= ? ORDER BY timestamp_ms DESC, rowid DESC"
    steps = [row[3] for row in await store._run(lambda: store._db.execute(plan, ("s", 1)).fetchall())]
    assert [step for step in steps if "events_by_sandbox" in step], steps
    assert not [step for step in steps if "TEMP B-TREE" in step], steps


async def test_templates_are_changed_one_after_the_other(store: Store) -> None:
    """Twenty tags given at once: none is lost, since each change is made of what the one before it left."""
    await store.change_templates(lambda _: template("t1", "base"))

    def tag(name: str) -> Callable[[list[Template]], Template]:
        return lambda present: templates.with_tags(present[0], present[0].builds[0], [name], 5)

    await asyncio.gather(*(store.change_templates(tag(f"v{n}")) for n in range(20)), *(store.count_spawn("t1", n) for n in range(20)))
    [found] = store.templates()
    assert {t.tag for t in found.tags} == {"default"} | {f"v{n}" for n in range(20)}
    assert found.spawn_count == 20
    await _assert_agrees(store)


async def test_a_change_that_fails_changes_nothing(store: Store) -> None:
    await store.change_templates(lambda _: template("t1", "base"))
    with pytest.raises(NotFound):
        await store.change_templates(lambda present: templates.without(present[0], {"none"}, 5))
    await store.change_templates(lambda _: template("t2", "other"))
    assert [t.template_id for t in store.templates()] == ["t2", "t1"]
    await _assert_agrees(store)


@pytest.mark.parametrize("aliases", [("base",), ("mine", "base"), ("t1",)], ids=["an alias", "one of two", "an id"])
async def test_a_name_belongs_to_one_template(store: Store, aliases: tuple[str, ...]) -> None:
    await store.change_templates(lambda _: template("t1", "base"))
    with pytest.raises(Conflict, match="belongs to another template"):
        await store.change_templates(lambda _: template("t2", *aliases))
    await store.change_templates(lambda _: template("t1", "base", "s9"))
    assert [t.builds[0].snapshot_id for t in store.templates()] == ["s9"]
    await _assert_agrees(store)


async def test_a_removed_template_frees_its_name(store: Store) -> None:
    await store.change_templates(lambda _: template("t1", "base"))
    removed = await store.change_templates(lambda present: templates.without(present[0], {"default"}, 5))
    assert (removed.template_id, removed.builds) == ("t1", ())
    with pytest.raises(NotFound):
        templates.find(store.templates(), Reference("base"))
    await store.count_spawn("t1", 3)
    await store.change_templates(lambda _: template("t2", "base"))
    assert [t.template_id for t in store.templates()] == ["t2"]
    await _assert_agrees(store)


async def test_a_snapshot_that_is_gone_is_not_found(store: Store) -> None:
    await store.add_snapshot(Snapshot("s1", MACHINE, IDENTITY, (), (), 1))
    await store.remove_snapshot("s1")
    await store.remove_snapshot("s1")
    with pytest.raises(NotFound):
        store.snapshot("s1")


@pytest.mark.parametrize("version", range(len(STEPS)))
async def test_a_file_of_an_older_version_is_brought_up_to_date(tmp_path: Path, version: int) -> None:
    path = tmp_path / "old.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        upgrade(database, STEPS[:version])
    store = Store(path, ManualClock())
    await store.open()
    volume = Volume("v1", "data", "token", 1)
    await store.volumes.put(volume)
    await store.volumes.put(replace(volume, name="other"))
    await store.close()
    again = Store(path, ManualClock())
    await again.open()
    assert [one.name for one in again.volumes.all()] == ["other"]
    await again.volumes.remove("v1")
    assert again.volumes.get("v1") is None
    await again.close()


async def test_layers_of_a_snapshot_are_changed_one_after_the_other(store: Store) -> None:
    await store.add_snapshot(Snapshot("s1", MACHINE, IDENTITY, ("m",), (), 1))

    def longer(snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, disk_layers=(*snapshot.disk_layers, "d"))

    assert all(await asyncio.gather(*(store.change_snapshot("s1", longer) for _ in range(10))))
    assert store.snapshot("s1").disk_layers == ("d",) * 10
    assert not await store.change_snapshot("s1", lambda snapshot: snapshot)
    removing = asyncio.ensure_future(store.remove_snapshot("s1"))
    await store.change_snapshot("s1", longer)
    await removing
    assert not await store.change_snapshot("s1", longer)
    assert store.snapshots() == []
    await _assert_agrees(store)
