"""Starting and stopping the server process. `python -m agentenv.cli.server` is the server itself.

Invariants: at most one server per `node.run` folder (a lock is held while one is being started); a detached server is a
session of its own, so closing the terminal does not touch it; it is told its settings by AENV_ variables, the same way
a service manager would; every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.node import node_paths, node_url, read_record, remove_record, write_record
from agentenv.host.listeners import describe_holder

if TYPE_CHECKING:
    from agentenv.config.schema import Config
    from agentenv.serving import Turn

HEALTH_DEADLINE_S = 90.0
"""Longest start: opening the store, adopting what runs and starting the storage daemon; seconds on a busy machine."""
STOP_DEADLINE_S = 30.0
"""How long the server may take to finish requests under way before it is killed; its sandboxes do not depend on it."""
KILL_DEADLINE_S = 10.0
LOG_LIMIT_BYTES = 16 << 20
"""A larger log is set aside as `server.log.1` at the next start; one old log is kept."""
TAIL_LINES = 20


def server_log(config: Config) -> Path:
    """The log of a detached server."""
    return node_paths(config).log / "server.log"


@contextlib.contextmanager
def start_lock(config: Config) -> Iterator[None]:
    """Only one start at a time. CliError when another is under way."""
    from agentenv.core.errors import Conflict
    from agentenv.host.files import locked

    try:
        with locked(config.node.run / "up.lock", "starting the node"):
            yield
    except PermissionError as error:
        raise CliError(f"cannot write to {config.node.run}: {error.strerror}", "run aenv as root, or set AENV_NODE_RUN") from error
    except Conflict as error:
        raise CliError("another `aenv up` is at work", "wait for it to end; `aenv doctor` shows whether the server runs") from error


def require_free_port(host: str, port: int) -> None:
    """CliError naming who holds the port when the server could not listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                holder = describe_holder(port)
                by = f" by {holder}" if holder else ""
                raise CliError(
                    f"port {port} on {host} is in use{by}", "end that program, or choose another port: `aenv up --port N`"
                ) from error
            raise CliError(f"cannot listen on {host} port {port}: {error.strerror}", "see the settings api.host and api.port") from error


def start_detached(config: Config, waiting: Callable[[float], None]) -> int:
    """Start the server in the background and wait for its first answer; returns its pid.

    `waiting` is called with the seconds so far. CliError with the end of the log when it does not come up; then nothing
    is left running.
    """
    from agentenv.host.process import kill, spawn

    log = server_log(config)
    _rotate(log)
    offset = log.stat().st_size if log.exists() else 0
    process = spawn([sys.executable, "-m", "agentenv.cli.server"], log=log, cwd=Path("/"), env={**os.environ, **settings_of(config)})
    begun = time.monotonic()
    try:
        problem = _wait_healthy(config, process.pid, begun, waiting)
    except BaseException:
        kill(process, KILL_DEADLINE_S, term_first_s=STOP_DEADLINE_S)
        raise
    if problem:
        kill(process, KILL_DEADLINE_S, term_first_s=STOP_DEADLINE_S)
        remove_record(config)
        tail = log_tail(log, offset)
        raise CliError(f"the server did not start: {problem}{tail and chr(10) + tail}", f"the whole log is {log}")
    return process.pid


def settings_of(config: Config) -> dict[str, str]:
    """The variables that tell a child process the settings a command line may have changed."""
    api = config.api
    return {
        "AENV_NODE_HOME": str(config.node.home),
        "AENV_API_PORT": str(api.port),
        "AENV_API_DOMAIN": api.domain,
        "AENV_API_TLS_PORT": str(api.tls_port),
    }


def _wait_healthy(config: Config, pid: int, begun: float, waiting: Callable[[float], None]) -> str:
    while True:
        spent_s = time.monotonic() - begun
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return f"it ended with status {os.waitstatus_to_exitcode(status)}"
        if is_healthy(config):
            return ""
        if spent_s > HEALTH_DEADLINE_S:
            return f"no answer on {node_url(config)}/health within {HEALTH_DEADLINE_S:g} s"
        waiting(spent_s)
        time.sleep(0.05 if spent_s < 2 else 0.5)


def is_healthy(config: Config, deadline_s: float = 3.0) -> bool:
    """Whether the node answers GET /health."""
    return troubles(config, deadline_s) is not None


