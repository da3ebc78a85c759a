"""One stack of undo steps for everything a verb acquires.

Invariants: steps run last in first out, each within its own deadline, and all of them even when some fail or the
surrounding task is cancelled. A step that has succeeded never runs again; one that failed may be tried again by
another `run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agentenv.core.errors import AgentEnvError
from agentenv.core.tasks import wait_done

_log = logging.getLogger(__name__)
STEP_DEADLINE_S = 30.0  # the slowest step is the kill of a VMM that sits in uninterruptible disk I/O
_Step = tuple[str, Callable[[], Awaitable[object]]]


class Cleanup:
    """`push` after each acquisition; `run` undoes all; `keep` hands everything over to the record and undoes nothing."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def push(self, name: str, step: Callable[[], Awaitable[object]]) -> None:
        """Add an undo step; `name` says in the log what could not be undone."""
        self._steps.append((name, step))

    def keep(self) -> None:
        """Forget all steps: what was acquired now belongs to someone else."""
        self._steps.clear()

    async def run(self) -> list[str]:
        """Undo everything. Returns the names of the steps that failed: each is logged, and stays for another `run`.

        A cancellation waits until all steps have had their turn: what they use must not be closed under them.
        """
        steps, self._steps = self._steps[::-1], []
        if not steps:
            return []
        work = asyncio.ensure_future(_run_all(steps))
        cancelled = await wait_done(work)
        failed = work.result()
        self._steps = failed[::-1] + self._steps
        if cancelled is not None:
            raise cancelled
        return [name for name, _ in failed]

    async def __aenter__(self) -> Cleanup:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.run()


async def _run_all(steps: list[_Step]) -> list[_Step]:
    failed = []
    for name, step in steps:
        try:
            async with asyncio.timeout(STEP_DEADLINE_S):
                await step()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - every step gets its turn; the failure is logged and returned
            _log.error("clean-up step failed: %s: %s", name, error, exc_info=not isinstance(error, AgentEnvError))
            failed.append((name, step))
    return failed
