"""Stories of a node: calls that overlap, steps that fail, VMs that die, servers that are killed.

Hypothesis writes them, and shortens those that fail.

A rule begins a call and lets the node go on for a number of turns, or until it rests; then everything is checked. The
node runs in one thread and its ids come from the story, so a story that fails fails again.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from lifecycle_claims import Claims

from agentenv.config.schema import LimitsConfig, VmmConfig
from agentenv.core import ids
from agentenv.core.errors import AgentEnvError, Conflict, NotFound
from agentenv.core.lifecycle import CAPTURING, State
from agentenv.core.model import Sandbox
from agentenv.testing.fake_node import FakeNode

_RAM = Path("/dev/shm")
_RUNNING_MOST = 8
_LATE_TURNS = 12
_HANG_TURNS = 200
_BLOCKS = 6
_POINTS = (
    "*", "store.commit", "store.commit", "store.commit", "blocks.*", "blocks.open", "blocks.seal:done", "blocks.capture", "blocks.commit",
    "vm.*", "vm.resume", "vmm.restore*", "vmm.boot*", "guest.*", "slots.*",
)  # fmt: skip


@dataclass(frozen=True)
class How:
    """How a call is made.

    Whether guests write before it, which step fails, for how many turns it runs by itself, how much time passes then, and what comes next.
    """

    then: str = "rest"
    turns: int = 1
    writes: bool = False
    fails: tuple[str, int] | None = None
    passes_s: int = 0


HOW = st.builds(
    How,
    then=st.sampled_from(("rest", "rest", "rest", "more", "more", "more", "crash")),
    turns=st.sampled_from((1, 1, 2, 5, 10, 20, 60)),
    writes=st.booleans(),
    passes_s=st.sampled_from((0, 0, 0, 0, 0, 100, 700, 2100)),
    fails=st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(_POINTS), st.integers(1, 5))),
)


class Faults(RuleBasedStateMachine):
    """How calls are made, and all that may go wrong meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory(prefix="aenv-story-", dir=_RAM if _RAM.is_dir() else None)
        self._calls: list[asyncio.Task[None]] = []
        self._broken = False
        self._written = 0
        self.node: FakeNode

    @initialize(
        seed=st.one_of(st.none(), st.integers(0, 2**16)),
        warm=st.integers(0, 2),
        writes_memory=st.booleans(),
        copied_mb=st.sampled_from((0, 16)),
    )
    def begin(self, seed: int | None, warm: int, writes_memory: bool, copied_mb: int) -> None:
        """`seed` is of how slow the steps of all calls are; None: all alike. `writes_memory`: the VMMs do it themselves.

        `copied_mb`: 0 lets chains of memory grow.
        """
        dice = random.Random(seed or 0)
        words = SimpleNamespace(choice=dice.choice, token_hex=lambda n: dice.randbytes(n).hex(), token_bytes=dice.randbytes)
        uuids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{dice.getrandbits(128):032x}"))
        self._patches = [mock.patch.object(ids, "secrets", words), mock.patch.object(ids, "uuid", uuids)]
        for patch in self._patches:
            patch.start()
        limits = LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=0).model_copy(
            update={"layers_in_chain": 2, "sandboxes_running": _RUNNING_MOST}  # chains are merged at almost every pause
        )
        self.node = FakeNode(Path(self._folder.name) / "node", seed, limits=limits, warm=warm, writes_memory=writes_memory)
        vmm = VmmConfig(own_memory_copied_mb=copied_mb)
        self.node.config = self.node.config.model_copy(update={"vmm": vmm})
        self._do(self.node.start_server())
        self.claims = Claims(self.node)

    def teardown(self) -> None:
        try:
            if hasattr(self, "node"):
                if not self._broken:
                    self.rest()
                self._loop.run_until_complete(self.node.close())
                for call in self._calls:
                    call.cancelled() or call.exception()  # it was told already, if it is what broke the story
        finally:
            for patch in self._patches:
                patch.stop()
            self._loop.close()
            self._folder.cleanup()

    # -- how calls are made

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._loop.run_until_complete(work)
        except BaseException:
            self._broken = True
            raise

    def live(self) -> list[Sandbox]:
        return [s for s in self.node.parts.store.sandboxes() if s.state not in (State.KILLED, State.KILLING)]

    def call(self, name: str, verb: Callable[[Sandbox], Awaitable[object]], pick: int, how: How) -> None:
        """Begin a verb on one of the live sandboxes. By itself, a verb that fails leaves the sandbox as it was."""
        live = self.live()
        sandbox, alone = live[pick % len(live)], how.then == "rest" and not self._calls
        self.claims.asked[sandbox.sandbox_id].add(name)
        self.begin_call(self.said(f"{name} {sandbox.sandbox_id}", verb(sandbox), sandbox if alone else None), how)

    async def said(self, what: str, verb: Awaitable[object], alone: Sandbox | None = None) -> None:
        try:
            await verb
            note(f"# {what}: done")
        except AgentEnvError as error:
            note(f"# {what}: {error}")
            if alone is not None and not isinstance(error, (Conflict, NotFound)):
                self._check_alone(what.split()[0], alone)

    def _check_alone(self, verb: str, before: Sandbox) -> None:
        after = self.node.row(before.sandbox_id)
        gone = before.sandbox_id in self.claims.died or "vm.resume" in self.node.points.failed
        if verb == "pause" and not gone and after.state is not State.PAUSING:  # that one is settled a little later
            assert after.state is State.RUNNING, f"a failed pause left it {after.state}"
        if verb == "resume" and after.state is not State.RESUMING:
            assert after.state is State.PAUSED, f"a failed resume left it {after.state}"

    def begin_call(self, work: Coroutine[Any, Any, None], how: How) -> None:
        """Begin a call as `how` says."""
        if how.writes:
            self.write(self._written % _BLOCKS)
        if how.fails is not None:
            self.node.points.fail(*how.fails)
        self._calls.append(self._loop.create_task(work))
        self._do(self._turns(how.turns))
        self.node.clock.advance_ms(1000 * how.passes_s)
        if how.then == "rest":
            self.rest()
        elif how.then == "crash":
            self.crash(machine=False)

    async def _turns(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    @rule()
    def rest(self) -> None:
        """Let everything come to its end; then check all that must hold."""
        self._do(self._rest())
        try:
            self.claims.check()
        except BaseException:
            self._broken = True
            raise

    async def _rest(self) -> None:
        for _ in range(_HANG_TURNS):
            await self.node.turn()
            if all(call.done() for call in self._calls):
                break
            self.node.clock.advance_ms(250)
        else:
            raise AssertionError("calls hang")
        calls, self._calls = self._calls, []
        self._note_failures()
        await self.node.quiesce()
        await asyncio.gather(*calls)

    def _note_failures(self) -> None:
        self.claims.resume_failed |= "vm.resume" in self.node.points.failed
        if self.node.points.failed:
            note(f"# failed at {self.node.points.failed}")
        self.node.points.clear()
        self.node.points.failed.clear()

    # -- what goes wrong

    @rule(how=st.sampled_from(("restart", "crash", "crash of the machine")))
    def next_server(self, how: str) -> None:
        """Another server takes over."""
        if how == "restart":
            self.restart()
        else:
            self.crash(machine=how != "crash")

    def crash(self, machine: bool) -> None:
        """The server is killed, maybe with all the machine, and the next one starts. Calls that wait for the old one never end."""
        self._note_failures()
        self.claims.crashed = True
        if machine:
            self.claims.died |= {process.spec.name.removeprefix("aenv-") for process in self.node.processes.alive()}
            self.node.crash_machine()
        else:
            self.node.kill_server()
        for call in self._calls:
            if call.done():
                call.result()
        self._calls.clear()
        self._do(self.node.start_server())
        self.rest()

    def restart(self) -> None:
        """The server is stopped in good order, which ends the calls under way, and the next one starts."""
        self.begin_call(self._stop(), How("more", _LATE_TURNS))
        self._do(self._until_done())
        self._do(self.node.start_server())
        self.rest()

    async def _stop(self) -> None:
        await self.node.orchestrator.close()

    async def _until_done(self) -> None:
        for _ in range(_HANG_TURNS):
            if all(call.done() for call in self._calls):
                return
            self.node.clock.advance_ms(250)
            await self.node.turn()
        raise AssertionError("the server does not stop")

    @rule(seconds=st.integers(1, 400))
    def time_passes(self, seconds: int) -> None:
        """The clock moves."""
        self.node.clock.advance_ms(1000 * seconds)
        self._do(self._turns(1))

    @precondition(lambda self: len(self.live()) > 1)
    @rule(pick=st.integers(0, 12))
    def die(self, pick: int) -> None:
        """A VMM ends by itself."""
        live = self.live()
        sandbox_id = live[pick % len(live)].sandbox_id
        for process in self.node.processes.alive():
            if process.spec.name == f"aenv-{sandbox_id}":
                self.claims.died.add(sandbox_id)
                self.node.processes.end(process, "it died")

    def write(self, block: int) -> None:
        """Every guest that can writes, whatever else is under way."""
        for process in self.node.processes.alive():
            sandbox_id, before = process.spec.name.removeprefix("aenv-"), process.memory
            if self.node.parts.store.sandbox(sandbox_id) is None:
                continue  # it stands ready, or is about to: nobody's yet
            state, is_locked = self.node.row(sandbox_id).state, self.node.parts.shared.is_locked(sandbox_id)
            if state not in CAPTURING and (state is not State.RUNNING or is_locked):
                continue  # a start that fails takes back what its guest did before anyone was told of it
            self._written += 1
            if process.write(str(block), f"{sandbox_id[:4]}-{self._written}"):
                self.claims.wrote(sandbox_id, before, process.memory)
