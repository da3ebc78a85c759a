"""From a request to an upstream connection: resolve the route, admit the request, take a kept connection or dial.

Invariants: a request is admitted (run not ended, traffic token right, connections below the limit) on every path, cached or not, before a
byte of it reaches the sandbox. Every failure is a `ProxyRefusal` with the contract's body.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from functools import partial

from agentenv.core.errors import AgentEnvError
from agentenv.proxy import pages
from agentenv.proxy.guard import check_traffic_token
from agentenv.proxy.limits import API_DIAL_DELAYS_MS, DIAL_DELAYS_MS, ProxySettings
from agentenv.proxy.pool import API_KEY, UpstreamPool
from agentenv.proxy.routes import FastRouteTable, ProxyRefusal, RequestInfo, Route, RouteTable, SandboxTarget
from agentenv.proxy.upstream import UpstreamConnection, is_unreachable, open_upstream

log = logging.getLogger(__name__)


class Dispatcher:
    """See the module. A target of None means the API."""

    def __init__(self, table: RouteTable, api_route: Route, pool: UpstreamPool, settings: ProxySettings) -> None:
        self._table = table
        self._fast = table if isinstance(table, FastRouteTable) else None
        self._api_route = api_route
        self._pool = pool
        self._settings = settings
        self.successor: Route | None = None
        """Once set, every new request goes there: to another proxy of this node."""

    def route_now(self, target: SandboxTarget | None, info: RequestInfo) -> Route | None:
        """The route, admitted, if it is known without waiting. Raises ProxyRefusal."""
        if self.successor is not None:
            return self.successor
        if target is None:
            return self._api_route
        if self._fast is None:
            return None
        try:
            route = self._fast.resolve_now(target, info)
        except AgentEnvError as error:
            raise pages.from_error(error, target.sandbox_id) from error
        if route is not None:
            self._admit(route, target, info)
        return route

    async def route_later(self, target: SandboxTarget, info: RequestInfo) -> Route:
        """The route, admitted, however long that takes within its deadline. Raises ProxyRefusal."""
        try:
            async with asyncio.timeout(self._settings.resolve_timeout_s):
                route = await self._table.resolve(target, info)
        except TimeoutError as error:
            raise pages.plain(504, "Finding or resuming the sandbox took too long") from error
        except AgentEnvError as error:
            if self.successor is not None:
                return self.successor  # the table has been closed meanwhile
            raise pages.from_error(error, target.sandbox_id) from error
        self._admit(route, target, info)
        return route

    def _admit(self, route: Route, target: SandboxTarget, info: RequestInfo) -> None:
        if route.closed.fired:
            raise pages.sandbox_not_found(target.sandbox_id)
        check_traffic_token(target, info, route.traffic_token)

    def take_kept(self, target: SandboxTarget | None, route: Route, kind: type[UpstreamConnection]) -> UpstreamConnection | None:
        """A kept connection of that kind to the route, marked as such, or None."""
        kept = self._pool.take(_key(target, route, kind))
        if kept is not None:
            kept.reused = True
        return kept

    async def dial(
        self, target: SandboxTarget | None, route: Route, on_closed: Callable[[], None], kind: type[UpstreamConnection]
    ) -> UpstreamConnection:
        """A new connection, owned by the caller. `on_closed` runs if the sandbox's run ends meanwhile. Raises ProxyRefusal."""
        limit = self._settings.connections_per_sandbox
        guest = target if not route.through else None
        if guest is not None and len(route.closed) >= limit:
            raise pages.too_many_connections(guest.sandbox_id, limit)
        route.closed.subscribe(on_closed)
        try:
            delays = API_DIAL_DELAYS_MS if guest is None else DIAL_DELAYS_MS
            make = partial(kind, _key(target, route, kind), route, self._pool)
            return await open_upstream(make, route, delays, self._settings.dial_timeout_s)
        except OSError as error:
            if guest is None:
                raise pages.api_down() from error
            if isinstance(error, TimeoutError):
                raise pages.port_silent(guest, self._settings.dial_timeout_s) from error
            if not is_unreachable(error):
                log.warning("dialling port %d of sandbox %s failed: %s", guest.port, guest.sandbox_id, error)
            raise pages.port_not_open(guest) from error
        finally:
            route.closed.unsubscribe(on_closed)


def refusal_for(error: Exception) -> ProxyRefusal:
    """What the client is told when routing fails; a fault in the route table must not leave it hanging."""
    if isinstance(error, ProxyRefusal):
        return error
    log.error("routing a request failed", exc_info=error)
    return pages.plain(500, "The proxy could not route the request; see the server log")


def _key(target: SandboxTarget | None, route: Route, kind: type[UpstreamConnection]) -> Hashable:
    if target is None and not route.through:
        return API_KEY
    return route.closed, 0 if target is None else target.port, kind
