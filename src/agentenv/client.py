"""What AgentENV offers beyond E2B, on E2B's own clients: checkpoints, rollback in place, and many sandboxes in one call.

    from agentenv.client import Sandbox

    sandbox = Sandbox.create()
    with sandbox.checkpoint() as checkpoint:
        sandbox.commands.run("rm -rf /")
        checkpoint.rollback()  # memory, processes and disk as they were; same id, address and tokens

`Sandbox` and `AsyncSandbox` are the classes of the `e2b` package with a few more methods. Errors are E2B's own exceptions.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote

import e2b
import httpx
from e2b.connection_config import ConnectionConfig

_DEADLINE_S = 300.0  # a capture writes all that a guest has changed
_NOT_FOUND = 404
Owner = TypeVar("Owner")


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as the node lists it. `parent_id` is the one it descends from; `current`: the sandbox's state descends from it."""

    checkpoint_id: str
    name: str | None
    parent_id: str | None
    memory: bool
    current: bool
    created_at: str


class _Handle(Generic[Owner]):
    """A checkpoint together with its sandbox."""

    def __init__(self, sandbox: Owner, info: CheckpointInfo) -> None:
        self._sandbox = sandbox
        self.info = info

    @property
    def id(self) -> str:
        """Names it in every call."""
        return self.info.checkpoint_id


class Checkpoint(_Handle["Sandbox"]):
    """An instant to go back to. As a context manager it is deleted in the end."""

    def rollback(self) -> None:
        """Make the sandbox what it was. As often as wanted."""
        self._sandbox.rollback(self.id)

    def delete(self) -> None:
        """Forget it. No error when it is gone already."""
        self._sandbox.delete_checkpoint(self.id)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.delete()


class Sandbox(e2b.Sandbox):
    """E2B's sandbox, which can also go back to what it was."""

    def checkpoint(self, name: str | None = None, memory: bool = True) -> Checkpoint:
        """Keep this instant; the sandbox goes on. Without `memory` it is the disk alone, and a rollback boots it."""
        return Checkpoint(self, _info(self._ask("POST", "/checkpoints", _body(name, memory))))

    def checkpoints(self) -> list[CheckpointInfo]:
        """All it has, oldest first."""
        return [_info(item) for item in self._ask("GET", "/checkpoints")]

    def rollback(self, checkpoint: str | None = None) -> None:
        """Become again what it was at a checkpoint, by id or name; by default the newest that its state descends from."""
        self._ask("POST", "/rollback", {} if checkpoint is None else {"checkpointID": checkpoint})

    def delete_checkpoint(self, checkpoint: str) -> None:
        """Forget one, by id or name. No error when it is gone already."""
        self._ask("DELETE", f"/checkpoints/{quote(checkpoint, safe='')}", or_gone=True)

    @classmethod
    def create_many(
        cls, count: int, template: str = "base", timeout: int = 300, body: dict[str, Any] | None = None, **opts: Any
    ) -> list[Sandbox | e2b.SandboxException]:
        """Start `count` sandboxes in one call, in order; one that could not start is an exception in its place.

        `body` holds further fields of the API's creation, `opts` are the connection options of `Sandbox.create`.
        """
        wanted = {"templateID": template, "timeout": timeout, "count": count, **(body or {})}
        config = ConnectionConfig(**opts)
        with httpx.Client(timeout=_DEADLINE_S, verify=_trusted()) as client:
            outcomes = _result(client.post(f"{config.api_url}/v2/sandboxes", json=wanted, headers=_headers(config)))
        return cls._connected(outcomes, timeout, opts)

    def fork_many(self, count: int, timeout: int = 300) -> list[Sandbox | e2b.SandboxException]:
        """As `fork`, for more children than E2B's client asks for: 100 at most. They are captured once and start side by side."""
        outcomes = self._ask("POST", "/fork", {"count": count, "timeout": timeout})
        return self._connected(outcomes, timeout, dict(self.connection_config.get_api_params()))

    @classmethod
    def _connected(cls, outcomes: list[dict[str, Any]], timeout: int, opts: dict[str, Any]) -> list[Sandbox | e2b.SandboxException]:
        return [
            cast(Sandbox, cls.connect(outcome["sandbox"]["sandboxID"], timeout=timeout, **opts))
            if "sandbox" in outcome
            else _error(outcome)
            for outcome in outcomes
        ]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, or_gone: bool = False) -> Any:
        config = self.connection_config
        with httpx.Client(timeout=_DEADLINE_S, verify=_trusted()) as client:
            reply = client.request(method, _url(config, self.sandbox_id, path), json=body, headers=_headers(config))
        return _result(reply, or_gone)


