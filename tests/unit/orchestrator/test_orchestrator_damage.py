"""Snapshots whose files or record are damaged or gone: named, never started from, and no reason to keep a sandbox for ever.

Cases C31 and D13.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core.errors import AgentEnvError, DataCorrupt
from agentenv.core.lifecycle import State
from agentenv.core.model import Snapshot
from agentenv.snapshot.capture import state_file
from agentenv.testing.fake_node import FakeNode

_CLOCK_TICK_S = 0.02  # a file's time of change is no finer than the kernel's tick


def _gone(path: Path) -> None:
    path.unlink()


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def _other_first_byte(path: Path) -> None:
    _flip(path, 0)


def _other_byte_inside(path: Path) -> None:
    _flip(path, path.stat().st_size // 2)


def _other_last_byte(path: Path) -> None:
    _flip(path, path.stat().st_size - 1)


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _do(damage: Callable[[Path], None], path: Path) -> None:
    time.sleep(_CLOCK_TICK_S)
    damage(path)


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


_DAMAGES = (_gone, _truncated, _empty, _longer, _other_first_byte, _other_byte_inside, _other_last_byte, _zeros)


def _newest_memory(node: FakeNode, snapshot: Snapshot) -> Path:
    return node.parts.layers.path(snapshot.memory_layers[-1])


def _newest_disk(node: FakeNode, snapshot: Snapshot) -> Path:
    return node.parts.layers.path(snapshot.disk_layers[-1])


def _lowest_disk(node: FakeNode, snapshot: Snapshot) -> Path:
    return node.parts.layers.path(snapshot.disk_layers[0])


def _state(node: FakeNode, snapshot: Snapshot) -> Path:
    return state_file(node.paths, snapshot.snapshot_id)


_FILES = {"memory": _newest_memory, "disk": _newest_disk, "disk of the template": _lowest_disk, "device state": _state}


async def _paused(node: FakeNode) -> tuple[str, Snapshot]:
    sandbox_id = await node.create()
    assert node.process(sandbox_id).write("0", "x")
    await node.orchestrator.checkpoint(sandbox_id, "here")
    await node.orchestrator.snapshot(sandbox_id, "kept")
    await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    return sandbox_id, node.parts.store.snapshot(node.row(sandbox_id).snapshot_id or "")


@pytest.mark.parametrize("damage", _DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
@pytest.mark.parametrize("kind", _FILES)
async def test_damage_is_named_and_nothing_starts_from_it(node: FakeNode, kind: str, damage: Callable[[Path], None]) -> None:
    sandbox_id, snapshot = await _paused(node)
    file = _FILES[kind](node, snapshot)
    _do(damage, file)
    starts = node.points.passed.count("vmm.restore")
    with pytest.raises(DataCorrupt) as caught:
        await node.orchestrator.resume(sandbox_id, 600)
    assert file.name in caught.value.message
    assert caught.value.hint
    [outcome] = await node.orchestrator.fork(sandbox_id, 1, 600)
    assert (outcome.sandbox, outcome.error_status) == (None, 500)
    assert file.name in outcome.error_message
    assert node.points.passed.count("vmm.restore") == starts
    assert node.row(sandbox_id).state is State.PAUSED, "it can still be looked at, and killed"
    await node.orchestrator.kill(sandbox_id)
    if kind != "disk of the template":
        await node.orchestrator.delete_template("kept")
        await node.quiesce()
        assert node.problems() == [], "its remains are gone"


@pytest.mark.parametrize("kind", ["memory", "device state"])
async def test_with_its_memory_damaged_it_still_boots_from_its_disk(node: FakeNode, kind: str) -> None:
    sandbox_id, snapshot = await _paused(node)
    _FILES[kind](node, snapshot).unlink()
    await node.orchestrator.resume(sandbox_id, 600, memory=False)
    assert node.content(sandbox_id)["0"] == "x"


@pytest.mark.parametrize("kind", ["memory", "disk", "device state"])
async def test_a_checkpoint_that_is_damaged_is_refused_and_the_sandbox_runs_on(node: FakeNode, kind: str) -> None:
    sandbox_id = await node.create()
    assert node.process(sandbox_id).write("0", "before")
    kept = await node.orchestrator.checkpoint(sandbox_id, "here")
    assert node.process(sandbox_id).write("1", "later")
    file = _FILES[kind](node, node.parts.store.snapshot(kept.snapshot_id))
    _do(_other_byte_inside, file)
    with pytest.raises(DataCorrupt, match=file.name):
        await node.orchestrator.rollback(sandbox_id, "here")
    assert node.row(sandbox_id).state is State.RUNNING
    assert node.process(sandbox_id).write("2", "on")


@pytest.mark.parametrize("field", ["memory_layers", "disk_layers"])
async def test_memory_never_meets_the_disk_of_another_generation(node: FakeNode, field: str) -> None:
    sandbox_id, older = await _paused(node)
    await node.orchestrator.resume(sandbox_id, 600)
    assert node.process(sandbox_id).write("0", "newer")
    await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    newer_id = node.row(sandbox_id).snapshot_id or ""
    await node.parts.store.change_snapshot(newer_id, lambda newer: replace(newer, **{field: getattr(older, field)}))
    with pytest.raises(DataCorrupt, match=newer_id):
        await node.orchestrator.resume(sandbox_id, 600)
    await node.orchestrator.kill(sandbox_id)
    await node.quiesce()
    assert node.problems() == []


async def test_a_merge_does_not_hide_damage(node: FakeNode) -> None:
    limits = node.config.limits.model_copy(update={"layers_in_chain": 2})
    node.parts.config = node.config.model_copy(update={"limits": limits})
    sandbox_id = await node.create()
    await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.resume(sandbox_id, 600)
    first = node.parts.layers.path(node.row(sandbox_id).vm.disk_layers[-1])  # type: ignore[union-attr]
    _do(_other_last_byte, first)
    damaged = first.read_bytes()
    for _ in range(4):
        with pytest.raises(AgentEnvError, match=first.name):
            await _again(node.orchestrator.pause, node.orchestrator.resume, sandbox_id)
        await node.quiesce()
    assert first.read_bytes() == damaged, "it was merged into another layer"


async def _again(pause: Callable[..., Awaitable[object]], resume: Callable[..., Awaitable[object]], sandbox_id: str) -> None:
    with contextlib.suppress(AgentEnvError):  # it is paused already
        await pause(sandbox_id)
    await resume(sandbox_id, 600)


@pytest.mark.parametrize("what", ["snapshots", "layers"])
@pytest.mark.parametrize("state", [State.RUNNING, State.PAUSED])
async def test_what_has_lost_its_files_can_be_killed(node: FakeNode, state: State, what: str) -> None:
    sandbox_id, _ = await _paused(node)
    if state is State.RUNNING:
        await node.orchestrator.resume(sandbox_id, 600)
    for path in (node.paths.home / what).rglob("*"):
        if path.is_file():
            path.unlink()
    await node.orchestrator.kill(sandbox_id)
    assert node.row(sandbox_id).state is State.KILLED
    await node.quiesce()
    assert node.processes.alive() == []
    assert node.network.present == set()


_WRITTEN_OUT_MS = 61_000  # two rounds of who looks after the disk


@pytest.mark.parametrize("how", ["after a while", "durable", "the server ended in good order"])
async def test_what_was_written_out_survives_a_crash_of_the_machine(node: FakeNode, how: str) -> None:
    sandbox_id, _ = await _paused(node)
    if how == "after a while":
        await _wait_until_written(node)
    elif how == "durable":
        node.parts.write_out = lambda folder: None
        await node.orchestrator.write_out()
    else:
        closing = asyncio.create_task(node.orchestrator.close())
        while not closing.done():
            node.clock.advance_ms(250)
            await node.turn()
    node.crash_machine()
    await node.start_server()
    await node.orchestrator.resume(sandbox_id, 600)
    assert node.content(sandbox_id)["0"] == "x"
    await node.quiesce()
    assert node.problems() == []


async def _wait_until_written(node: FakeNode) -> None:
    """The age of a layer is told by the real clock, which nobody turns in a test."""
    notes = node.parts.layers._notes
    notes._unwritten = {layer_id: 0.0 for layer_id in notes._unwritten or {}}
    node.clock.advance_ms(_WRITTEN_OUT_MS)
    await node.turn()


async def test_what_was_not_written_out_when_the_machine_went_down_is_reported_and_not_believed(node: FakeNode) -> None:
    sandbox_id, snapshot = await _paused(node)
    node.crash_machine()
    await node.start_server()
    with pytest.raises(DataCorrupt, match=r"the machine went down before .* was written out") as caught:
        await node.orchestrator.resume(sandbox_id, 600)
    assert any(layer in caught.value.message for layer in (*snapshot.memory_layers, *snapshot.disk_layers))
    fresh = await node.create()
    assert node.row(fresh).state is State.RUNNING, "the template itself was there before"
    await node.orchestrator.kill(sandbox_id)
    await node.quiesce()
    assert node.row(sandbox_id).state is State.KILLED


async def test_a_killed_server_is_no_crash_of_the_machine(node: FakeNode) -> None:
    sandbox_id, _ = await _paused(node)
    node.kill_server()
    await node.start_server()
    await node.orchestrator.resume(sandbox_id, 600)
    await node.orchestrator.pause(sandbox_id)
    await _wait_until_written(node)
    node.crash_machine()
    await node.start_server()
    await node.orchestrator.resume(sandbox_id, 600)


async def test_a_note_that_is_not_whole_is_damage(node: FakeNode) -> None:
    sandbox_id, snapshot = await _paused(node)
    note = node.parts.layers.path(snapshot.disk_layers[-1]).with_suffix(".sealed")
    note.write_bytes(bytes(note.stat().st_size))
    with pytest.raises(DataCorrupt, match=snapshot.disk_layers[-1]):
        await node.orchestrator.resume(sandbox_id, 600)
