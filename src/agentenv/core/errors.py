"""Every error the product raises on purpose, by cause.

    AgentEnvError
    ├── InvalidInput        400  the caller sent something that can never work
    ├── Unauthenticated     401  no key or token, or a wrong one
    ├── PermissionDenied    403  known caller, not allowed
    ├── NotFound            404  no such sandbox, template, snapshot, process
    ├── Conflict            409  it exists, but not in a state that allows this
    │   ├── GuestUnresponsive 409 its guest did not answer when it was paused
    │   └── SnapshotOfAnotherHost 409 its memory needs another VMM or CPU than this node has
    ├── LimitReached        429  a named limit of the node; trying later may work
    ├── Internal            500  a fault of ours, or a child program broke its contract
    │   └── DataCorrupt     500  stored bytes are not what they were
    ├── Unsupported         501  this driver, host or version cannot do it
    ├── Unavailable         503  a part is down or still starting; trying later works
    │   ├── ShortOfMemory   503  the host has no memory for one more sandbox now
    │   └── HostNotReady    503  the host lacks something; the hint says how to get it
    ├── DeadlineExceeded    504  a step did not finish within its stated limit
    └── StorageFull         507  no room left; nothing was lost

Callers decide by class, never by text. Each class has one HTTP status and one stable `code`;
`hint` is the next step for a person and goes on a line of its own. Whether a client should
retry by itself is `retryable` (the E2B Python SDK repeats 429/502/503/504 unless told not to).
"""

from __future__ import annotations

from typing import ClassVar


class AgentEnvError(Exception):
    """Base of all deliberate errors. `message` names the cause, `hint` the next step (may be empty)."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidInput(AgentEnvError):
    """The request can never succeed as sent."""

    status, code = 400, "invalid_input"


class Unauthenticated(AgentEnvError):
    """No credential, or a wrong one."""

    status, code = 401, "unauthenticated"


class PermissionDenied(AgentEnvError):
    """The caller is known but may not do this."""

    status, code = 403, "permission_denied"


class NotFound(AgentEnvError):
    """The named thing does not exist here."""

    status, code = 404, "not_found"


class Conflict(AgentEnvError):
    """The thing exists but its state does not allow the call."""

    status, code = 409, "conflict"


class GuestUnresponsive(Conflict):
    """The snapshot holds the memory of a guest that did not answer; only its disk can be used."""

    status, code = 409, "sandbox_snapshot_guest_agent_unresponsive"  # the contract's own name


class SnapshotOfAnotherHost(Conflict):
    """The snapshot's memory needs another VMM, CPU model or kind of machine than this node has; its disk can be used."""

    status, code = 409, "snapshot_of_another_host"


class LimitReached(AgentEnvError):
    """A named limit of the node is reached."""

    status, code, retryable = 429, "limit_reached", True


class Internal(AgentEnvError):
    """A fault of ours, or a child program that broke its contract."""

    status, code = 500, "internal"


class DataCorrupt(Internal):
    """Stored bytes are not what they were when written."""

    status, code = 500, "data_corrupt"


class Unsupported(AgentEnvError):
    """This driver, host or version cannot do it."""

    status, code = 501, "unsupported"


class Unavailable(AgentEnvError):
    """A part is down or still starting."""

    status, code, retryable = 503, "unavailable", True


class ShortOfMemory(Unavailable):
    """The host has no memory for one more sandbox now."""

    status, code, retryable = 503, "short_of_memory", True


class HostNotReady(Unavailable):
    """The host lacks a prerequisite; the hint says how to get it."""

    status, code, retryable = 503, "host_not_ready", False


class DeadlineExceeded(AgentEnvError):
    """A step did not finish within its limit."""

    status, code, retryable = 504, "deadline_exceeded", False


class StorageFull(AgentEnvError):
    """No room left on the node's disk."""

    status, code = 507, "storage_full"


def all_errors() -> list[type[AgentEnvError]]:
    """Every class of the tree above, base first, whatever refinements other modules make. Tests check tables against it."""
    found: list[type[AgentEnvError]] = [AgentEnvError]
    for cls in found:
        found.extend(sub for sub in cls.__subclasses__() if sub.__module__ == __name__)
    return found
