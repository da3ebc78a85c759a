"""The node's route table: from a sandbox's id to a socket inside its namespace, resuming it first when its policy says so.

Authorisation comes before any side effect: only a request that would be let through may wake a paused sandbox.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from agentenv.core.errors import NotFound
from agentenv.core.ids import same_secret
from agentenv.core.lifecycle import SERVING, State
from agentenv.core.model import Sandbox
from agentenv.host import netns
from agentenv.network.layout import GUEST_IP
from agentenv.orchestrator.service import Orchestrator
from agentenv.proxy import guard, pages
from agentenv.proxy.routes import ENVD_PORT, CloseSignal, RequestInfo, Route, SandboxTarget
from agentenv.proxy.signed_urls import SIGNED_CANDIDATES_MAX, SignedFile, signer_of

_MIN_WOKEN_S = 300  # contract section 2.4: an auto-resumed sandbox lives at least this long
_WAITED_FOR = (State.RESUMING, State.CREATING, State.ROLLING_BACK)  # about to run by somebody's request: those who may come in wait for it


class SandboxRoutes:
    """Routes into the sandboxes of one node."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._signals: dict[str, CloseSignal] = {}
        self._namespaces: dict[str, tuple[str, int]] = {}
        orchestrator.on_gone(self._gone)

    def resolve_now(self, target: SandboxTarget, request: RequestInfo) -> Route | None:
        """The route of a running sandbox; None when it must be waited for."""
        sandbox = self._sandbox(target)
        guard.check_traffic_token(target, request, sandbox.traffic_token)
        if sandbox.vm is None or sandbox.state not in SERVING:
            return None
        return self._route(sandbox, target)

    async def resolve(self, target: SandboxTarget, request: RequestInfo) -> Route:
        """The route, after resuming the sandbox if its policy and the request's credentials allow."""
        route = self.resolve_now(target, request)
        if route is not None:
            return route
        sandbox = self._sandbox(target)
        asleep = pages.sandbox_not_found(target.sandbox_id, "paused")
        if sandbox.state not in _WAITED_FOR and not sandbox.auto_resume:
            raise asleep
        if not _may_wake(sandbox, target, request):
            raise pages.state_changing(target.sandbox_id) if sandbox.state in _WAITED_FOR else asleep
        woken = await self._orchestrator.wake(sandbox.sandbox_id, max(sandbox.timeout_s, _MIN_WOKEN_S))
        if woken is None:
            raise asleep
        return self._route(woken, target)

    def signer(self, file: SignedFile) -> str | None:
        """The running sandbox whose token has made a signature."""
        candidates = [(s.sandbox_id, s.access_token) for s in self._orchestrator.peek_running() if s.access_token]
        return signer_of(file, candidates) if len(candidates) <= SIGNED_CANDIDATES_MAX else None

    def _sandbox(self, target: SandboxTarget) -> Sandbox:
        try:
            return self._orchestrator.peek(target.sandbox_id)
        except NotFound:
            state = "ended" if self._orchestrator.remembers(target.sandbox_id) else "unknown"
            raise pages.sandbox_not_found(target.sandbox_id, state) from None

    def _route(self, sandbox: Sandbox, target: SandboxTarget) -> Route:
        if sandbox.vm is None:
            raise pages.sandbox_not_found(target.sandbox_id)
        namespace = self._orchestrator.namespace(sandbox.vm.slot)

        async def dial() -> socket.socket:
            sock = netns.tcp_socket(namespace)
            try:
                await asyncio.get_running_loop().sock_connect(sock, (GUEST_IP, target.port))
            except BaseException:
                sock.close()
                raise
            return sock

        signal = self._signals.get(sandbox.sandbox_id)
        if signal is None:
            signal = self._signals[sandbox.sandbox_id] = CloseSignal()
            self._namespaces[sandbox.sandbox_id] = (namespace, netns.number(namespace))
        heard = partial(self._orchestrator.heard, sandbox.sandbox_id) if target.port == ENVD_PORT else None
        return Route(dial, signal, sandbox.network.mask_request_host, sandbox.traffic_token, heard)

    def close_vanished(self) -> None:
        """Close the streams of sandboxes whose namespace is gone: for a server that is no longer told of their ends."""
        for sandbox_id, (namespace, number) in list(self._namespaces.items()):
            if netns.number(namespace) != number:
                self._gone(sandbox_id)

    def _gone(self, sandbox_id: str) -> None:
        self._namespaces.pop(sandbox_id, None)
        signal = self._signals.pop(sandbox_id, None)
        if signal is not None:
            signal.fire()


def _may_wake(sandbox: Sandbox, target: SandboxTarget, request: RequestInfo) -> bool:
    """envd wakes for the holder of its token, if it has one; other ports were checked for the traffic token already."""
    if target.port != ENVD_PORT or not sandbox.access_token:
        return True
    sent = request.header("x-access-token")
    return sent is not None and same_secret(sent, sandbox.access_token)
