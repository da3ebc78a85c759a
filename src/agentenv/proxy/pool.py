"""Idle upstream connections, kept for the next request to the same place.

Invariants: a connection is either in the pool or in one exchange, never both; one that has received anything while idle, or whose peer
has closed, is never handed out; counts and idle time are bounded by the settings.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from agentenv.proxy.limits import ProxySettings

if TYPE_CHECKING:
    from agentenv.proxy.upstream import UpstreamConnection

API_KEY = "api"


class UpstreamPool:
    """Last in, first out, per upstream."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._idle: dict[Hashable, list[UpstreamConnection]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def take(self, key: Hashable) -> UpstreamConnection | None:
        """A live connection, which the caller owns, or None."""
        idle = self._idle.get(key)
        while idle:
            connection = idle.pop()
            self._count -= 1
            if not idle:
                del self._idle[key]
            if connection.is_fresh():
                return connection
            connection.abort()
        return None

    def put(self, connection: UpstreamConnection, now: float) -> None:
        """Keep a connection whose exchange has ended tidily, or close it if there is no room."""
        limit = self._settings.pool_idle_api if connection.key == API_KEY else self._settings.pool_idle_per_upstream
        idle = self._idle.get(connection.key)
        if self._count >= self._settings.pool_idle_total or (idle is not None and len(idle) >= limit):
            connection.abort()
            return
        connection.idle_since = now
        if idle is None:
            self._idle[connection.key] = [connection]
        else:
            idle.append(connection)
        self._count += 1

    def discard(self, connection: UpstreamConnection) -> None:
        """Forget a connection that has died."""
        idle = self._idle.get(connection.key)
        if idle is not None and connection in idle:
            idle.remove(connection)
            self._count -= 1
            if not idle:
                del self._idle[connection.key]

    def expire(self, now: float) -> None:
        """Close what has been idle for too long."""
        limit = now - self._settings.pool_idle_s
        for connection in [c for idle in self._idle.values() for c in idle if c.idle_since < limit]:
            self.discard(connection)
            connection.abort()

    def close(self) -> None:
        """Close everything."""
        self.expire(float("inf"))
