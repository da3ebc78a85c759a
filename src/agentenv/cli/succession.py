"""From one server to the next without losing a request: what `aenv reload` does, and what the two servers do for it (see `serving`).

Owns one file in `<run>`, `server.former`: a line `<pid> <start ticks>` for each server that has passed its doors on and may still serve
the streams it had. `aenv down` ends those, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.node import ServerRecord, load_config, read_record
from agentenv.cli.server import HEALTH_DEADLINE_S, is_healthy, log_tail, server_log, settings_of, start_lock
from agentenv.host.files import write_atomic
from agentenv.host.process import ProcessId, is_alive, spawn

if TYPE_CHECKING:
    from agentenv.config.schema import Config

REPLACE_DEADLINE_S = 2 * HEALTH_DEADLINE_S
"""The former server ends the verbs under way, and the next one takes over what runs."""
_POLL_S = 0.05


def starter(config: Config) -> Callable[[Sequence[int], int], ProcessId]:
    """Starts the next server: the program as it is installed now, with the addresses, home and run folder of this one."""

    def start(listeners: Sequence[int], turn: int) -> ProcessId:
        words = ["--listeners", ",".join(map(str, listeners)), "--turn", str(turn)]
        argv = [sys.executable, "-m", "agentenv.cli.server", *words]
        pinned = {"AENV_API_HOST": config.api.host, "AENV_NODE_RUN": str(config.node.run)}
        environment = {**os.environ, **settings_of(config), **pinned}
        stderr = sys.stderr.fileno()  # a log, a journal or a terminal: whatever this one writes to
        return spawn(argv, server_log(config), Path("/"), env=environment, output=stderr, keep=(*listeners, turn))

    return start


def replace_server(config: Config, waiting: Callable[[str], None]) -> tuple[ServerRecord, ServerRecord]:
    """Have the running server replaced by a new one; returns both records. CliError, naming who serves, when it does not come about."""
    with start_lock(config):
        former = read_record(config)
        if former is None or not former.is_alive():
            raise CliError("no server runs that could be replaced", "`aenv up` starts one", Exit.UNREACHABLE)
        config = load_config(node_home=former.home, api_host=former.host, api_port=former.port)
        log = server_log(config)
        offset = log.stat().st_size if log.exists() else 0
        os.kill(former.pid, signal.SIGUSR2)
        end = time.monotonic() + REPLACE_DEADLINE_S
        while time.monotonic() < end:
            record = read_record(config)
            if record is not None and record.pid != former.pid and record.is_alive() and is_healthy(config):
                return former, record
            if not former.is_alive() and (record is None or not record.is_alive()):
                break
            waiting("replace the server")
            time.sleep(_POLL_S)
        serves = f"pid {former.pid} goes on" if former.is_alive() and read_record(config) == former else "nobody serves now"
        tail = log_tail(log, offset)
        raise CliError(f"the server was not replaced, {serves}{tail and chr(10) + tail}", "`aenv doctor` shows what is wrong")


def remember_former(config: Config) -> None:
    """Called by the next server before it records itself: the recorded one goes on with its streams."""
    former = read_record(config)
    kept = formers(config)
    if former is not None and former.is_alive() and former.pid != os.getpid():
        kept.append(ProcessId(former.pid, former.start_ticks))
    text = "".join(f"{one.pid} {one.start_ticks}\n" for one in kept)
    write_atomic(_file(config), text.encode())


def formers(config: Config) -> list[ProcessId]:
    """The former servers that still run."""
    found = []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for line in _file(config).read_text().splitlines():
            pid, ticks = line.split()
            found.append(ProcessId(int(pid), int(ticks)))
    return [one for one in found if is_alive(one)]


def end_formers(config: Config, end: Callable[[ProcessId], None]) -> int:
    """End those with `end`; returns how many there were."""
    left = formers(config)
    for one in left:
        end(one)
    _file(config).unlink(missing_ok=True)
    return len(left)


def _file(config: Config) -> Path:
    return config.node.run / "server.former"
