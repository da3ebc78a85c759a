"""Every verb of the orchestrator in stories: any live sandbox can be picked for any of them, in whatever state it is."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule
from lifecycle_stories import HOW, Faults, How

from agentenv.core.errors import InvalidInput
from agentenv.core.lifecycle import State
from agentenv.core.model import CreateRequest, Sandbox
from agentenv.core.network import NetworkSettings

_SANDBOXES_WANTED = 4
_SANDBOXES_MOST = 10
_TEMPLATES_WANTED = 6
_NAMES = ("", "a", "b")
_BUILDS = (None, "a", "a:v1", "b", "b:v1")

#: How often each verb is asked for, beside the others.
WEIGHTS = {
    "pause": 6, "resume": 3, "connect": 4, "wake": 1, "fork": 3, "snapshot": 2, "checkpoint": 3, "rollback": 3, "remove_checkpoint": 1,
    "set_timeout": 2, "refresh": 1, "set_network": 1, "delete_template": 1, "collect": 1, "kill": 1, "create": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call: a verb, which sandbox, a number that says how, and what happens beside it."""

    verb: str
    pick: int
    number: int
    how: How


CALL = st.builds(
    Call,
    verb=st.sampled_from([verb for verb, weight in WEIGHTS.items() for _ in range(weight)]),
    pick=st.sampled_from((0, 0, 0, 1, 1, 2, 3, 5, 8)),  # most meet at the same few
    number=st.integers(0, 2000),
    how=HOW,
)


