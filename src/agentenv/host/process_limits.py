"""What the kernel allows this process and those it starts: how many files may be open at once, and how large one may be."""

from __future__ import annotations

import contextlib
import logging
import resource

from agentenv.core.errors import HostNotReady

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


def lift_file_size(needed_bytes: int) -> None:
    """Let files grow as they must: a block server that writes past the limit is killed, and all disks with it.

    HostNotReady when the limit is below `needed_bytes` and may not be lifted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for wanted in ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (hard, hard)):  # only root may raise the hard limit
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_FSIZE, wanted)
            soft = wanted[0]
            break
    if soft != resource.RLIM_INFINITY and soft < needed_bytes:
        raise HostNotReady(
            f"files may be {soft >> 20} MiB at most here, a disk and its layers need {needed_bytes >> 20} MiB",
            "raise `ulimit -f` (LimitFSIZE=infinity of a service), also the hard limit",
        )
