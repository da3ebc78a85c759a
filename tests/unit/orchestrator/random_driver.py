"""Drives a node through random, concurrent, failing and crashing verbs, and checks after each batch what must always hold.

Everything random comes from one seed and the node runs in one thread, so a seed that fails fails again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from agentenv.config.schema import LimitsConfig
from agentenv.core.errors import AgentEnvError, Conflict, InvalidInput, NotFound
from agentenv.core.lifecycle import CAPTURING, State
from agentenv.core.model import OnTimeout, Sandbox
from agentenv.orchestrator.templates import all_builds
from agentenv.testing.fake_blocks import Content
from agentenv.testing.fake_node import FakeNode

_SANDBOXES_WANTED = 6
_TEMPLATES_WANTED = 6
_BLOCKS = 6
_LATE_TURNS = 12
_POINTS = (
    "*",
    "store.commit",
    "store.commit",
    "store.commit",
    "blocks.*",
    "blocks.open",
    "blocks.seal:done",
    "blocks.capture",
    "vm.*",
    "vm.resume",
    "vmm.restore*",
    "vmm.boot*",
    "guest.*",
    "slots.*",
    "blocks.commit",
)


@dataclass
class _Known:
    """What the driver knows of one sandbox."""

    policy: OnTimeout
    token: str
    content: Content


class Driver:
    """`run` it, then `close` it."""

    def __init__(self, folder: Path, seed: int) -> None:
        limits = LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=0).model_copy(update={"layers_in_chain": 2})
        self.node = FakeNode(folder, seed, limits=limits, warm=seed % 3)  # chains are merged at almost every pause
        self.story: list[str] = []
        self._random = random.Random(seed)
        self._known: dict[str, _Known] = {}
        self._built: dict[str, Content] = {}  # what each build held when it was first seen
        self._kept: dict[str, Content] = {}  # the same of each checkpoint
        self._states: list[Content] = [{"booted": "yes"}]  # every content any guest ever had
        self._asked: defaultdict[str, set[str]] = defaultdict(set)  # verbs that somebody asked for, by sandbox
        self._rested: set[str] = set()  # seen alive when nothing was under way
        self._died: set[str] = set()
        self._crashed = False
        self._resume_failed = False
        self._written = 0
        self._favourite = 0.0
        self._asked_now: defaultdict[str, set[str]] = defaultdict(set)  # the same, in this batch

    async def run(self, batches: int) -> None:
        """AssertionError, with the story of the last batch, when something that must hold does not."""
        await self.node.start_server()
        for number in range(batches):
            self.story = [f"batch {number}"]
            await self._batch()
            self._check()

    async def _batch(self) -> None:
        self._asked_now.clear()
        size = self._random.choice((1, 1, 2, 3, 5))
        for _ in range(self._random.choice((0, 0, 1, 1, 2))):
            pattern = self._random.choice(_POINTS)
            at = self._random.randint(1, 16 if "*" in pattern else 4)
            self.node.points.fail(pattern, at)
            self.story.append(f"will fail {pattern} at {at}")
        self._favourite = self._random.random()
        verbs = [asyncio.create_task(self._verb(alone=size == 1)) for _ in range(size)]
        points = self.node.points
        if self._random.random() < 0.2:
            for _ in range(self._random.randint(0, 120)):
                await asyncio.sleep(0)
            self.story.append(f"server killed after {points.passed[-6:]}")
            self._crashed = True
            self.node.kill_server()
            self._resume_failed |= "vm.resume" in points.failed
            await self.node.start_server()
            for _ in range(_LATE_TURNS):  # verbs that come late meet the new server; those of the old one never end
                await self.node.turn()
                self.node.clock.advance_ms(250)
        else:
            await self._until_done(verbs)
        self._resume_failed |= "vm.resume" in points.failed
        self.story.append(f"failed at {points.failed}")
        points.clear()
        await self.node.quiesce()
        for verb in verbs:
            if verb.done() and verb.exception() is not None:
                raise verb.exception() or AssertionError
        points.failed.clear()

    async def _until_done(self, verbs: list[asyncio.Task[None]]) -> None:
        for _ in range(200):
            await self.node.turn()
            if all(verb.done() for verb in verbs):
                return
            self.node.clock.advance_ms(250)
        raise AssertionError("verbs hang")

    # -- verbs

    async def _verb(self, alone: bool) -> None:
        if not alone:
            for _ in range(self._random.choice((0, 0, 5, 20, 60))):
                await asyncio.sleep(0)
        live = [s for s in self.node.parts.store.sandboxes() if s.state not in (State.KILLED, State.KILLING)]
        choices: list[Callable[[Sandbox], Awaitable[object]]] = [
            *(self._pause,) * 4, *(self._resume,) * 2, *(self._connect,) * 3, *(self._fork,) * 2, *(self._write,) * 3,
            *(self._snapshot,) * 2, *(self._checkpoint,) * 2, *(self._rollback,) * 2, self._prune,
            self._set_timeout, self._pass_time, self._die, self._kill, self._forget,
        ]  # fmt: skip
        if not live or self._random.random() < 0.3 * (len(live) < _SANDBOXES_WANTED):
            await self._said("create", "", self._create())
            return
        # Most verbs of a batch meet at one sandbox, which is the newest now and then: a start may be under way.
        pick = self._favourite if self._random.random() < 0.7 else self._random.random()
        sandbox = live[-1] if pick < 0.2 else live[int(pick * len(live))]
        verb = self._random.choice(choices if len(live) < 2 * _SANDBOXES_WANTED else [self._kill])
        name = verb.__name__.strip("_")
        self._asked[sandbox.sandbox_id].add(name)
        self._asked_now[sandbox.sandbox_id].add(name)
        failed = await self._said(name, sandbox.sandbox_id, verb(sandbox))
        if alone and failed and not isinstance(failed, (Conflict, NotFound)):
            self._check_alone(name, sandbox)

    async def _said(self, name: str, sandbox_id: str, verb: Awaitable[object]) -> AgentEnvError | None:
        try:
            await verb
        except AgentEnvError as error:
            self.story.append(f"{name} {sandbox_id}: {error}")
            return error
        self.story.append(f"{name} {sandbox_id}")
        return None

    def _check_alone(self, name: str, before: Sandbox) -> None:
        after = self.node.row(before.sandbox_id)
        gone = before.sandbox_id in self._died or "vm.resume" in self.node.points.failed
        if name == "pause" and not gone and after.state is not State.PAUSING:  # that one is settled a little later
            assert after.state is State.RUNNING, f"a failed pause left it {after.state}"
        if name == "resume" and after.state is not State.RESUMING:
            assert after.state is State.PAUSED, f"a failed resume left it {after.state}"

    async def _create(self) -> None:
        policy: OnTimeout = self._random.choice(("kill", "pause"))
        reference = self._any_template()
        memory = policy == "kill" or self._random.random() < 0.5
        timeout_s, metadata = self._random.randint(60, 2000), {"policy": policy}
        await self.node.create(timeout_s, reference, on_timeout=policy, auto_pause_memory=memory, metadata=metadata)

    def _any_template(self) -> str:
        """A name and a tag of what there is, the base template more often than any other."""
        templates = self.node.parts.store.templates()
        if self._random.random() < 0.4:
            return "base"
        template = self._random.choice(templates)
        return f"{template.name}:{self._random.choice(template.tags).tag}"

    async def _snapshot(self, sandbox: Sandbox) -> None:
        name = self._random.choice((None, "a", "a:v1", "b", "b:v1"))
        if len(self.node.parts.store.templates()) > _TEMPLATES_WANTED:
            name = name or "a"
        await self.node.orchestrator.snapshot(sandbox.sandbox_id, name)

    async def _forget(self, sandbox: Sandbox) -> None:
        """Delete a template, or refuse to because something was made from it."""
        reference = self._any_template()
        with contextlib.suppress(InvalidInput):
            await self.node.orchestrator.delete_template(reference if self._random.random() < 0.5 else reference.partition(":")[0])

    async def _pause(self, sandbox: Sandbox) -> None:
        await self.node.orchestrator.pause(sandbox.sandbox_id, memory=self._random.random() < 0.6)

    async def _resume(self, sandbox: Sandbox) -> None:
        await self.node.orchestrator.resume(sandbox.sandbox_id, self._random.randint(60, 2000))

    async def _connect(self, sandbox: Sandbox) -> None:
        sandbox_id, timeout_s, called_at_ms = sandbox.sandbox_id, self._random.randint(1, 2000), self.node.clock.now_ms()
        memory = self._random.random() < 0.7
        connected, resumed = await self.node.orchestrator.connect(sandbox_id, timeout_s, memory)
        undisturbed = self._asked_now[sandbox_id] <= {"connect", "fork", "write", "snapshot", "forget"} and not self.node.points.failed
        if not resumed and sandbox.state is State.RUNNING and undisturbed:
            assert connected.end_at_ms >= sandbox.end_at_ms, "connect shortened the lifetime"
        assert connected.end_at_ms >= called_at_ms + 1000 * timeout_s, "connect did not extend the lifetime as asked"

    async def _fork(self, sandbox: Sandbox) -> None:
        outcomes = await self.node.orchestrator.fork(sandbox.sandbox_id, self._random.randint(1, 3), 600)
        tokens = [o.sandbox.access_token for o in outcomes if o.sandbox] + [sandbox.access_token]
        assert len(set(tokens)) == len(tokens), "forks share a token"

    async def _checkpoint(self, sandbox: Sandbox) -> None:
        name = self._random.choice(("", "a", "b"))
        await self.node.orchestrator.checkpoint(sandbox.sandbox_id, name, memory=self._random.random() < 0.8)

    async def _rollback(self, sandbox: Sandbox) -> None:
        sandbox_id, reference = sandbox.sandbox_id, self._random.choice(("", "a", "b"))
        with contextlib.suppress(InvalidInput):
            back = await self.node.orchestrator.rollback(sandbox_id, reference)
            if set.union(*self._asked_now.values()) == {"rollback"}:
                assert self.node.content(sandbox_id) == self._kept[back.checkpoint_id], "it is not what it was at the checkpoint"

    async def _prune(self, sandbox: Sandbox) -> None:
        await self.node.orchestrator.remove_checkpoint(sandbox.sandbox_id, self._random.choice(("a", "b")))

    async def _kill(self, sandbox: Sandbox) -> None:
        await self.node.orchestrator.kill(sandbox.sandbox_id)

    async def _set_timeout(self, sandbox: Sandbox) -> None:
        await self.node.orchestrator.set_timeout(sandbox.sandbox_id, self._random.choice((0, 30, 500, 2000)))

    async def _pass_time(self, sandbox: Sandbox) -> None:
        self.node.clock.advance_ms(self._random.randint(1, 400_000))

    async def _die(self, sandbox: Sandbox) -> None:
        for process in self.node.processes.alive():
            if process.spec.name == f"aenv-{sandbox.sandbox_id}":
                self._died.add(sandbox.sandbox_id)
                self.node.processes.end(process, "it died")

    async def _write(self, sandbox: Sandbox) -> None:
        """Guests write while other verbs are under way."""
        for _ in range(4):
            for process in self.node.processes.alive():
                sandbox_id, before = process.spec.name.removeprefix("aenv-"), process.memory
                if self.node.parts.store.sandbox(sandbox_id) is None:
                    continue  # it stands ready, or is about to: nobody's yet
                state, is_locked = self.node.row(sandbox_id).state, self.node.parts.shared.is_locked(sandbox_id)
                if state not in CAPTURING and (state is not State.RUNNING or is_locked):
                    continue  # a start that fails takes back what its guest did before anyone was told of it
                self._written += 1
                block, value = str(self._random.randrange(_BLOCKS)), f"{sandbox_id[:4]}-{self._written}"
                if process.write(block, value):
                    if sandbox_id in self._known and "rollback" not in self._asked_now[sandbox_id]:
                        assert before == self._known[sandbox_id].content, f"{sandbox_id} runs with other content than it wrote"
                    self._states.append(process.memory)
                    self._learn(sandbox_id, process.memory)
            await asyncio.sleep(0)

    def _learn(self, sandbox_id: str, content: Content) -> None:
        row = self.node.row(sandbox_id)
        self._known.setdefault(sandbox_id, _Known(row.on_timeout, row.access_token, content)).content = content

    # -- what must hold when nothing is under way

    def _check(self) -> None:
        problems = self.node.problems()
        assert not problems, f"problems: {problems}"
        for build in all_builds(self.node.parts.store):
            content = self.node.snapshot_content(build.snapshot_id)
            assert self._built.setdefault(build.build_id, content) == content, f"build {build.build_id} has changed"
            assert content in self._states, f"build {build.build_id} has content {content} that no guest ever had"
        for kept in self.node.parts.store.checkpoints.all():
            content = self.node.snapshot_content(kept.snapshot_id)
            assert self._kept.setdefault(kept.checkpoint_id, content) == content, f"checkpoint {kept.checkpoint_id} has changed"
            assert content in self._states, f"checkpoint {kept.checkpoint_id} has content {content} that no guest ever had"
        for row in self.node.parts.store.sandboxes():
            known = self._known.get(row.sandbox_id)
            if known is not None:
                assert (row.on_timeout, row.access_token) == (known.policy, known.token), "policy or token changed"
            if row.state is State.KILLED:
                self._check_ended(row)
                continue
            assert row.metadata == {"policy": row.on_timeout}, f"{row.sandbox_id} has metadata {row.metadata}"
            self._rested.add(row.sandbox_id)
            content = self.node.content(row.sandbox_id)
            assert content in self._states, f"{row.sandbox_id} has content {content} that no guest ever had"
            if known is not None and "rollback" not in self._asked_now[row.sandbox_id]:
                assert content == known.content, f"{row.sandbox_id} lost writes: {content} instead of {known.content}"
            self._learn(row.sandbox_id, content)
            self._check_time(row)

    def _check_time(self, row: Sandbox) -> None:
        expired = row.end_at_ms <= self.node.clock.now_ms()
        if row.state is State.PAUSED:
            by_policy = expired and row.on_timeout == "pause"
            cut_short = "rollback" in self._asked[row.sandbox_id] and self._crashed
            assert "pause" in self._asked[row.sandbox_id] or by_policy or cut_short, f"{row.sandbox_id} was paused by nobody"
        elif expired:
            assert row.sandbox_id in self.node.parts.shared.expiry_retry_at_ms, f"{row.sandbox_id} outlived its timeout"

    def _check_ended(self, row: Sandbox) -> None:
        rested = row.sandbox_id in self._rested
        reasons = {
            "killed by request": "kill" in self._asked[row.sandbox_id],
            "its timeout was reached": row.on_timeout == "kill" and row.end_at_ms <= self.node.clock.now_ms(),
            "its VM ended by itself": row.sandbox_id in self._died,
            "it could not be started": not rested,
            "it was not finished": not rested,
            "its VM was lost while it was captured": row.sandbox_id in self._died or self._resume_failed,
            "its VM was lost while it was rolled back": row.sandbox_id in self._died or self._resume_failed,
            "its VM or its disk was lost while the server was down": row.sandbox_id in self._died,
            "the server stopped while it was being created": not rested and self._crashed,
        }
        allowed = [holds for reason, holds in reasons.items() if row.reason.startswith(reason)]
        assert allowed, f"{row.sandbox_id} ended for a reason nobody knows: {row.reason}"
        assert allowed[0], f"{row.sandbox_id} ended without cause: {row.reason}"