class AsyncCheckpoint(_Handle["AsyncSandbox"]):
    """An instant to go back to. As a context manager it is deleted in the end."""

    async def rollback(self) -> None:
        """Make the sandbox what it was. As often as wanted."""
        await self._sandbox.rollback(self.id)

    async def delete(self) -> None:
        """Forget it. No error when it is gone already."""
        await self._sandbox.delete_checkpoint(self.id)

    async def __aenter__(self) -> AsyncCheckpoint:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.delete()


class AsyncSandbox(e2b.AsyncSandbox):
    """The same for asyncio."""

    async def checkpoint(self, name: str | None = None, memory: bool = True) -> AsyncCheckpoint:
        """Keep this instant; the sandbox goes on. Without `memory` it is the disk alone, and a rollback boots it."""
        return AsyncCheckpoint(self, _info(await self._ask("POST", "/checkpoints", _body(name, memory))))

    async def checkpoints(self) -> list[CheckpointInfo]:
        """All it has, oldest first."""
        return [_info(item) for item in await self._ask("GET", "/checkpoints")]

    async def rollback(self, checkpoint: str | None = None) -> None:
        """Become again what it was at a checkpoint, by id or name; by default the newest that its state descends from."""
        await self._ask("POST", "/rollback", {} if checkpoint is None else {"checkpointID": checkpoint})

    async def delete_checkpoint(self, checkpoint: str) -> None:
        """Forget one, by id or name. No error when it is gone already."""
        await self._ask("DELETE", f"/checkpoints/{quote(checkpoint, safe='')}", or_gone=True)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, or_gone: bool = False) -> Any:
        config = self.connection_config
        async with httpx.AsyncClient(timeout=_DEADLINE_S, verify=_trusted()) as client:
            reply = await client.request(method, _url(config, self.sandbox_id, path), json=body, headers=_headers(config))
        return _result(reply, or_gone)


@cache
def _trusted() -> ssl.SSLContext:
    """Made once: reading the machine's certificates takes some tens of milliseconds, more than the calls themselves."""
    return httpx.create_ssl_context()


def _url(config: ConnectionConfig, sandbox_id: str, path: str) -> str:
    return f"{config.api_url}/sandboxes/{quote(sandbox_id, safe='')}{path}"


def _headers(config: ConnectionConfig) -> dict[str, str]:
    return {"X-API-Key": config.api_key or ""}


def _body(name: str | None, memory: bool) -> dict[str, Any]:
    return {"memory": memory} | ({} if name is None else {"name": name})


def _info(item: dict[str, Any]) -> CheckpointInfo:
    return CheckpointInfo(item["checkpointID"], item["name"], item["parentID"], item["memory"], item["current"], item["createdAt"])


def _error(body: dict[str, Any]) -> e2b.SandboxException:
    error = body.get("error", body)
    return e2b.SandboxException(f"{error.get('code')}: {error.get('message')}")


def _result(reply: httpx.Response, or_gone: bool = False) -> Any:
    """The JSON of a reply. NotFoundException, AuthenticationException, RateLimitException, SandboxException with the node's own words."""
    if reply.is_success or (or_gone and reply.status_code == _NOT_FOUND):
        return reply.json() if reply.content and reply.is_success else None
    try:
        said = str(reply.json().get("message", reply.text))
    except (ValueError, AttributeError):
        said = reply.text
    kinds: dict[int, type[Exception]] = {401: e2b.AuthenticationException, 404: e2b.NotFoundException, 429: e2b.RateLimitException}
    raise kinds.get(reply.status_code, e2b.SandboxException)(f"{reply.status_code}: {said}")
