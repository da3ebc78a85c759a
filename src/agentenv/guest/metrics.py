"""Reading `/metrics` of one guest's envd (contract section 3.2), again and again over one connection.

What the guest says is not trusted: head and body have limits, an answer has a deadline, figures are checked, and after
anything unexpected the connection is closed, so that a late answer is never taken for the next one. Only the form that
envd has is understood: HTTP/1.1, status 200, a Content-Length. Times are the host's.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from agentenv.core.clock import Clock
from agentenv.core.errors import DeadlineExceeded, Internal
from agentenv.core.model import MetricSample

HEAD_MAX_BYTES = 8 << 10  # envd's is about 150
BODY_MAX_BYTES = 4 << 10  # envd's is about 250
_FIGURE_MAX = 2**63 - 1
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,6})[ \t]*(?=\r\n)", re.IGNORECASE)

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class MetricsReader:
    """The metrics of one life of a guest. One `read` at a time; `close` it in the end.

    A kept connection costs a guest one wake-up for a reading, and none in between; a new one each time would cost three.
    """

    def __init__(self, connect: Connect, access_token: str, clock: Clock) -> None:
        self._connect = connect
        self._clock = clock
        self._request = f"GET /metrics HTTP/1.1\r\nHost: envd\r\nX-Access-Token: {access_token}\r\n\r\n".encode("ascii")
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def read(self, deadline_s: float) -> MetricSample:
        """The figures of now. DeadlineExceeded; Internal: unreachable, refused, or an answer that is none of envd's.

        After a failure or a cancellation the next call uses a new connection.
        """
        try:
            async with asyncio.timeout(deadline_s):
                body = await self._ask()
                return parse_figures(body, self._clock.now_ms())
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the guest's metrics did not come within {deadline_s:g} s") from error
            if isinstance(error, asyncio.IncompleteReadError):
                raise Internal("the guest closed the connection instead of giving its metrics") from error
            if isinstance(error, asyncio.LimitOverrunError):
                raise Internal(f"the guest's metrics came with a head of more than {HEAD_MAX_BYTES} bytes") from error
            if isinstance(error, OSError):
                raise Internal(f"the guest cannot be asked for its metrics: {error}") from error
            raise

    def close(self) -> None:
        """Drop the connection. Idempotent; does not wait."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _ask(self) -> bytes:
        if self._streams is not None and self._streams[0].at_eof():
            self.close()  # the guest closed it between two readings
        if self._streams is None:
            self._streams = await self._connect()
        reader, writer = self._streams
        writer.write(self._request)
        await writer.drain()
        return await reader.readexactly(parse_head(await reader.readuntil(b"\r\n\r\n")))


def parse_head(head: bytes) -> int:
    """The size of the body that follows, in bytes. Internal when it is no head of a good answer."""
    if len(head) > HEAD_MAX_BYTES:
        raise Internal(f"the guest's metrics came with a head of more than {HEAD_MAX_BYTES} bytes")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise Internal(f"the guest answered /metrics with {head[:32]!r}")
    lengths = _LENGTH.findall(head)
    if len(lengths) != 1 or int(lengths[0]) > BODY_MAX_BYTES:
        raise Internal(f"the guest's metrics do not say a size of at most {BODY_MAX_BYTES} bytes")
    return int(lengths[0])


def parse_figures(body: bytes, timestamp_ms: int) -> MetricSample:
    """The sample in envd's JSON; its own clock is left aside. Internal when a figure is missing or impossible."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Internal("the guest's metrics are not valid JSON") from error
    if not isinstance(values, dict):
        raise Internal("the guest's metrics are not a JSON object")
    return MetricSample(
        timestamp_ms=timestamp_ms,
        cpu_count=int(_figure(values, "cpu_count", 65535)),
        cpu_used_percent=round(_figure(values, "cpu_used_pct", 100), 2),
        memory_used_bytes=int(_figure(values, "mem_used")),
        memory_total_bytes=int(_figure(values, "mem_total")),
        memory_cache_bytes=int(_figure(values, "mem_cache")),
        disk_used_bytes=int(_figure(values, "disk_used")),
        disk_total_bytes=int(_figure(values, "disk_total")),
    )


def _figure(values: dict[str, Any], name: str, most: int = _FIGURE_MAX) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:  # NaN is in no range
        raise Internal(f"the guest's metrics have no possible figure {name}")
    return value
