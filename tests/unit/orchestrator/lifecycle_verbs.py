"""A rule for every verb of the orchestrator: any live sandbox can be picked for any of them, in whatever state it is."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from lifecycle_stories import PICK, TURNS, Faults

from agentenv.core.errors import InvalidInput
from agentenv.core.lifecycle import State
from agentenv.core.model import CreateRequest, Sandbox
from agentenv.core.network import NetworkSettings

_SANDBOXES_WANTED = 6
_SANDBOXES_MOST = 10
_TEMPLATES_WANTED = 6
_TIMEOUT_S = st.integers(1, 2000)
_NAMES = st.sampled_from(("", "a", "b"))
_BUILDS = st.sampled_from((None, "a", "a:v1", "b", "b:v1"))


class Stories(Faults):
    """Stories of all verbs."""

    @precondition(lambda self: len(self.live()) < _SANDBOXES_WANTED)
    @rule(
        policy=st.sampled_from(("kill", "pause")), memory=st.booleans(), auto=st.booleans(), timeout_s=st.integers(60, 2000),
        count=st.sampled_from((1, 1, 1, 3)), template=st.integers(0, 8), turns=TURNS,
    )  # fmt: skip
    def create(self, policy: Any, memory: bool, auto: bool, timeout_s: int, count: int, template: int, turns: int) -> None:
        fields = {
            "on_timeout": policy,
            "auto_pause_memory": memory or policy == "kill",
            "auto_resume": auto,
            "metadata": {"policy": policy},
        }
        request = CreateRequest(self._any_template(template), timeout_s, **fields)
        many = self.node.orchestrator.create_many([request] * count)
        self.begin_call(self.said(f"create {count}", many if count > 1 else self.node.orchestrator.create(request)), turns)

    def _any_template(self, pick: int) -> str:
        """A name and a tag of what there is, the base template more often than any other."""
        references = ["base"] * 4 + [
            f"{template.name}:{tag.tag}" for template in self.node.parts.store.templates() for tag in template.tags
        ]
        return references[pick % len(references)]

    @precondition(lambda self: self.live())
    @rule(pick=PICK, memory=st.booleans(), healthy=st.booleans(), turns=TURNS)
    def pause(self, pick: int, memory: bool, healthy: bool, turns: int) -> None:
        async def pause(sandbox: Sandbox) -> None:
            await self.node.orchestrator.pause(sandbox.sandbox_id, memory, healthy)

        self.call(pause, pick, turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, timeout_s=_TIMEOUT_S, memory=st.booleans(), turns=TURNS)
    def resume(self, pick: int, timeout_s: int, memory: bool, turns: int) -> None:
        async def resume(sandbox: Sandbox) -> None:
            await self.node.orchestrator.resume(sandbox.sandbox_id, timeout_s, memory)

        self.call(resume, pick, turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, timeout_s=_TIMEOUT_S, memory=st.booleans(), turns=TURNS)
    def connect(self, pick: int, timeout_s: int, memory: bool, turns: int) -> None:
        async def connect(sandbox: Sandbox) -> None:
            before, called_at_ms = self.node.row(sandbox.sandbox_id), self.node.clock.now_ms()
            connected, resumed = await self.node.orchestrator.connect(sandbox.sandbox_id, timeout_s, memory)
            assert connected.end_at_ms >= called_at_ms + 1000 * timeout_s, "connect did not extend the lifetime as asked"
            if not resumed and before.state is State.RUNNING and not self.claims.asked[sandbox.sandbox_id] & {"set_timeout", "resume"}:
                assert connected.end_at_ms >= before.end_at_ms, "connect shortened the lifetime"
            if resumed:
                self.claims.promised_ms.pop(sandbox.sandbox_id, None)
            self.claims.promise(sandbox.sandbox_id, connected.end_at_ms)

        self.call(connect, pick, turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, turns=TURNS)
    def wake(self, pick: int, turns: int) -> None:
        async def wake(sandbox: Sandbox) -> None:
            woken = await self.node.orchestrator.wake(sandbox.sandbox_id, 300)
            assert woken is None or woken.state is State.RUNNING

        self.call(wake, pick, turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, timeout_s=st.sampled_from((0, 30, 500, 2000)), turns=TURNS)
    def set_timeout(self, pick: int, timeout_s: int, turns: int) -> None:
        async def set_timeout(sandbox: Sandbox) -> None:
            await self.node.orchestrator.set_timeout(sandbox.sandbox_id, timeout_s)

        self.call(set_timeout, pick, turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, duration_s=_TIMEOUT_S, turns=TURNS)
    def refresh(self, pick: int, duration_s: int, turns: int) -> None:
        async def refresh(sandbox: Sandbox) -> None:
            await self.node.orchestrator.refresh(sandbox.sandbox_id, duration_s)

        self.call(refresh, pick, turns)

    @precondition(lambda self: 0 < len(self.live()) < _SANDBOXES_MOST)
    @rule(pick=PICK, count=st.integers(1, 3), turns=TURNS)
    def fork(self, pick: int, count: int, turns: int) -> None:
        async def fork(sandbox: Sandbox) -> None:
            outcomes = await self.node.orchestrator.fork(sandbox.sandbox_id, count, 600)
            assert len(outcomes) == count
            assert all((outcome.sandbox is None) == bool(outcome.error_status) for outcome in outcomes), "neither a child nor its error"
            tokens = [outcome.sandbox.access_token for outcome in outcomes if outcome.sandbox] + [sandbox.access_token]
            assert len(set(tokens)) == len(tokens), "forks share a token"

        self.call(fork, pick, turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, name=_BUILDS, memory=st.booleans(), turns=TURNS)
    def snapshot(self, pick: int, name: str | None, memory: bool, turns: int) -> None:
        crowded = len(self.node.parts.store.templates()) > _TEMPLATES_WANTED

        async def snapshot(sandbox: Sandbox) -> None:
            await self.node.orchestrator.snapshot(sandbox.sandbox_id, name or ("a" if crowded else None), memory)

        self.call(snapshot, pick, turns)

    @rule(pick=PICK, whole=st.booleans(), turns=TURNS)
    def delete_template(self, pick: int, whole: bool, turns: int) -> None:
        reference = self._any_template(pick)

        async def delete() -> None:
            with contextlib.suppress(InvalidInput):  # something was made from it
                await self.node.orchestrator.delete_template(reference.partition(":")[0] if whole else reference)

        self.begin_call(self.said(f"delete {reference}", delete()), turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, name=_NAMES, memory=st.booleans(), turns=TURNS)
    def checkpoint(self, pick: int, name: str, memory: bool, turns: int) -> None:
        async def checkpoint(sandbox: Sandbox) -> None:
            await self.node.orchestrator.checkpoint(sandbox.sandbox_id, name, memory)

        self.call(checkpoint, pick, turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, name=_NAMES, turns=TURNS)
    def rollback(self, pick: int, name: str, turns: int) -> None:
        async def rollback(sandbox: Sandbox) -> None:
            with contextlib.suppress(InvalidInput):  # it has no checkpoint
                back = await self.node.orchestrator.rollback(sandbox.sandbox_id, name)
                if {verb for asked in self.claims.asked.values() for verb in asked} == {"rollback"}:
                    self.claims.went_back(sandbox.sandbox_id, back.checkpoint_id)

        self.call(rollback, pick, turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, name=st.sampled_from(("a", "b")), turns=TURNS)
    def remove_checkpoint(self, pick: int, name: str, turns: int) -> None:
        async def remove_checkpoint(sandbox: Sandbox) -> None:
            await self.node.orchestrator.remove_checkpoint(sandbox.sandbox_id, name)

        self.call(remove_checkpoint, pick, turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, internet=st.booleans(), turns=TURNS)
    def set_network(self, pick: int, internet: bool, turns: int) -> None:
        async def set_network(sandbox: Sandbox) -> None:
            await self.node.orchestrator.set_network(sandbox.sandbox_id, NetworkSettings(), internet)

        self.call(set_network, pick, turns)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, turns=TURNS)
    def kill(self, pick: int, turns: int) -> None:
        async def kill(sandbox: Sandbox) -> None:
            await self.node.orchestrator.kill(sandbox.sandbox_id)

        self.call(kill, pick, turns)

    @rule(everything=st.booleans(), turns=TURNS)
    def collect(self, everything: bool, turns: int) -> None:
        async def collect() -> None:
            await self.node.orchestrator.collect(everything)

        self.begin_call(self.said("collect", collect()), turns)
