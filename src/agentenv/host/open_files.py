"""How many files this process may have open at once."""

from __future__ import annotations

import contextlib
import logging
import resource

_log = logging.getLogger(__name__)

OPEN_FILES_WANTED = 65536
"""20,000 clients of the proxy, as many connections behind it, and what 1,000 VMs need; a process costs nothing by being allowed more."""


def raise_open_files(wanted: int = OPEN_FILES_WANTED) -> int:
    """Allow this process `wanted` open files, or as many as the machine lets it; returns how many. Never lowers the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted and hard < wanted:
        with contextlib.suppress(OSError, ValueError):  # only root may raise the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
            return wanted
    target = min(wanted, hard)
    if soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    if soft < wanted:
        _log.warning("only %d open files are allowed, %d are wanted: raise `ulimit -n` (LimitNOFILE of a service)", soft, wanted)
    return soft
