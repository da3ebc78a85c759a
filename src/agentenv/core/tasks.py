"""Waiting for work: to its end whatever happens to the caller, or until what it needs is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def wait_done(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Return when `work` is done, however it ends. A cancellation of the caller meanwhile is returned: raise it when ready.

    No deadline: `work` must have its own.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def unless(
    ended: Coroutine[Any, Any, str], work: Coroutine[Any, Any, T], failure: Callable[[str], Exception], shows_within_s: float = 0.0
) -> T:
    """What `work` returns or raises, or, when `ended` comes first, the failure made of what that says. Both are cancelled in the end.

    Work that fails may have failed because of the end, and seen it first: then the end has `shows_within_s` to show.
    """
    end, working = asyncio.ensure_future(ended), asyncio.ensure_future(work)
    try:
        await asyncio.wait({end, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and shows_within_s and not working.cancelled() and working.exception() is not None:
            await asyncio.wait({end}, timeout=shows_within_s)
            if end.done():
                raise failure(end.result()) from working.exception()
        if not working.done():
            raise failure(end.result())
        return working.result()
    finally:
        for task in (end, working):
            task.cancel()
