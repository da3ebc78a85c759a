"""Sample: read every running guest's metrics every few seconds and keep them in memory (contract section 2.3).

One task follows each life of a VM over one connection, so a guest that is slow, deaf or hostile delays nobody but itself.
Invariants: no verb ever waits for a reading; none is begun while a verb holds the sandbox; when its VM stops, the follower
ends with its connection at that moment. What cannot be read is a gap in the history, never an error of anybody's.
"""

from __future__ import annotations

import asyncio
import logging

from agentenv.core.errors import AgentEnvError
from agentenv.core.lifecycle import State
from agentenv.core.model import MetricSample
from agentenv.guest.metrics import MetricsReader
from agentenv.orchestrator.metric_history import MetricHistory
from agentenv.orchestrator.parts import Parts

_log = logging.getLogger(__name__)
_LOOK_MS = 1_000  # how soon a new sandbox is noticed, and one that a verb holds is tried again
SETTLE_MS = 4_000  # a guest's first seconds belong to its first command: an emulated CPU translates what a reading needs, too
INTERVAL_MS = 5_000  # the contract's
_LONGEST_INTERVAL_MS = 60_000  # between tries of a guest that does not answer: it may be hung for hours
_DEADLINE_S = 4.0  # patience with an emulated guest on a busy host; less than the interval
_READINGS_AT_ONCE = 16  # so that hundreds of emulated guests do not all wake in the same instant
_RETRIES_AT_ONCE = 4  # a lane of their own for guests that failed last time: they wait out the deadline more often than not


async def run(parts: Parts) -> None:
    """Follow every running sandbox until cancelled."""
    async with asyncio.TaskGroup() as group:
        followers = _Followers(parts, group)
        parts.shared.gone_listeners.append(followers.leave)
        try:
            while True:
                followers.look()
                await parts.clock.sleep_ms(_LOOK_MS)
        finally:
            parts.shared.gone_listeners.remove(followers.leave)


class _Followers:
    """The tasks that follow sandboxes, one each."""

    def __init__(self, parts: Parts, group: asyncio.TaskGroup) -> None:
        self._parts, self._group = parts, group
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._first_tries = asyncio.Semaphore(_READINGS_AT_ONCE)
        self._retries = asyncio.Semaphore(_RETRIES_AT_ONCE)

    def look(self) -> None:
        """Follow those that run and are not followed yet."""
        for sandbox in self._parts.store.sandboxes():
            if sandbox.state is State.RUNNING and sandbox.vm is not None and sandbox.sandbox_id not in self._tasks:
                sandbox_id = sandbox.sandbox_id
                namespace = self._parts.slots.slot(sandbox.vm.slot).namespace
                reader = self._parts.guest.metrics_reader(namespace, sandbox.access_token)
                task = self._group.create_task(self._follow(sandbox_id, sandbox.vm.run_id, reader), name=f"sample {sandbox_id}")
                self._tasks[sandbox_id] = task

    def leave(self, sandbox_id: str) -> None:
        """Stop following one, whose VM stops now. If it runs on after all, the next look finds it again."""
        task = self._tasks.pop(sandbox_id, None)
        if task is not None:
            task.cancel()

    async def _follow(self, sandbox_id: str, run_id: str, reader: MetricsReader) -> None:
        """Read until this life of its VM is over."""
        failures = 0
        try:
            await self._parts.clock.sleep_ms(SETTLE_MS)
            while self._lives(sandbox_id, run_id):
                wait_ms: float = _LOOK_MS
                async with self._retries if failures else self._first_tries:
                    began_ms = self._parts.clock.monotonic_ms()  # those who queued do not meet again in the next round
                    if self._may_read(sandbox_id, run_id):
                        failures = 0 if await self._read(sandbox_id, reader, failures) else failures + 1
                        wait_ms = interval_ms(failures) - (self._parts.clock.monotonic_ms() - began_ms)
                await self._parts.clock.sleep_ms(wait_ms)
        finally:
            reader.close()
            if self._tasks.get(sandbox_id) is asyncio.current_task():
                del self._tasks[sandbox_id]

    def _lives(self, sandbox_id: str, run_id: str) -> bool:
        sandbox = self._parts.store.sandbox(sandbox_id)
        return sandbox is not None and sandbox.vm is not None and sandbox.vm.run_id == run_id

    def _may_read(self, sandbox_id: str, run_id: str) -> bool:
        """Not while a verb holds it: it may stand still, or have better things to do."""
        sandbox = self._parts.store.sandbox(sandbox_id)
        running = sandbox is not None and sandbox.state is State.RUNNING
        return running and self._lives(sandbox_id, run_id) and not self._parts.shared.is_locked(sandbox_id)

    async def _read(self, sandbox_id: str, reader: MetricsReader, failures: int) -> bool:
        """One reading, into the history; whether it worked."""
        try:
            sample = await reader.read(_DEADLINE_S)
        except AgentEnvError as error:
            if not failures:
                _log.info("%s: no metrics for now: %s", sandbox_id, error)
            return False
        except Exception:  # noqa: BLE001 - a fault met with one guest must not end the metrics of all others
            _log.exception("%s: reading its metrics failed", sandbox_id)
            return False
        self._keep(sandbox_id, sample)
        return True

    def _keep(self, sandbox_id: str, sample: MetricSample) -> None:
        histories = self._parts.shared.metrics
        if sandbox_id in histories:
            histories[sandbox_id].add(sample)
        else:
            histories[sandbox_id] = MetricHistory(sample)


def interval_ms(failures: int) -> int:
    """The time from one reading to the next after that many failures in a row."""
    return min(_LONGEST_INTERVAL_MS, INTERVAL_MS << max(0, min(failures, 10) - 1))
