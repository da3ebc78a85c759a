"""What outsiders may not reach: the host-internal paths of envd, and ports guarded by a traffic token.

Invariants: a path is judged by what any server could make of it (decoded until nothing changes, dots and doubled slashes resolved,
case ignored), so no spelling of an internal path passes. Tokens are compared in constant time.
"""

from __future__ import annotations

import hmac
import re
from urllib.parse import unquote_to_bytes

from agentenv.proxy import pages
from agentenv.proxy.routes import ENVD_PORT, RequestInfo, SandboxTarget

_UNREADABLE = b"%"
_INTERNAL = frozenset((_UNREADABLE, b"init", b"freeze", b"unfreeze", b"collapse", b"fsfreeze", b"fsthaw", b"upgrade", b"provision"))
_PLAIN = re.compile(rb"/[A-Za-z0-9_.\-]*[A-Za-z0-9_\-](?:/[A-Za-z0-9_\-][A-Za-z0-9_.\-]*)*")
_DECODE_ROUNDS_MAX = 8


class EnvdPathGuard:
    """Refuses the host-internal paths of envd (contract section 1.6)."""

    __slots__ = ()

    def check(self, target: SandboxTarget, request_target: bytes) -> None:
        """Raise ProxyRefusal (404) if the request would reach an internal path of envd."""
        if target.port != ENVD_PORT:
            return
        path = request_target.partition(b"?")[0]
        if first_segment(path) in _INTERNAL:
            raise pages.internal_path(path.decode("latin-1"))


def first_segment(path: bytes) -> bytes:
    """The first segment of the path that any server could see, in lower case; `%` if it is escaped too often to tell."""
    if _PLAIN.fullmatch(path) is not None and not path.startswith(b"/."):
        return path[1:].partition(b"/")[0].lower()
    for _ in range(_DECODE_ROUNDS_MAX):
        decoded = unquote_to_bytes(path)
        if decoded == path:
            break
        path = decoded
    else:
        return _UNREADABLE
    path = re.split(rb"[?#\x00]", path, maxsplit=1)[0].replace(b"\\", b"/")
    segments: list[bytes] = []
    for part in path.split(b"/"):
        segment = part.partition(b";")[0].strip()
        if segment == b"..":
            del segments[-1:]
        elif segment not in (b"", b"."):
            segments.append(segment)
    return segments[0].lower() if segments else b""


def check_traffic_token(target: SandboxTarget, request: RequestInfo, token: str | None) -> None:
    """Raise ProxyRefusal (403) unless the request may use the port. Envd has its own token (contract section 1.6)."""
    if token is None or target.port == ENVD_PORT:
        return
    sent = request.header("e2b-traffic-access-token")
    if not sent:
        raise pages.token_missing(target.sandbox_id)
    if not hmac.compare_digest(sent.encode("latin-1"), token.encode()):
        raise pages.token_invalid(target.sandbox_id)
