"""What each verb takes: one at a time in turn with the limit, then ten and fifty at once.

"-> first output" ends with the output of a command that is sent through the official SDK once the verb has answered.
"""

from __future__ import annotations

import os
import re
import tempfile
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

from samples import COMMAND, DEADLINE_S, Crowd, N, ms, rounds, step, summaries

from agentenv.client import Checkpoint, Sandbox
from agentenv.config.load import load
from limit import Bare, restore_and_measure

VERBS = ("create", "checkpoint", "rollback", "snapshot", "pause", "resume", "kill")
AT_ONCE = (10, 50)
_BLOCK = os.urandom(1 << 20)


def run(sandbox: Sandbox) -> None:
    """The command whose output is waited for."""
    sandbox.commands.run(COMMAND, timeout=DEADLINE_S, request_timeout=DEADLINE_S)


def create() -> Sandbox:
    """A sandbox that has given its first output."""
    made = Sandbox.create("base", timeout=3600, request_timeout=DEADLINE_S)
    run(made)
    return made


def kill(sandbox: Sandbox) -> None:
    """End it."""
    sandbox.kill(request_timeout=DEADLINE_S)


def _roll_back(sandbox: Sandbox, kept: Checkpoint) -> None:
    kept.rollback()
    run(sandbox)


def _resume(sandbox: Sandbox) -> None:
    run(sandbox.connect(timeout=3600, request_timeout=DEADLINE_S))


def _checkpoint(sandbox: Sandbox) -> tuple[Sandbox, Checkpoint]:
    return sandbox, sandbox.checkpoint()


def round_of(crowd: Crowd, size: int) -> tuple[dict[str, list[float]], list[list[int]]]:
    """One round of all verbs on `size` sandboxes at once; times by verb, and per sandbox the bytes that its captures wrote."""
    found: dict[str, list[float]] = {}

    def all_of(verb: str, works: list[Callable[[], Any]]) -> list[Any]:
        found[verb], results = crowd.together(works)
        return results

    made: list[Sandbox] = all_of("create", [create] * size)
    kept = all_of("checkpoint", [partial(_checkpoint, one) for one in made])
    all_of("rollback", [partial(_roll_back, *pair) for pair in kept])
    snapshots = all_of("snapshot", [partial(one.create_snapshot, request_timeout=DEADLINE_S) for one in made])
    all_of("pause", [partial(one.pause, request_timeout=DEADLINE_S) for one in made])
    all_of("resume", [partial(_resume, one) for one in made])
    captured = [captured_bytes(one.sandbox_id) for one in made]
    for snapshot in snapshots:
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    all_of("kill", [partial(kill, one) for one in made])
    return found, captured


def one_at_a_time(crowd: Crowd, bare: Bare) -> dict[str, Any]:
    """Every verb in turn with the limit: the bare restore, and writing as many bytes as each capture did to a file."""
    step(f"every verb in turn with the limit, {N} times")
    names = ("limit", "limit_cpu", *VERBS, *(f"write_{verb}" for verb in ("checkpoint", "snapshot", "pause")))
    found: dict[str, list[float]] = {name: [] for name in names}
    sizes: dict[str, list[float]] = {verb: [] for verb in ("checkpoint", "snapshot", "pause")}
    for _ in range(N):
        took_ms, cpu_ms = restore_and_measure(bare, COMMAND)
        found["limit"].append(took_ms)
        found["limit_cpu"].append(cpu_ms)
        times, captured = round_of(crowd, 1)
        for verb, samples in times.items():
            found[verb] += samples
        for verb, size in zip(sizes, captured[0] if captured else (), strict=False):
            sizes[verb].append(size)
            found[f"write_{verb}"].append(ms(partial(write_file, size))[0])
    return summaries(found) | {"captured_bytes": {verb: sorted(of)[len(of) // 2] for verb, of in sizes.items() if of}}


def many_at_once(crowd: Crowd) -> dict[str, Any]:
    """Every verb on ten and on fifty sandboxes at once; each sample counts from when all began."""
    result = {}
    for size in AT_ONCE:
        if size > N:
            continue
        step(f"every verb on {size} at once, {rounds(size)} times")
        found: dict[str, list[float]] = {verb: [] for verb in VERBS}
        for _ in range(rounds(size)):
            for verb, samples in round_of(crowd, size)[0].items():
                found[verb] += samples
        result[str(size)] = summaries(found)
    return result


def captured_bytes(sandbox_id: str) -> list[int]:
    """What the node says each capture of a sandbox wrote of its memory, oldest first."""
    request = urllib.request.Request(
        f"{os.environ['E2B_API_URL']}/sandboxes/{sandbox_id}/logs", headers={"X-API-KEY": os.environ["E2B_API_KEY"]}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
        return [int(size) for size in re.findall(r'"memory_bytes":\s*"(\d+)"', reply.read().decode().replace("\\", ""))]


def write_file(size: int) -> None:
    """Write `size` bytes beside the node's layers."""
    with tempfile.NamedTemporaryFile(dir=load().node.home) as out:
        for _ in range(size >> 20):
            out.write(_BLOCK)
        out.write(_BLOCK[: size & ((1 << 20) - 1)])
