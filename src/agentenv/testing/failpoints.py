"""Named points at which a fake can be told to fail, to be slow, or to belong to a server that was killed.

Invariants: a point named `x` comes before the effect, `x:done` after it (the effect happened, its answer is lost). What was
passed is kept in order, so that "fail at step k, for every k" is a loop. With a seed, every point lets other tasks run a
random number of times: the same seed gives the same interleaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from agentenv.core.errors import Internal

_TURNS_MAX = 4
_SLOW_SHARE = 0.08
_SLOW_TURNS_MAX = 120  # longer than most verbs take: a slow step is overtaken by whole other verbs


class ServerKilled(BaseException):
    """Raised in tasks of a killed server when their loop is closed; no product code handles it."""


@dataclass
class _Failure:
    pattern: str
    countdown: int
    error: BaseException | None


class Failpoints:
    """The points of one server's adapters. `passed` lists what was reached, in order."""

    def __init__(self, seed: int | None = None) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []
        self._random = None if seed is None else random.Random(seed)
        self._failures: list[_Failure] = []
        self._holds: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}  # reached, released
        self._killed = False
        self._buried = False

    # -- steering, for tests

    def fail(self, pattern: str = "*", at: int = 1, error: BaseException | None = None) -> None:
        """The `at`-th passage (from now, from 1) of a point matching `pattern` raises `error` (default: Internal), once."""
        self._failures.append(_Failure(pattern, at, error))

    def clear(self) -> None:
        """No more failures."""
        self._failures.clear()

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[asyncio.Event]:
        """Whoever reaches `name` waits until the block ends. Gives an event that is set when someone has reached it."""
        reached, released = self._holds[name] = (asyncio.Event(), asyncio.Event())
        try:
            yield reached
        finally:
            released.set()
            del self._holds[name]

    def kill(self) -> None:
        """The server is dead: none of its tasks gets past a point any more."""
        self._killed = True

    def bury(self) -> None:
        """Let the tasks of a killed server end, when their loop is closed."""
        self._buried = True

    # -- for fakes

    @property
    def is_killed(self) -> bool:
        """Whether the server is dead and its loop not closed yet: nothing of it may have an effect any more."""
        return self._killed and not self._buried

    async def hit(self, name: str, *, can_fail: bool = True) -> None:
        """Pass the point `name`. With `can_fail` False it can be slow only, and is not a step of `passed`."""
        await self._stop_if_killed()
        if can_fail:
            self.passed.append(name)
        if self._random is not None:
            is_slow = self._random.random() < _SLOW_SHARE
            for _ in range(self._random.randrange(_SLOW_TURNS_MAX if is_slow else _TURNS_MAX)):
                await asyncio.sleep(0)
        if name in self._holds:
            reached, released = self._holds[name]
            reached.set()
            await released.wait()
        await self._stop_if_killed()
        for failure in self._failures if can_fail else ():
            if not fnmatch.fnmatchcase(name, failure.pattern):
                continue
            failure.countdown -= 1
            if failure.countdown == 0:
                self._failures.remove(failure)
                self.failed.append(name)
                raise failure.error or Internal(f"injected failure at {name}")

    async def _stop_if_killed(self) -> None:
        if self._buried:
            raise ServerKilled
        if self._killed:
            await asyncio.get_running_loop().create_future()


class InlineExecutor(ThreadPoolExecutor):
    """Runs work at once in the calling thread, so that a test has one order of events only."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn` now; the future is done when this returns."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the future carries it to whoever waits
            future.set_exception(error)
        return future