class Stories(Faults):
    """Stories of all verbs."""

    @rule(calls=st.lists(CALL, min_size=1, max_size=4))
    def call_some(self, calls: list[Call]) -> None:
        """One after the other begins, and only the last waits for the rest, or sees the server die."""
        for call in calls[:-1]:
            self._call(call, replace(call.how, then="more"))
        self._call(calls[-1], calls[-1].how)

    @rule(call=CALL)
    def call_one(self, call: Call) -> None:
        self._call(call, call.how)

    @rule(calls=st.lists(CALL, min_size=2, max_size=6))
    def call_many(self, calls: list[Call]) -> None:
        self.call_some(calls)

    def _call(self, call: Call, how: How) -> None:
        live = self.live()
        if call.verb == "create" or len(live) < _SANDBOXES_WANTED:
            if len(live) < _SANDBOXES_MOST:
                self.begin_call(self.said("create", self._create(call.number)), how)
            return
        verb: Callable[[Sandbox, int], Awaitable[Any]] = getattr(self, f"_{call.verb}")
        if call.verb == "fork" and len(live) >= _SANDBOXES_MOST:
            verb = self._kill
        self.call(verb.__name__.strip("_"), lambda sandbox: verb(sandbox, call.number), call.pick, how)

    # -- each of them; `number` says how

    async def _create(self, number: int) -> None:
        policy: Any = "kill" if number % 2 else "pause"
        fields: dict[str, Any] = {"on_timeout": policy, "auto_resume": number % 5 == 0, "metadata": {"policy": policy}}
        fields["auto_pause_memory"] = policy == "kill" or number % 3 > 0
        request = CreateRequest(self._any_template(number), 60 + number, **fields)
        if number % 7 == 0:
            await self.node.orchestrator.create_many([request] * 3)
        else:
            await self.node.orchestrator.create(request)

    def _any_template(self, number: int) -> str:
        """A name and a tag of what there is, the base template more often than any other."""
        templates = self.node.parts.store.templates()
        references = ["base"] * 4 + [f"{template.name}:{tag.tag}" for template in templates for tag in template.tags]
        return references[number % len(references)]

    async def _pause(self, sandbox: Sandbox, number: int) -> None:
        await self.node.orchestrator.pause(sandbox.sandbox_id, number % 3 > 0, number % 2 > 0)

    async def _resume(self, sandbox: Sandbox, number: int) -> None:
        await self.node.orchestrator.resume(sandbox.sandbox_id, 1 + number, number % 3 > 0)

    async def _connect(self, sandbox: Sandbox, number: int) -> None:
        sandbox_id, timeout_s = sandbox.sandbox_id, 1 + number
        before, called_at_ms = self.node.row(sandbox_id), self.node.clock.now_ms()
        connected, resumed = await self.node.orchestrator.connect(sandbox_id, timeout_s, number % 3 > 0)
        assert connected.end_at_ms >= called_at_ms + 1000 * timeout_s, "connect did not extend the lifetime as asked"
        if not resumed and before.state is State.RUNNING and not self.claims.asked[sandbox_id] & {"set_timeout", "resume"}:
            assert connected.end_at_ms >= before.end_at_ms, "connect shortened the lifetime"
        if resumed:
            self.claims.promised_ms.pop(sandbox_id, None)
        self.claims.promise(sandbox_id, connected.end_at_ms)

    async def _wake(self, sandbox: Sandbox, number: int) -> None:
        woken = await self.node.orchestrator.wake(sandbox.sandbox_id, 300)
        assert woken is None or woken.state is State.RUNNING

    async def _set_timeout(self, sandbox: Sandbox, number: int) -> None:
        await self.node.orchestrator.set_timeout(sandbox.sandbox_id, number if number % 4 else 0)

    async def _refresh(self, sandbox: Sandbox, number: int) -> None:
        await self.node.orchestrator.refresh(sandbox.sandbox_id, number)

    async def _fork(self, sandbox: Sandbox, number: int) -> None:
        count = 1 + number % 3
        outcomes = await self.node.orchestrator.fork(sandbox.sandbox_id, count, 600)
        assert len(outcomes) == count
        assert all((outcome.sandbox is None) == bool(outcome.error_status) for outcome in outcomes), "neither a child nor its error"
        tokens = [outcome.sandbox.access_token for outcome in outcomes if outcome.sandbox] + [sandbox.access_token]
        assert len(set(tokens)) == len(tokens), "forks share a token"

    async def _snapshot(self, sandbox: Sandbox, number: int) -> None:
        crowded = len(self.node.parts.store.templates()) > _TEMPLATES_WANTED
        name = _BUILDS[number % len(_BUILDS)] or ("a" if crowded else None)
        await self.node.orchestrator.snapshot(sandbox.sandbox_id, name, number % 3 > 0)

    async def _delete_template(self, _: Sandbox, number: int) -> None:
        reference = self._any_template(number)
        with contextlib.suppress(InvalidInput):  # something was made from it
            await self.node.orchestrator.delete_template(reference.partition(":")[0] if number % 2 else reference)

    async def _checkpoint(self, sandbox: Sandbox, number: int) -> None:
        await self.node.orchestrator.checkpoint(sandbox.sandbox_id, _NAMES[number % 3], number % 4 > 0)

    async def _rollback(self, sandbox: Sandbox, number: int) -> None:
        with contextlib.suppress(InvalidInput):  # it has no checkpoint
            back = await self.node.orchestrator.rollback(sandbox.sandbox_id, _NAMES[number % 3])
            if {verb for asked in self.claims.asked.values() for verb in asked} == {"rollback"}:
                self.claims.went_back(sandbox.sandbox_id, back.checkpoint_id)

    async def _remove_checkpoint(self, sandbox: Sandbox, number: int) -> None:
        await self.node.orchestrator.remove_checkpoint(sandbox.sandbox_id, "ab"[number % 2])

    async def _set_network(self, sandbox: Sandbox, number: int) -> None:
        await self.node.orchestrator.set_network(sandbox.sandbox_id, NetworkSettings(), number % 2 == 0)

    async def _collect(self, _: Sandbox, number: int) -> None:
        await self.node.orchestrator.collect(number % 2 == 0)

    async def _kill(self, sandbox: Sandbox, _: int) -> None:
        await self.node.orchestrator.kill(sandbox.sandbox_id)
