"""Who listens on a TCP port of this host, for error messages. Best effort: an empty answer when the kernel does not tell."""

from __future__ import annotations

from pathlib import Path

_LISTEN_STATE = "0A"


def describe_holder(port: int) -> str:
    """`name (pid N)` of the process that listens on `port` in this network namespace, or an empty string."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, wanted):
            try:
                name = (process / "comm").read_text().strip()
            except OSError:
                continue
            return f"{name} (pid {process.name})"
    return ""


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[3] == _LISTEN_STATE and int(columns[1].rsplit(":", 1)[1], 16) == port:
                found.add(columns[9])
    return found


def _holds(process: Path, wanted: set[str]) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if str(descriptor.readlink()) in wanted:
                return True
        except OSError:
            continue
    return False
