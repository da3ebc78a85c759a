"""The worker for Python: an IPython shell that takes cells from descriptor 3 and tells what happens on descriptor 4.

    request  {"code": "...", "set": {..}, "unset": [..], "once": {..}, "reseed": bool}
    event    {"type": "ready"} {"type": "number_of_executions", "execution_count"} {"type": "bundle", "main", "data": {type: value}}
             {"type": "error", "name", "value", "traceback"} {"type": "end"}

Output goes to stdout and stderr as such. Between cells its asyncio loop runs, so tasks that a cell started go on; during a
cell it does not, so `asyncio.run` works there as in a script. An interrupt (SIGINT) counts only while a cell runs.

The shell is made once, in the spawner; each worker is a fork of it. So `prepare` may not start a thread.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from typing import Any, NoReturn

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from . import display
from .limits import EVENT_MAX_BYTES

_REQUESTS_FD, _EVENTS_FD = 3, 4
_INLINE_BACKEND = "module://matplotlib_inline.backend_inline"
_writing = threading.Lock()


def emit(event: dict[str, Any]) -> None:
    """Tell the server. Whole lines also when several threads tell something."""
    line = memoryview(json.dumps(event, default=str).encode("ascii") + b"\n")
    with _writing:
        while line:
            line = line[os.write(_EVENTS_FD, line) :]


def emit_bundle(data: dict[str, Any], is_main: bool) -> None:
    """Tell a result. What would be larger than an event may be is left out, and said so."""
    fit: dict[str, Any] = {}
    left_bytes = EVENT_MAX_BYTES - 4096
    for media_type, value in sorted(data.items(), key=lambda item: _size(item[1])):
        size_bytes = _size(value)
        if size_bytes > left_bytes:
            why = f"a result may have {EVENT_MAX_BYTES} bytes"
            sys.stderr.write(f"a result's {media_type} of {size_bytes} bytes is left out: {why}\n")
            continue
        left_bytes -= size_bytes
        fit[media_type] = base64.b64encode(value).decode() if isinstance(value, bytes) else value
    _flush()
    emit({"type": "bundle", "main": is_main, "data": fit})


def _flush() -> None:
    """What was printed before comes before."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the cell closed it
            continue


def _size(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value) * 4 // 3 + 4
    return len(json.dumps(value, default=str))


class _Hook(DisplayHook):
    """The value of a cell's last expression."""

    def write_output_prompt(self) -> None:
        """Prompts are for terminals."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        """Called with all representations of the value."""
        emit_bundle(format_dict, True)

    def finish_displayhook(self) -> None:
        """Nothing was printed, so there is nothing to end."""


class _Publisher(DisplayPublisher):
    """What `display` shows."""

    def publish(self, data: dict[str, Any], metadata: Any = None, *_: Any, update: bool = False, **__: Any) -> None:
        """Called with all representations. An update of something shown before is no new result."""
        if not update:
            emit_bundle(data, False)

    def clear_output(self, wait: bool = False) -> None:
        """What was streamed cannot be taken back."""


class _Shell(InteractiveShell):
    """IPython without a terminal."""

    displayhook_class = Type(_Hook)
    display_pub_class = Type(_Publisher)

    def _showtraceback(self, etype: type[BaseException], evalue: BaseException, stb: list[str]) -> None:
        _flush()
        emit({"type": "error", "name": etype.__name__, "value": str(evalue), "traceback": "\n".join(stb)})

    def system(self, cmd: str) -> None:
        """`!command`: its output is the cell's output."""
        _flush()
        done = subprocess.run(self.var_expand(cmd, depth=1), shell=True, executable="/bin/bash", stdin=subprocess.DEVNULL, check=False)
        self.user_ns["_exit_code"] = done.returncode

    system_piped = system_raw = system

    def ask_exit(self) -> NoReturn:
        """`exit` ends the cell; the context stays."""
        raise SystemExit(0)

    def enable_gui(self, gui: Any = None) -> None:
        """There is no screen."""


def make_shell() -> InteractiveShell:
    """The shell of all workers to come."""
    config = Config()
    config.HistoryManager.enabled = False  # it would keep a database and a thread
    config.InteractiveShell.colors = "NoColor"
    config.InteractiveShell.xmode = "Context"
    os.environ.setdefault("MPLBACKEND", _INLINE_BACKEND)
    return _Shell.instance(config=config, ipython_dir=tempfile.mkdtemp(prefix="ipython-"))


def prepare(shell: InteractiveShell) -> None:
    """After the imports: rich displays, and figures that show themselves at the end of a cell."""
    display.install(shell)
    if "matplotlib" in sys.modules:
        from matplotlib_inline.backend_inline import configure_inline_support

        configure_inline_support(shell, _INLINE_BACKEND)


def run(shell: InteractiveShell) -> None:
    """Be a worker until the server closes the requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin = open(0)  # noqa: SIM115  # for the life of the process
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    sys.argv = [""]
    reseed()
    warnings.filterwarnings("ignore", message="To exit: use")  # advice for a terminal
    from IPython.core.async_helpers import get_asyncio_loop

    loop = get_asyncio_loop()
    requests = loop.run_until_complete(_open_requests())
    emit({"type": "ready"})
    while line := loop.run_until_complete(requests.readline()):
        _execute(shell, json.loads(line))


async def _open_requests() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 30)  # the server limits what a request may hold
    pipe = os.fdopen(_REQUESTS_FD, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


def reseed() -> None:
    """New random numbers: this process is a copy, and so is the machine it runs in."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _execute(shell: InteractiveShell, request: dict[str, Any]) -> None:
    for name in request["unset"]:
        os.environ.pop(name, None)
    os.environ.update(request["set"])
    if request["reseed"]:
        reseed()
    before = {name: os.environ.get(name) for name in request["once"]}
    os.environ.update(request["once"])
    emit({"type": "number_of_executions", "execution_count": shell.execution_count})
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        shell.run_cell(request["code"], store_history=True)
    except KeyboardInterrupt:  # it came between the cell's last line and here
        emit({"type": "error", "name": "KeyboardInterrupt", "value": "", "traceback": ""})
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _flush()
    emit({"type": "end"})
