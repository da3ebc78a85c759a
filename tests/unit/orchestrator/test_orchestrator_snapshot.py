"""Snapshots: an instant that sandboxes are created from, for as long as something names it, and not a byte longer."""

from __future__ import annotations

import asyncio
import json
import sqlite3

import pytest

from agentenv.core.errors import Conflict, InvalidInput, LimitReached, NotFound
from agentenv.core.lifecycle import State
from agentenv.core.model import Template
from agentenv.orchestrator.start import memory_stack_id
from agentenv.testing.fake_node import FakeNode


def _limit(node: FakeNode, **limits: int) -> None:
    node.parts.config = node.config.model_copy(update={"limits": node.config.limits.model_copy(update=limits)})


async def _snapshot(node: FakeNode, sandbox_id: str, name: str | None = None) -> Template:
    template, _ = await node.orchestrator.snapshot(sandbox_id, name)
    return template


async def _rest(node: FakeNode) -> None:
    await node.quiesce()
    assert node.problems() == []


async def test_the_instant_is_kept_and_all_part_from_there(node: FakeNode) -> None:
    source = await node.create(env_vars={"X": "1"}, metadata={"a": "b"}, on_timeout="pause")
    assert node.process(source).write("0", "common")
    template = await _snapshot(node, source, "mine")
    assert node.row(source).state is State.RUNNING
    assert node.process(source).write("1", "later")
    made = [await node.create(template=reference) for reference in ("mine", f"local/{template.name}:default")]
    for sandbox_id in made:
        assert node.content(sandbox_id) == {"booted": "yes", "0": "common"}
        assert node.process(sandbox_id).write("2", sandbox_id)
        row = node.row(sandbox_id)
        assert (row.env_vars, row.metadata, row.on_timeout, row.machine) == ({"X": "1"}, {}, "kill", node.row(source).machine)
        identity = node.process(sandbox_id).identity
        assert identity is not None
        assert (identity.sandbox_id, identity.access_token) == (sandbox_id, row.access_token)
    assert len({node.row(i).access_token for i in (source, *made)}) == 3
    assert node.content(source) == {"booted": "yes", "0": "common", "1": "later"}
    for sandbox_id in (source, *made):
        await node.orchestrator.pause(sandbox_id)
        await node.orchestrator.resume(sandbox_id, 600)
    await _rest(node)


async def test_of_a_paused_source_nothing_is_captured(node: FakeNode) -> None:
    source = await node.create()
    assert node.process(source).write("0", "kept")
    await node.orchestrator.pause(source)
    captures = node.points.passed.count("blocks.capture")
    await _snapshot(node, source, "mine")
    assert node.row(source).state is State.PAUSED
    assert node.points.passed.count("blocks.capture") == captures
    await _rest(node)
    await node.orchestrator.resume(source, 600)
    assert node.process(source).write("0", "changed")
    await node.orchestrator.pause(source)
    await node.orchestrator.kill(source)
    await _rest(node)
    assert node.content(await node.create(template="mine")) == {"booted": "yes", "0": "kept"}
    await _rest(node)


async def test_a_name_that_is_given_again_frees_what_it_named_before(node: FakeNode) -> None:
    source = await node.create()
    for n in range(10):
        assert node.process(source).write("0", str(n))
        await _snapshot(node, source, "mine")
        if n == 4:
            old = await node.create(template="mine")
    assert node.content(await node.create(template="mine"))["0"] == "9"
    await _rest(node)
    assert node.content(old)["0"] == "4", "what was made from the former build goes on"
    await node.orchestrator.pause(old)
    await node.orchestrator.resume(old, 600)
    [template] = [t for t in await node.orchestrator.templates() if t.name == "mine"]
    assert (len(template.builds), template.build_count) == (1, 10)
    for row in node.parts.store.sandboxes():
        await node.orchestrator.kill(row.sandbox_id)
    await node.orchestrator.delete_template("mine")
    await _rest(node)
    base = node.parts.store.snapshot((await node.orchestrator.template("base")).builds[0].snapshot_id)
    left = {node.parts.layers.id_of(path) for path in node.parts.layers.files()}
    assert left == {*base.memory_layers, *base.disk_layers}, "every byte of the others is freed"


async def test_a_tag_keeps_a_build_and_the_last_one_frees_it(node: FakeNode) -> None:
    source = await node.create()
    assert node.process(source).write("0", "one")
    await _snapshot(node, source, "mine")
    await node.orchestrator.assign_tags("mine", ["v1"])
    assert node.process(source).write("0", "two")
    await _snapshot(node, source, "mine")
    await _rest(node)
    kept = len(node.parts.store.snapshots())
    assert node.content(await node.create(template="mine:v1"))["0"] == "one"
    assert node.content(await node.create(template="mine"))["0"] == "two"
    await node.orchestrator.remove_tags("mine", ["v1"])
    await _rest(node)
    assert len(node.parts.store.snapshots()) == kept - 1
    with pytest.raises(NotFound):
        await node.create(template="mine:v1")


