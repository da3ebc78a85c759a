"""Where a request goes: sandbox targets, the contract with whoever knows the sandboxes, and the parsing of routing headers and host names.

Invariants:
- The proxy knows no lifecycle. It asks a `RouteTable` for every request and holds on to nothing but idle connections, which the
  route's `CloseSignal` ends.
- A request either names a sandbox completely or not at all; half a name is an error, never a guess.
- Authorisation belongs before any side effect: a table checks the traffic token (`guard.check_traffic_token`) before it resumes anything,
  and the proxy checks it again on every request, cached or not.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agentenv.proxy.heads import HeadError, RequestHead
from agentenv.proxy.signed_urls import SignedFile

log = logging.getLogger(__name__)

_LABEL = re.compile(r"([0-9]+)-([a-z0-9]+)(?:-[a-z0-9-]*)?")
_SANDBOX_ID = re.compile(rb"([a-z0-9]+)(?:-[a-z0-9-]*)?")
_ID_LENGTH_MAX = 64
_CONNECT_PATH = re.compile(rb"(/v2)?/sandboxes/[^/?]+/connect(\?.*)?")
ENVD_PORT = 49983


@dataclass(frozen=True, slots=True)
class SandboxTarget:
    """One port of one sandbox."""

    sandbox_id: str
    port: int


class RequestInfo:
    """What a route table may look at. Valid only during the call it was passed to."""

    __slots__ = ("_head", "client_host")

    def __init__(self, head: RequestHead, client_host: str) -> None:
        self._head = head
        self.client_host = client_host

    @property
    def method(self) -> str:
        """The method, as sent."""
        return self._head.method.decode("latin-1")

    @property
    def target(self) -> str:
        """Path and query, as sent."""
        return self._head.target.decode("latin-1")

    @property
    def host(self) -> str:
        """The host the client asked for, with its port if it sent one."""
        return self._head.host.decode("latin-1")

    def header(self, name: str) -> str | None:
        """The first value of a header, by name in any case."""
        value = self._head.get(name.lower().encode("latin-1"))
        return None if value is None else value.decode("latin-1")


class CloseSignal:
    """Tells every stream of a running sandbox that it is gone.

    Whoever owns the sandbox makes one per run (create or resume) and fires it on kill, pause or loss. Firing is final and
    synchronous: when `fire` returns, all client and upstream connections of the run have been aborted. Call it on the loop of the proxy.
    """

    __slots__ = ("_callbacks", "fired")

    def __init__(self) -> None:
        self.fired = False
        self._callbacks: set[Callable[[], None]] = set()

    def __len__(self) -> int:
        return len(self._callbacks)

    def __bool__(self) -> bool:
        return True  # __len__ must not make an unused signal look absent

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have `callback` run on `fire`; at once if that has already happened. Callbacks must not raise."""
        if self.fired:
            callback()
        else:
            self._callbacks.add(callback)

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        """Forget `callback`; no error if it is not there."""
        self._callbacks.discard(callback)

    def fire(self) -> None:
        """Close all streams. A second call does nothing."""
        self.fired = True
        while self._callbacks:
            callback = self._callbacks.pop()
            try:
                callback()
            except Exception:
                log.exception("closing a stream of an ended sandbox failed")  # the others must be closed all the same


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach a target now.

    `dial` returns a non-blocking stream socket, connected or connecting, and the proxy owns it from then on. It may raise OSError;
    ConnectionRefusedError means that the port is closed. `closed` is shared by all routes of one run of the sandbox.
    `mask_host` replaces Host, `${PORT}` in it standing for the port. `traffic_token` guards every port but envd's. `heard` is told of each
    answer that is complete; it must not raise. `through` leads to another proxy of this node, which routes and guards by itself.
    """

    dial: Callable[[], Awaitable[socket.socket]]
    closed: CloseSignal
    mask_host: str | None = None
    traffic_token: str | None = None
    heard: Callable[[], None] | None = None
    through: bool = False


class ProxyRefusal(Exception):
    """The request is answered by the proxy itself: `status`, a JSON `body` that has `code` and `message`, and extra headers.

    `retryable` false adds `Should-Retry: false`, without which clients repeat 429, 502, 503 and 504 (contract section 2.1).
    """

    def __init__(
        self, status: int, body: Mapping[str, object], *, retryable: bool = False, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        super().__init__(f"{status} {body.get('message', '')}")
        self.status = status
        self.body = dict(body)
        self.retryable = retryable
        self.headers = tuple(headers)


class RouteTable(Protocol):
    """Knows the sandboxes. Implemented above the proxy."""

    async def resolve(self, target: SandboxTarget, request: RequestInfo) -> Route:
        """Find the route, resuming the sandbox first if its policy says so.

        Raises ProxyRefusal (see `pages` for the contract's bodies) or an AgentEnvError. Cancelled when the client leaves and after
        `resolve_timeout_s`: work shared with other requests must be shielded.
        """


@runtime_checkable
class FastRouteTable(Protocol):
    """What a route table may offer besides `resolve`, to spare a task per request."""

    def resolve_now(self, target: SandboxTarget, request: RequestInfo) -> Route | None:
        """The route if it is known without waiting, else None. May raise what `resolve` raises."""


@runtime_checkable
class SignerTable(Protocol):
    """What a route table may offer besides `resolve`, for signed file URLs that name no sandbox."""

    def signer(self, file: SignedFile) -> str | None:
        """The id of the running sandbox whose token has made the signature, or None. Must take constant, bounded time."""


class TargetParser:
    """Tells sandbox requests from API requests, for a set of domains."""

    __slots__ = ("_suffixes",)

    def __init__(self, domains: Iterable[str]) -> None:
        names = (domain.strip().lower().strip(".") for domain in domains)
        self._suffixes = tuple("." + name.rsplit(":", 1)[0] if ":" in name else "." + name for name in names if name)

    def parse(self, head: RequestHead) -> SandboxTarget | None:
        """The sandbox a request names, None for the API. Raises HeadError (400) on half or malformed names."""
        if head.sandbox_id is not None or head.sandbox_port is not None:
            target = _from_headers(head.sandbox_id, head.sandbox_port)
            return None if _is_connect_call(head, target) else target
        return self._from_host(head.host) if self._suffixes else None

    def _from_host(self, host: bytes) -> SandboxTarget | None:
        name = host.decode("ascii", "replace").lower().rsplit(":", 1)[0].rstrip(".")
        for suffix in self._suffixes:
            if name.endswith(suffix):
                match = _LABEL.fullmatch(name[: -len(suffix)])
                if match is not None:
                    return _target(match[2], match[1])
        return None


def _is_connect_call(head: RequestHead, target: SandboxTarget) -> bool:
    """Older SDKs (e2b 2.20) name the guest agent's port even when they ask the API to connect; the agent has no such path."""
    return target.port == ENVD_PORT and head.method == b"POST" and _CONNECT_PATH.fullmatch(head.target) is not None


def _from_headers(sandbox_id: bytes | None, port: bytes | None) -> SandboxTarget:
    if sandbox_id is None:
        raise HeadError(400, "E2b-Sandbox-Port is set but E2b-Sandbox-Id is missing; send both")
    if port is None:
        raise HeadError(400, "E2b-Sandbox-Id is set but E2b-Sandbox-Port is missing; send both")
    match = _SANDBOX_ID.fullmatch(sandbox_id)
    if match is None:
        raise HeadError(400, "E2b-Sandbox-Id is not a sandbox id (lower-case letters and digits)")
    if not port.isdigit():
        raise HeadError(400, "E2b-Sandbox-Port is not a number")
    return _target(match[1].decode("ascii"), port.decode("ascii"))


def _target(sandbox_id: str, port: str) -> SandboxTarget:
    if len(sandbox_id) > _ID_LENGTH_MAX:
        raise HeadError(400, "The sandbox id is too long")
    if len(port) > 5 or not 1 <= int(port) <= 65535:
        raise HeadError(400, "The sandbox port is not between 1 and 65535")
    return SandboxTarget(sandbox_id, int(port))
