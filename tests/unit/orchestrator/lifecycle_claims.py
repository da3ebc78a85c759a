"""What must hold of a node at rest, whatever has been asked of it: told by what was asked since it last rested."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from agentenv.core.lifecycle import State
from agentenv.core.model import OnTimeout, Sandbox
from agentenv.orchestrator.templates import all_builds
from agentenv.testing.fake_blocks import Content
from agentenv.testing.fake_node import FakeNode

_MOVES_THE_END = {"connect", "wake", "resume", "set_timeout", "refresh"}
_MAY_SHORTEN = {"set_timeout", "resume", "pause", "rollback"}  # a start from paused sets it anew


@dataclass
class _Known:
    """What is known of one sandbox."""

    policy: OnTimeout
    token: str
    content: Content
    state: State
    end_at_ms: int


class Claims:
    """The rules of a story tell it what they ask for and what they are promised; `check` compares."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.asked: defaultdict[str, set[str]] = defaultdict(set)  # verbs that somebody asked for, by sandbox
        self.died: set[str] = set()  # sandboxes whose VMM has been ended
        self.crashed = False
        self.resume_failed = False  # a VM that cannot go on is lost, and that is said
        self.promised_ms: dict[str, int] = {}  # the sandbox was said to run until then, at least
        self._checked_at_ms = 0
        self._known: dict[str, _Known] = {}  # as they were when the node rested last, and what they wrote since
        self._built: dict[str, Content] = {}  # what each build held when it was first seen
        self._kept: dict[str, Content] = {}  # the same of each checkpoint
        self._states: list[Content] = [{"booted": "yes"}]  # every content any guest ever had

    # -- what happens

    def wrote(self, sandbox_id: str, before: Content, after: Content) -> None:
        """A guest has written."""
        if (known := self._known.get(sandbox_id)) is not None:
            if "rollback" not in self.asked[sandbox_id]:
                assert before == known.content, f"{sandbox_id} runs with other content than it wrote"
            known.content = after
        self._states.append(after)

    def promise(self, sandbox_id: str, end_at_ms: int) -> None:
        """A call has said that the sandbox runs until then."""
        self.promised_ms[sandbox_id] = max(end_at_ms, self.promised_ms.get(sandbox_id, 0))

    def went_back(self, sandbox_id: str, checkpoint_id: str) -> None:
        """A rollback that nothing disturbed has answered."""
        assert self.node.content(sandbox_id) == self._kept.get(checkpoint_id, self.node.content(sandbox_id)), "it is not what it was then"

    # -- what must hold when nothing is under way

    def check(self) -> None:
        """AssertionError when something does not. What comes next is told apart from what was."""
        problems = self.node.problems()
        assert not problems, f"problems: {problems}"
        self._check_kept()
        rows = self.node.parts.store.sandboxes()
        holding = sum(row.state is State.RUNNING for row in rows)
        assert holding <= self.node.config.limits.sandboxes_running, f"{holding} sandboxes run, more than the limit"
        for row in rows:
            self._check_row(row)
        rows_of = {row.sandbox_id for row in rows}
        now_ms, kept_ms = self.node.clock.now_ms(), 1000 * self.node.config.limits.killed_kept_s
        if now_ms - self._checked_at_ms < kept_ms:  # else it may have ended long ago
            assert {s for s, known in self._known.items() if known.state is not State.KILLED} <= rows_of, "a sandbox is lost"
        self._checked_at_ms = now_ms
        self._known = {s: known for s, known in self._known.items() if s in rows_of}
        self.promised_ms.clear()  # from now on each end stays as it is until someone asks for another
        self.asked.clear()
        self.died.clear()
        self.crashed = self.resume_failed = False

    def _check_kept(self) -> None:
        """Builds and checkpoints never change, and hold what some guest once had."""
        store = self.node.parts.store
        kept = [(self._built, build.build_id, build.snapshot_id) for build in all_builds(store)]
        kept += [(self._kept, checkpoint.checkpoint_id, checkpoint.snapshot_id) for checkpoint in store.checkpoints.all()]
        for seen, name, snapshot_id in kept:
            content = self.node.snapshot_content(snapshot_id)
            assert seen.setdefault(name, content) == content, f"{name} has changed"
            assert content in self._states, f"{name} has content {content} that no guest ever had"

    def _check_row(self, row: Sandbox) -> None:
        known = self._known.get(row.sandbox_id)
        if known is not None:
            assert (row.on_timeout, row.access_token) == (known.policy, known.token), "policy or token changed"
        if row.state is State.KILLED:
            if known is None or known.state is not State.KILLED:
                self._check_ended(row, known)
        else:
            self._check_alive(row, known)
        content = {} if row.state is State.KILLED else self.node.content(row.sandbox_id)
        self._known[row.sandbox_id] = _Known(row.on_timeout, row.access_token, content, row.state, row.end_at_ms)

    def _check_alive(self, row: Sandbox, known: _Known | None) -> None:
        sandbox_id, asked = row.sandbox_id, self.asked[row.sandbox_id]
        assert known is None or known.state is not State.KILLED, f"{sandbox_id} lives again"
        assert row.metadata == {"policy": row.on_timeout}, f"{sandbox_id} has metadata {row.metadata}"
        content = self.node.content(sandbox_id)
        assert content in self._states, f"{sandbox_id} has content {content} that no guest ever had"
        if known is not None and "rollback" not in asked:
            assert content == known.content, f"{sandbox_id} lost writes: {content} instead of {known.content}"
        if known is not None and not asked & _MOVES_THE_END:
            assert row.end_at_ms == known.end_at_ms, f"the end of {sandbox_id} has moved, and nobody asked for it: {sorted(asked)}"
        if row.state is State.RUNNING and not asked & _MAY_SHORTEN:
            assert row.end_at_ms >= self.promised_ms.get(sandbox_id, 0), f"{sandbox_id} was promised more time"
        expired = row.end_at_ms <= self.node.clock.now_ms()
        if row.state is State.PAUSED:
            was_paused = known is not None and known.state is State.PAUSED
            by_policy = row.on_timeout == "pause" and (expired or "refresh" in asked)  # which may come after the pause
            cut_short = "rollback" in asked and self.crashed
            assert was_paused or "pause" in asked or by_policy or cut_short, f"{sandbox_id} was paused by nobody"
        elif expired:
            assert sandbox_id in self.node.parts.shared.expiry_retry_at_ms, f"{sandbox_id} outlived its timeout"

    def _check_ended(self, row: Sandbox, known: _Known | None) -> None:
        asked, died = self.asked[row.sandbox_id], row.sandbox_id in self.died
        reasons = {
            "killed by request": "kill" in asked,
            "its timeout was reached": row.on_timeout == "kill" and row.end_at_ms <= self.node.clock.now_ms(),
            "its VM ended by itself": died,
            "it could not be started": known is None,
            "it was not finished": known is None,
            "its VM was lost while it was captured": died or self.resume_failed,
            "its VM was lost while it was rolled back": died or self.resume_failed,
            "its VM or its disk was lost while the server was down": died,
            "the server stopped while it was being created": known is None and self.crashed,
        }
        allowed = [holds for reason, holds in reasons.items() if row.reason.startswith(reason)]
        assert allowed, f"{row.sandbox_id} ended for a reason nobody knows: {row.reason}"
        assert allowed[0], f"{row.sandbox_id} ended without cause: {row.reason}"
