"""What a caller is told when a process ended under a start: that the same call may be made again.

Nothing of the sandbox was shown to anybody yet, and the next start finds another `blockd`, or a host with more room. A fault that
comes back each time is in the server's log with the VMM's last words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from agentenv.core.errors import Conflict, DataCorrupt, Internal, NotFound, Unavailable
from agentenv.orchestrator.parts import Parts


def lost_at_start(why: str) -> Unavailable:
    """The VMM has ended, for the reason `why`."""
    return Unavailable(f"the guest was lost while starting: {why}", "try again; if it repeats, see the server's log")


@contextlib.contextmanager
def block_server_may_end(parts: Parts) -> Iterator[None]:
    """Unavailable instead of what else is raised when the block server ends meanwhile: a stack that is gone would be a 404, or a 500."""
    before = parts.block_server.process
    try:
        yield
    except DataCorrupt:
        raise
    except (Internal, NotFound, Conflict, OSError) as error:
        if parts.block_server.is_alive() and parts.block_server.process == before:
            raise
        raise Unavailable(
            f"the block server ended while the sandbox was starting: {error}", "it is started again at once; try again in a moment"
        ) from error
