"""The HTTP server of the code interpreter (contract section 4): health, contexts, and the stream of a cell's lines.

Errors are plain text, as clients show them. A client that goes away interrupts its cell. The process ends when its spawner
is lost: whoever started it starts it anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.web import Application, HTTPError, RequestHandler

from . import wire
from .contexts import Contexts, NotFound
from .environment import ENVS_URL, SANDBOX_ID_FILE, Sandbox
from .languages import BadRequest, normalize
from .limits import KEEPALIVE_INTERVAL_S, PORT, REQUEST_MAX_BYTES
from .worker import Execution, WorkerLost

_log = logging.getLogger(__name__)
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
PRELOAD = ("numpy", "pandas", "matplotlib.pyplot", "PIL.Image")
"""Imported once in the spawner, so that every context has them at once and shares their memory."""


class _Handler(RequestHandler):
    """Plain text errors, and any web page may call (as with the original)."""

    contexts: Contexts

    def initialize(self, contexts: Contexts) -> None:
        """Called by tornado with what the application was made with."""
        self.contexts = contexts

    def set_default_headers(self) -> None:
        """CORS for everybody: what guards a sandbox's port is the proxy before it."""
        self.set_header("Access-Control-Allow-Origin", "*")
        self.set_header("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS")
        self.set_header("Access-Control-Allow-Headers", self.request.headers.get("Access-Control-Request-Headers", "*"))

    def options(self, *_: str) -> None:
        """A browser's question before a call."""
        self.set_status(204)

    def write_error(self, status_code: int, **details: Any) -> None:
        """The cause as text, with the status that its kind has."""
        error = details.get("exc_info", (None, None, None))[1]
        text = str(error)
        if isinstance(error, NotFound):
            status_code = 404
        elif isinstance(error, BadRequest):
            status_code = 400
        elif isinstance(error, WorkerLost):
            text = f"Failed to start the context: {error}"
        elif isinstance(error, HTTPError):
            text = error.log_message or self._reason
        else:
            text = f"internal error: {type(error).__name__}"
        self.set_status(status_code)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(text)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Only what nobody expects is worth a line with a stack."""
        if not isinstance(value, BadRequest | NotFound | HTTPError):
            super().log_exception(typ, value, tb)

    def body(self) -> dict[str, Any]:
        """The request as a JSON object; no body is an empty one. BadRequest."""
        if not self.request.body.strip():
            return {}
        try:
            found = json.loads(self.request.body)
        except (ValueError, RecursionError) as problem:
            raise BadRequest(f"the request is not JSON: {problem}") from problem
        if not isinstance(found, dict):
            raise BadRequest("the request is not a JSON object")
        return found


def _text(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{name} is not a string")
    return value


def _variables(body: dict[str, Any]) -> dict[str, str]:
    found = body.get("env_vars") or {}
    if not isinstance(found, dict):
        raise BadRequest("env_vars is not an object")
    for name, value in found.items():
        if not _VARIABLE.match(name):
            raise BadRequest(f"{name!r} is not a name for an environment variable")
        if not isinstance(value, str) or "\0" in value:
            raise BadRequest(f"the value of {name} is not a string that a variable can have")
    return found


class _Health(_Handler):
    def get(self) -> None:
        """The ready command of the template."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.write("OK")


class _AllContexts(_Handler):
    async def get(self) -> None:
        """All contexts."""
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps([context.describe() for context in self.contexts.list()]))

    async def post(self) -> None:
        """A new context."""
        body = self.body()
        context = await self.contexts.create(normalize(_text(body, "language")), _text(body, "cwd"))
        self.write(context.describe())


class _OneContext(_Handler):
    async def delete(self, context_id: str) -> None:
        """Remove it."""
        await self.contexts.remove(context_id)
        self.set_status(204)


class _Restart(_Handler):
    async def post(self, context_id: str) -> None:
        """Lose its variables."""
        await self.contexts.get(context_id).restart()
        self.set_status(204)


class _Execute(_Handler):
    """One cell. `gone` is set when the client closed the connection."""

    def prepare(self) -> None:
        """Called before the request is handled."""
        self.gone = asyncio.Event()

    def on_connection_close(self) -> None:
        """Called by tornado when the client hung up before the end."""
        self.gone.set()

    async def post(self) -> None:
        """Run a cell and stream its lines."""
        body = self.body()
        code, language, context_id = _text(body, "code"), _text(body, "language"), _text(body, "context_id")
        variables = _variables(body)
        if code is None:
            raise BadRequest("code is missing")
        if context_id and language:
            raise BadRequest("Only one of context_id or language can be provided")
        context = self.contexts.get(context_id) if context_id else await self.contexts.default(normalize(language))
        execution = context.execute(code, variables, self.request.headers.get("X-Access-Token"))
        self.set_header("Content-Type", "application/x-ndjson")
        try:
            await self._stream(execution)
        except StreamClosedError:
            execution.abandon()

    async def _stream(self, execution: Execution) -> None:
        gone: asyncio.Future[Any] = asyncio.ensure_future(self.gone.wait())
        line: asyncio.Future[Any] | None = None
        try:
            await self.flush()
            while True:
                line = line or asyncio.ensure_future(execution.lines.get())
                await asyncio.wait({line, gone}, timeout=KEEPALIVE_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    execution.abandon()
                    return
                found = wire.KEEPALIVE
                if line.done():
                    next_line, line = line.result(), None
                    if next_line is None:
                        break
                    found = next_line
                self.write(wire.encode(found))
                await self.flush()
            self.write(wire.encode(wire.END))
        finally:
            gone.cancel()
            if line is not None:
                line.cancel()


def make_app(contexts: Contexts) -> Application:
    """The routes."""
    given = {"contexts": contexts}
    one = r"/contexts/([^/]+)"
    return Application(
        [
            ("/health", _Health, given),
            ("/execute", _Execute, given),
            ("/contexts", _AllContexts, given),
            (one, _OneContext, given),
            (f"{one}/restart", _Restart, given),
        ],
        log_function=lambda handler: None,
    )


async def serve(port: int, host: str, home: str, preload: tuple[str, ...], sandbox: Sandbox) -> int:
    """Serve until SIGTERM (0) or until the spawner is lost (1)."""
    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(status: int) -> None:
        if not stop.done():
            stop.set_result(status)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end, 0)
    contexts = Contexts(preload, sandbox, dict(os.environ), home, lambda: end(1))
    await contexts.open()
    server = HTTPServer(make_app(contexts), max_body_size=REQUEST_MAX_BYTES, max_buffer_size=REQUEST_MAX_BYTES + (1 << 20))
    server.listen(port, host)
    _log.info("serving on %s port %d", host, port)
    status = await stop
    server.stop()
    await contexts.close()
    return status


def entry() -> None:
    """The server's process."""
    parser = argparse.ArgumentParser(prog="code interpreter")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--home", default=str(Path.home()), help="folder that contexts start in")
    parser.add_argument("--preload", default=",".join(PRELOAD), help="modules that every Python context has imported")
    parser.add_argument("--envs-url", default=ENVS_URL, help="where the guest agent tells the sandbox's variables")
    parser.add_argument("--id-file", type=Path, default=SANDBOX_ID_FILE, help="file with the sandbox's id")
    arguments = parser.parse_args(sys.argv[3:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("tornado.general").setLevel(logging.ERROR)
    preload = tuple(name for name in arguments.preload.split(",") if name)
    sandbox = Sandbox(arguments.envs_url, arguments.id_file)
    sys.exit(asyncio.run(serve(arguments.port, arguments.host, arguments.home, preload, sandbox)))
