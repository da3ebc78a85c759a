"""Waiting for work that must reach its end before its caller may go on, even a cancelled caller."""

from __future__ import annotations

import asyncio
from typing import Any


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
