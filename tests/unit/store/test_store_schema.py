"""Databases of older versions: everything in them is there after the first start of this version."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from agentenv.core.errors import DataCorrupt, HostNotReady
from agentenv.core.lifecycle import State
from agentenv.core.model import LogQuery, Machine
from agentenv.store import schema
from agentenv.store.sqlite import Store
from agentenv.testing.fake_orchestrator import ManualClock

#: What version 1 wrote, word for word.
VERSION_1 = """
CREATE TABLE snapshots (snapshot_id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE templates (template_id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, body TEXT NOT NULL) STRICT;
CREATE TABLE sandboxes (sandbox_id TEXT PRIMARY KEY, state TEXT NOT NULL, updated_at_ms INTEGER NOT NULL, body TEXT NOT NULL) STRICT;
CREATE TABLE events (
    sandbox_id TEXT NOT NULL, timestamp_ms INTEGER NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE INDEX events_by_sandbox ON events (sandbox_id, timestamp_ms);
PRAGMA user_version = 1;
"""
MACHINE = {"vcpu_count": 1, "memory_mb": 512, "disk_mb": 8192}
IDENTITY = {
    "driver": "qemu",
    "accelerator": "tcg",
    "cpu_model": "max",
    "vmm_version": "10.0.2",
    "kernel_sha256": "a",
    "initramfs_sha256": "b",
    "tsc_khz": 2000000,
}
SNAPSHOT = {
    "snapshot_id": "s1",
    "machine": MACHINE,
    "identity": IDENTITY,
    "memory_layers": ["m"],
    "disk_layers": ["rootfs-x", "d"],
    "created_at_ms": 4,
}
TEMPLATE = {
    "template_id": "t1",
    "build_id": "6b5a0a06-9c2c-4b5e-8a43-0e5f5b1f8f6b",
    "name": "base",
    "snapshot_id": "s1",
    "machine": MACHINE,
    "envd_version": "0.6.13",
    "created_at_ms": 5,
    "updated_at_ms": 6,
    "spawn_count": 42,
}
SANDBOX = {
    "sandbox_id": "i1",
    "template_id": "t1",
    "template_name": "base",
    "state": "paused",
    "machine": MACHINE,
    "envd_version": "0.6.13",
    "started_at_ms": 7,
    "end_at_ms": 8,
    "timeout_s": 300,
    "on_timeout": "pause",
    "auto_resume": True,
    "allow_public_traffic": False,
    "allow_internet_access": True,
    "metadata": {"a": "b"},
    "env_vars": {"X": "1"},
    "access_token": "token",
    "traffic_token": "traffic",
    "snapshot_id": "s2",
    "vm": None,
    "reason": "",
    "updated_at_ms": 9,
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "node.db"
    with sqlite3.connect(path) as db:
        db.executescript(VERSION_1)
        db.execute("INSERT INTO snapshots VALUES ('s1', ?)", (json.dumps(SNAPSHOT),))
        db.execute("INSERT INTO snapshots VALUES ('s2', ?)", (json.dumps(SNAPSHOT | {"snapshot_id": "s2"}),))
        db.execute("INSERT INTO templates VALUES ('t1', 'base', ?)", (json.dumps(TEMPLATE),))
        db.execute("INSERT INTO templates VALUES ('t2', 'other', ?)", (json.dumps(TEMPLATE | {"template_id": "t2", "name": "other"}),))
        db.execute("INSERT INTO sandboxes VALUES ('i1', 'paused', 9, ?)", (json.dumps(SANDBOX),))
        entry = {"timestamp_ms": 3, "level": "info", "logger": "x", "message": "hi"}
        db.execute("INSERT INTO events VALUES ('i1', 3, ?)", (json.dumps(entry),))
    db.close()
    return path


async def _opened(path: Path) -> Store:
    store = Store(path, ManualClock())
    try:
        await store.open()
    except BaseException:
        store._worker.shutdown()
        raise
    return store


def _contents(path: Path) -> list[str]:
    db = sqlite3.connect(path)
    try:
        return [f"version {schema.version(db)}", *db.iterdump()]
    finally:
        db.close()


async def test_a_database_of_version_1_keeps_everything(old: Path) -> None:
    for _ in range(2):  # the second opening finds the present version
        store = await _opened(old)
        base = store.template("t1")
        assert base is not None
        assert (base.name, base.kind, base.created_at_ms, base.updated_at_ms, base.spawn_count) == ("base", "builtin", 5, 6, 42)
        [build] = base.builds
        assert (build.build_id, build.snapshot_id, build.machine) == (TEMPLATE["build_id"], "s1", Machine(1, 512, 8192))
        assert [(tag.tag, tag.build_id, tag.assigned_at_ms) for tag in base.tags] == [("default", build.build_id, 6)]
        assert {template.name for template in store.templates()} == {"base", "other"}
        sandbox = store.sandbox("i1")
        assert sandbox is not None
        assert (sandbox.state, sandbox.snapshot_id, sandbox.access_token, sandbox.env_vars) == (State.PAUSED, "s2", "token", {"X": "1"})
        assert {snapshot.snapshot_id for snapshot in store.snapshots()} == {"s1", "s2"}
        assert [entry.message for entry in await store.events("i1", LogQuery())] == ["hi"]
        await store.close()


async def test_an_upgraded_database_has_the_tables_of_a_new_one(old: Path, tmp_path: Path) -> None:
    for path in (old, tmp_path / "new.db"):
        await (await _opened(path)).close()
    upgraded, new = (
        [line.replace('"', "") for line in _contents(path) if line.startswith(("version", "CREATE"))] for path in (old, tmp_path / "new.db")
    )
    assert sorted(upgraded) == sorted(new)


@pytest.mark.parametrize("failing", range(1, schema.VERSION))
async def test_an_upgrade_that_breaks_off_stops_between_two_versions(old: Path, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = schema.STEPS[failing]
    with contextlib.closing(sqlite3.connect(old)) as db:
        schema.upgrade(db, schema.STEPS[:failing])
    before = _contents(old)

    def broken(db: sqlite3.Connection) -> None:
        if not isinstance(step, str):
            step(db)
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        broken_step = f"{step} SELECT no_such_column;" if isinstance(step, str) else broken
        patch.setattr(schema, "STEPS", (*schema.STEPS[:failing], broken_step, *schema.STEPS[failing + 1 :]))
        with pytest.raises(DataCorrupt):
            await _opened(old)
    assert _contents(old) == before
    await (await _opened(old)).close()
    assert _contents(old)[0] == f"version {schema.VERSION}"


async def test_a_newer_database_is_refused_and_not_touched(old: Path) -> None:
    with sqlite3.connect(old) as db:
        db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    db.close()
    before = _contents(old)
    with pytest.raises(HostNotReady, match="use the version that wrote it"):
        await _opened(old)
    assert _contents(old) == before