def troubles(config: Config, deadline_s: float = 3.0) -> dict[str, str] | None:
    """What GET /health says is out of order, by part of the node; None when it does not answer."""
    import json
    from http.client import HTTPConnection, HTTPException
    from urllib.parse import urlsplit

    address = urlsplit(node_url(config))
    connection = HTTPConnection(address.hostname or "", address.port, timeout=deadline_s)
    try:
        connection.request("GET", "/health")
        reply = connection.getresponse()
        if not 200 <= reply.status < 300:
            return None
        said = json.loads(reply.read())
        return dict(said.get("troubles", {})) if isinstance(said, dict) else {}
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _rotate(log: Path) -> None:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
            log.replace(log.with_name(log.name + ".1"))
    except OSError as error:
        raise CliError(
            f"cannot write the log {log}: {error.strerror}", "run aenv as root, or choose another home: `aenv up --home DIR`"
        ) from error


def log_tail(log: Path, offset: int = 0) -> str:
    """The last lines of `log` written after `offset`."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(offset, log.stat().st_size - 16384))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])


def stop(config: Config, report: Callable[[str], None]) -> None:
    """End the recorded server: SIGTERM, and SIGKILL after a deadline. Says so when there is none. Its sandboxes go on."""
    from agentenv.cli.succession import end_formers
    from agentenv.host.process import ProcessId, kill

    record = read_record(config)
    if formers := end_formers(config, lambda one: kill(one, KILL_DEADLINE_S, term_first_s=STOP_DEADLINE_S)):
        report(f"ended {formers} former server(s) with the streams they had")
    if record is None or not record.is_alive():
        report("the server is not running")
        return
    begun = time.monotonic()
    kill(ProcessId(record.pid, record.start_ticks), KILL_DEADLINE_S, term_first_s=STOP_DEADLINE_S)
    how = "" if time.monotonic() - begun < STOP_DEADLINE_S else f" (killed: it did not stop by itself within {STOP_DEADLINE_S:g} s)"
    report(f"stopped the server, pid {record.pid}{how}")


def serve_here(config: Config, inherited: list[socket.socket] | None = None, turn: Turn | None = None) -> None:
    """Be the server: record this process, serve until told to stop or replaced, remove the record.

    `inherited` are listening sockets that were handed over; `turn` is the talk with the server that this one replaces.
    """
    from agentenv import wiring
    from agentenv.cli.succession import remember_former, starter
    from agentenv.host.notify import notify

    def ready(listeners: list[int]) -> None:
        notify("FDSTORE=1", "FDNAME=listener", descriptors=listeners)  # kept for the next server if this one is killed
        notify("READY=1", f"MAINPID={os.getpid()}", "STATUS=serving")
        for fd in listeners:
            os.close(fd)
        if turn is not None:
            turn.serving()

    _log_to_stderr()
    if turn is not None:
        remember_former(config)
    write_record(config)
    try:
        wiring.serve(config, wiring.Succession(ready, starter(config), inherited or []))
    finally:
        record = read_record(config)
        if record is not None and record.pid == os.getpid():
            remove_record(config)


def _log_to_stderr() -> None:
    """One line per event, times in UTC."""
    import logging

    logging.Formatter.converter = time.gmtime
    logging.basicConfig(level=logging.INFO, format="%(asctime)sZ %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells every request to the storage daemon


@click.command(add_help_option=False)
@click.option("--listeners", default="", help="Descriptors of listening sockets, joined by commas.")
@click.option("--turn", "turn_fd", type=int, help="Descriptor of the talk with the server that this one replaces.")
def main(listeners: str, turn_fd: int | None) -> None:
    """The detached server process; its output is the log."""
    from agentenv.cli.node import load_config
    from agentenv.cli.output import fail
    from agentenv.core.errors import AgentEnvError
    from agentenv.host.listeners import adopt
    from agentenv.serving import Turn

    if turn_fd is not None and os.fork():
        os._exit(0)  # nobody's child: the service manager is to see its end, also while the former server lives
    try:
        config = load_config()
        inherited = adopt(int(fd) for fd in listeners.split(",") if fd)
        turn = None if turn_fd is None else Turn(turn_fd)
        if turn is not None:
            _get_ready(config)
            turn.take()
        serve_here(config, inherited, turn)
    except AgentEnvError as error:
        fail(error.message, error.hint)
        sys.exit(Exit.FAILURE)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)


def _get_ready(config: Config) -> None:
    """What can go wrong of a start while another server still has the node goes wrong now."""
    from agentenv import wiring

    wiring.ensure_assets(config, lambda *_: None)


if __name__ == "__main__":
    main()