async def test_deleting_is_refused_while_something_was_made_from_it(node: FakeNode) -> None:
    source = await node.create()
    await _snapshot(node, source, "mine")
    made = await node.create(template="mine")
    child = (await node.orchestrator.fork(made, 1, 600))[0].sandbox
    assert child is not None
    for sandbox_id in (made, child.sandbox_id):
        with pytest.raises(InvalidInput, match="still runs or is paused"):
            await node.orchestrator.delete_template("mine")
        await node.orchestrator.pause(sandbox_id)
        with pytest.raises(InvalidInput, match="still runs or is paused"):
            await node.orchestrator.delete_template("mine")
        await node.orchestrator.kill(sandbox_id)
    await node.orchestrator.delete_template("mine")
    with pytest.raises(NotFound):
        await node.orchestrator.delete_template("mine")
    await _rest(node)


async def test_a_create_that_meets_the_delete_half_way_keeps_its_layers(node: FakeNode) -> None:
    source = await node.create()
    assert node.process(source).write("0", "kept")
    await _snapshot(node, source, "mine")
    await node.quiesce()
    with node.points.hold("store.commit") as reached:
        deleting = asyncio.create_task(node.orchestrator.delete_template("mine"))
        await reached.wait()
        creating = asyncio.create_task(node.create(template="mine"))
        await node.turn()
    made = await creating
    await deleting
    await _rest(node)
    assert node.content(made) == {"booted": "yes", "0": "kept"}
    with pytest.raises(NotFound):
        await node.create(template="mine")


async def test_a_source_killed_meanwhile_and_one_that_is_gone(node: FakeNode) -> None:
    source = await node.create()
    with node.points.hold("blocks.capture") as reached:
        taking = asyncio.create_task(node.orchestrator.snapshot(source, "mine"))
        await reached.wait()
        assert node.row(source).state is State.SNAPSHOTTING
        killing = asyncio.create_task(node.orchestrator.kill(source))
        await node.turn()
    await taking
    await killing
    await _rest(node)
    assert node.content(await node.create(template="mine")) == {"booted": "yes"}
    with pytest.raises(NotFound):
        await node.orchestrator.snapshot(source, "other")
    with pytest.raises(NotFound):
        await node.orchestrator.snapshot("inothere", "other")


async def test_a_source_that_just_died_gives_no_snapshot(node: FakeNode) -> None:
    source = await node.create()
    node.processes.end(node.process(source))
    with pytest.raises((NotFound, Conflict)):
        await node.orchestrator.snapshot(source, "mine")
    await _rest(node)
    assert [t.name for t in await node.orchestrator.templates()] == ["base"]


async def test_a_caller_that_goes_away_does_not_stop_it(node: FakeNode) -> None:
    source = await node.create()
    with node.points.hold("blocks.capture") as reached:
        taking = asyncio.create_task(node.orchestrator.snapshot(source, "mine"))
        await reached.wait()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
    await _rest(node)
    assert node.row(source).state is State.RUNNING
    assert node.content(await node.create(template="mine")) == {"booted": "yes"}


async def test_names_and_numbers_are_checked_before_the_sandbox_is_stopped(node: FakeNode) -> None:
    source = await node.create()
    _limit(node, templates=2)
    await _snapshot(node, source)
    captures = node.points.passed.count("blocks.capture")
    for bad in ("base", "team/x", "a b"):
        with pytest.raises(InvalidInput):
            await node.orchestrator.snapshot(source, bad)
    for new in ("new", None):
        with pytest.raises(LimitReached):
            await node.orchestrator.snapshot(source, new)
    assert node.points.passed.count("blocks.capture") == captures
    [own] = [t for t in await node.orchestrator.templates() if t.kind == "snapshot"]
    assert (await _snapshot(node, source, own.template_id)).build_count == 2, "one more build needs no more room in the list"
    await _rest(node)


async def test_of_two_at_once_under_one_new_name_none_is_lost(node: FakeNode) -> None:
    sources = [await node.create() for _ in range(4)]
    for source in sources:
        assert node.process(source).write("0", source)
    await asyncio.gather(*(node.orchestrator.snapshot(source, f"mine:v{n}") for n, source in enumerate(sources)))
    [template] = [t for t in await node.orchestrator.templates() if t.name == "mine"]
    assert template.build_count == len(template.builds) == 4
    for n, source in enumerate(sources):
        assert node.content(await node.create(template=f"mine:v{n}"))["0"] == source
    await _rest(node)


