"""The answers the proxy gives itself: refusals with the contract's exact bodies, as JSON or, for a person's browser, as a small page.

Invariants: the body's `code` equals the HTTP status; every 502 that trying again cannot mend says `Should-Retry: false`
(contract sections 1.6 and 2.1). Nothing of a request is echoed into a page unescaped.
"""

from __future__ import annotations

import html
import json
from http import HTTPStatus

from agentenv.core.errors import AgentEnvError, NotFound
from agentenv.proxy.heads import RequestHead
from agentenv.proxy.routes import ProxyRefusal, SandboxTarget

_RETRY_SOON = (("Retry-After", "1"),)
_NOT_OPEN = "The sandbox is running but port is not open"


def sandbox_not_found(sandbox_id: str, state: str | None = None) -> ProxyRefusal:
    """Unknown, killed, or paused without auto-resume (contract section 1.6). `state`, beyond the contract, says which for people."""
    body = {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502}
    return ProxyRefusal(502, body if state is None else {**body, "state": state})


def port_not_open(target: SandboxTarget) -> ProxyRefusal:
    """The sandbox runs, nothing listens on the port (contract section 1.6)."""
    body = {"sandboxId": target.sandbox_id, "message": _NOT_OPEN, "port": target.port, "code": 502}
    return ProxyRefusal(502, body)


def port_silent(target: SandboxTarget, waited_s: float) -> ProxyRefusal:
    """Nothing in the sandbox took the connection, or refused it. Clients look for the words of a closed port, so they are in it."""
    why = f"{_NOT_OPEN}: no answer within {waited_s:g} s; a firewall in it drops connections, or it gets no CPU"
    return ProxyRefusal(502, {"sandboxId": target.sandbox_id, "message": why, "port": target.port, "code": 502})


def token_missing(sandbox_id: str) -> ProxyRefusal:
    """The sandbox asks for a traffic token and none came (contract section 1.6)."""
    message = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
    return ProxyRefusal(403, {"sandboxId": sandbox_id, "message": message, "code": 403})


def token_invalid(sandbox_id: str) -> ProxyRefusal:
    """The traffic token is not the sandbox's (contract section 1.6)."""
    message = "Provided token in header 'e2b-traffic-access-token' is invalid"
    return ProxyRefusal(403, {"sandboxId": sandbox_id, "message": message, "code": 403})


def resume_refused(sandbox_id: str, message: str) -> ProxyRefusal:
    """The paused sandbox may not be resumed by this request."""
    return ProxyRefusal(403, {"sandboxId": sandbox_id, "message": message, "code": 403})


def state_changing(sandbox_id: str, message: str = "The sandbox is changing its state; try again") -> ProxyRefusal:
    """A pause, resume or snapshot is under way."""
    return ProxyRefusal(409, {"sandboxId": sandbox_id, "message": message, "code": 409}, retryable=True, headers=_RETRY_SOON)


def too_many_connections(sandbox_id: str, limit: int) -> ProxyRefusal:
    """The sandbox has as many connections as it may (contract section 1.6)."""
    body = {"sandboxId": sandbox_id, "message": "The sandbox has too many open connections", "connectionLimit": limit, "code": 429}
    return ProxyRefusal(429, body, retryable=True, headers=_RETRY_SOON)


def internal_path(path: str) -> ProxyRefusal:
    """A path of envd that only the host may call (contract section 1.6)."""
    return ProxyRefusal(404, {"message": "The path is internal to the host and cannot be reached from outside", "path": path, "code": 404})


def upstream_failed(sandbox_id: str | None, why: str) -> ProxyRefusal:
    """The server behind us broke off or answered nonsense; the request may have had its effect, so clients must not repeat it unasked."""
    subject = "The API" if sandbox_id is None else "The server in the sandbox"
    body: dict[str, object] = {} if sandbox_id is None else {"sandboxId": sandbox_id}
    return ProxyRefusal(502, {**body, "message": f"{subject} {why}", "code": 502})


def api_down() -> ProxyRefusal:
    """The API's socket is missing or refuses."""
    return ProxyRefusal(503, {"code": 503, "message": "The API is starting or down"}, retryable=True, headers=_RETRY_SOON)


def plain(status: int, message: str, *, retryable: bool = False) -> ProxyRefusal:
    """An error that concerns no sandbox."""
    return ProxyRefusal(status, {"code": status, "message": message}, retryable=retryable)


def from_error(error: AgentEnvError, sandbox_id: str) -> ProxyRefusal:
    """What an error of the route table looks like on the data plane: a missing sandbox is 502, all else keeps its status."""
    if isinstance(error, NotFound):
        return sandbox_not_found(sandbox_id)
    return ProxyRefusal(error.status, {"sandboxId": sandbox_id, "message": str(error), "code": error.status}, retryable=error.retryable)


def wants_html(head: RequestHead | None) -> bool:
    """Whether a person looks at the answer: a browser that opens a page, and not a script in it (contract section 1.6)."""
    if head is None or head.get(b"sec-fetch-mode") not in (None, b"navigate"):
        return False
    accept = (head.get(b"accept") or b"").lower()
    return b"text/html" in accept and b"application/json" not in accept and b"mozilla" in (head.get(b"user-agent") or b"").lower()


def content(refusal: ProxyRefusal, head: RequestHead | None) -> tuple[list[tuple[str, str]], bytes]:
    """Header fields and body of the response, whatever its framing. `head` is the request, None if it could not be parsed."""
    if wants_html(head):
        content_type, body = "text/html; charset=utf-8", _page(refusal).encode()
    else:
        content_type, body = "application/json", json.dumps(refusal.body, separators=(",", ":"), ensure_ascii=False).encode()
    fields = [("Content-Type", content_type), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")]
    if not refusal.retryable:
        fields.append(("Should-Retry", "false"))
    if refusal.status == 405:
        fields.append(("Allow", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"))
    fields += refusal.headers
    return fields, b"" if head is not None and head.method == b"HEAD" else body


def render(refusal: ProxyRefusal, head: RequestHead | None, close: bool) -> bytes:
    """The whole response in HTTP/1.1."""
    try:
        reason = HTTPStatus(refusal.status).phrase
    except ValueError:
        reason = "Error"
    fields, body = content(refusal, head)
    if close:
        fields.append(("Connection", "close"))
    elif head is not None and head.minor_version == 0:
        fields.append(("Connection", "keep-alive"))
    lines = [f"HTTP/1.1 {refusal.status} {reason}", *(f"{name}: {value}" for name, value in fields)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _page(refusal: ProxyRefusal) -> str:
    message = html.escape(str(refusal.body.get("message", "")))
    rows = "".join(
        f"<p><small>{html.escape(key)}: {html.escape(str(refusal.body[key]))}</small></p>"
        for key in ("sandboxId", "port")
        if key in refusal.body
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{refusal.status}</title></head>'
        f'<body style="font-family:sans-serif;margin:4em"><h1>{refusal.status}</h1><p>{message}</p>{rows}</body></html>'
    )
