"""Serving the API on a Unix socket that only this user can reach; the proxy in front of it is the only client.

The socket is made here, not by uvicorn, which would open it to every user of the machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

_BACKLOG = 1024  # connections waiting to be accepted; bursts of creates come in hundreds
_SHUTDOWN_DEADLINE_S = 10  # requests that have not ended by then are cut; the orchestrator goes on with their work
_KEEP_ALIVE_S = 75


class ApiServer(uvicorn.Server):
    """uvicorn without its signal handlers: the node decides when to stop, by setting `should_exit`."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


def api_server(app: FastAPI) -> ApiServer:
    """A server for `app`; run it with `await server.serve(sockets=[bind_unix(path)])`, stop it with `should_exit = True`."""
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_DEADLINE_S,
        backlog=_BACKLOG,
        ws="none",
    )
    return ApiServer(config)


def bind_unix(path: Path) -> socket.socket:
    """A listening socket at `path` with mode 0600, in place of a socket left there by an earlier server. The caller closes it."""
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous_mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(previous_mask)
    listener.setblocking(False)
    return listener