async def test_a_sandbox_snapshotted_all_day_keeps_short_chains_and_every_snapshot(node: FakeNode) -> None:
    _limit(node, layers_in_chain=8)
    source, expected = await node.create(), {"booted": "yes"}
    for n in range(60):
        block = str(n % 7)
        assert node.process(source).write(block, f"step {n}")
        expected[block] = f"step {n}"
        await _snapshot(node, source, f"mine:v{n}")
        if n % 3 == 0:
            await node.quiesce()
    await _rest(node)
    assert node.content(source) == expected
    for build in (await node.orchestrator.template("mine")).builds:
        snapshot = node.parts.store.snapshot(build.snapshot_id)
        assert max(len(snapshot.memory_layers), len(snapshot.disk_layers)) <= 8
    vm = node.row(source).vm
    assert vm is not None
    assert max(len(vm.memory_layers), len(vm.disk_layers)) <= 9
    last = {str(n % 7): f"step {n}" for n in range(40)}
    assert node.content(await node.create(template="mine:v39")) == {"booted": "yes", **last}


async def test_a_hundred_generations_each_made_from_the_snapshot_of_the_one_before(node: FakeNode) -> None:
    _limit(node, layers_in_chain=8)
    sandbox_id, former, expected = await node.create(), "", {"booted": "yes"}
    for n in range(100):
        assert node.process(sandbox_id).write(str(n % 7), f"generation {n}")
        expected[str(n % 7)] = f"generation {n}"
        template = await _snapshot(node, sandbox_id)
        following = await node.create(template=template.template_id)
        await node.orchestrator.kill(sandbox_id)
        if former:
            await node.orchestrator.delete_template(former)
        sandbox_id, former = following, template.template_id
        if n % 4 == 0:
            await node.quiesce()
    await _rest(node)
    assert node.content(sandbox_id) == expected
    vm = node.row(sandbox_id).vm
    assert vm is not None
    assert max(len(vm.memory_layers), len(vm.disk_layers)) <= 8


async def test_memory_of_a_snapshot_is_open_only_while_something_runs_from_it(node: FakeNode) -> None:
    source = await node.create()
    template = await _snapshot(node, source)
    snapshot = node.parts.store.snapshot(template.builds[0].snapshot_id)
    stack = memory_stack_id(snapshot.memory_layers)
    made = await node.create(template=template.template_id)
    await _rest(node)
    assert stack in node.devices.stack_ids
    await node.orchestrator.kill(made)
    await node.orchestrator.kill(source)
    await _rest(node)
    assert len(node.devices.stack_ids) == 1, "that of the base template stays"
    assert node.content(await node.create(template=template.template_id)) == {"booted": "yes"}


async def test_a_node_of_version_1_keeps_its_templates_and_paused_sandboxes(node: FakeNode) -> None:
    """The database is put back to what version 1 had written; then this version starts over it."""
    running, paused = await node.create(), await node.create()
    for sandbox_id in (running, paused):
        assert node.process(sandbox_id).write("0", sandbox_id)
    await node.orchestrator.pause(paused)
    await node.quiesce()
    base = await node.orchestrator.template("base")
    node.kill_server()
    with sqlite3.connect(node.paths.database) as db:
        _downgrade(db, base)
    db.close()
    await node.start_server()
    await _rest(node)
    after = await node.orchestrator.template("base")
    assert (after.template_id, after.builds, after.spawn_count) == (base.template_id, base.builds, 2)
    await node.orchestrator.resume(paused, 600)
    assert {i: node.content(i) for i in (running, paused)} == {i: {"booted": "yes", "0": i} for i in (running, paused)}
    await _snapshot(node, paused, "mine")
    assert node.content(await node.create(template="mine"))["0"] == paused
    assert node.content(await node.create()) == {"booted": "yes"}
    with pytest.raises(InvalidInput, match="own"):
        await node.orchestrator.delete_template("base")
    await _rest(node)


def _downgrade(db: sqlite3.Connection, base: Template) -> None:
    for (body,) in db.execute("SELECT body FROM sandboxes").fetchall():
        row = json.loads(body)
        del row["build_id"]
        db.execute("UPDATE sandboxes SET body = ? WHERE sandbox_id = ?", (json.dumps(row), row["sandbox_id"]))
    [build] = base.builds
    old = {
        "template_id": base.template_id,
        "build_id": build.build_id,
        "name": "base",
        "snapshot_id": build.snapshot_id,
        "machine": {"vcpu_count": build.machine.vcpu_count, "memory_mb": build.machine.memory_mb, "disk_mb": build.machine.disk_mb},
        "envd_version": build.envd_version,
        "created_at_ms": base.created_at_ms,
        "updated_at_ms": base.updated_at_ms,
        "spawn_count": base.spawn_count,
    }
    db.executescript(
        "DROP TABLE templates; DROP TABLE volumes; DROP TABLE secrets; DROP TABLE builds; DROP TABLE cached_steps;"
        "DROP TABLE images; DROP TABLE checkpoints;"
        "CREATE TABLE templates (template_id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, body TEXT NOT NULL) STRICT;"
        "PRAGMA user_version = 1;"
    )
    db.execute("INSERT INTO templates VALUES (?, 'base', ?)", (base.template_id, json.dumps(old)))
