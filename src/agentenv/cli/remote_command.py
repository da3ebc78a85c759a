"""One command in a sandbox with its streams joined to ours, or left to itself.

Threads: the event stream (see `cli.stream`), standard input, and the main thread, which only waits and takes signals.
Invariants: bytes pass unchanged both ways; when we are interrupted, or our output is closed, the command is killed
before we leave.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from agentenv.cli.dataplane import sdk_errors
from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import fail
from agentenv.cli.stream import Ended, Stream, ending_signals, write_all

if TYPE_CHECKING:
    from e2b import Sandbox

POLL_S = 0.1
CHUNK_BYTES = 64 << 10
"""How much standard input goes in one message; the guest takes each in one piece."""


class RemoteCommand:
    """A command line for `sandbox`; `run` or `leave_running` starts it once."""

    def __init__(
        self, sandbox: Sandbox, line: str, user: str | None, cwd: str | None, env: dict[str, str], timeout_s: float, with_stdin: bool
    ) -> None:
        self._sandbox = sandbox
        self._line = line
        self._options: dict[str, Any] = {"user": user, "cwd": cwd, "envs": env, "timeout": timeout_s, "stdin": with_stdin}
        self._timeout_s = timeout_s
        self._with_stdin = with_stdin
        self._stream = Stream(sandbox)
        self._output_closed = False

    def run(self) -> int:
        """Run it to its end; returns the exit code for our own process. Raises CliError when it could not be run."""
        with ending_signals():
            try:
                handle = self._start()
                _pass_bytes_unchanged(handle)
                self._stream.start(handle, on_stdout=lambda text: self._write(1, text), on_stderr=lambda text: self._write(2, text))
                if self._with_stdin:
                    threading.Thread(target=self._pump_input, args=(handle,), daemon=True).start()
                while not self._stream.done.wait(POLL_S):
                    pass
            except KeyboardInterrupt:
                self._stream.kill()
                return Exit.INTERRUPTED
            except Ended as ended:
                self._stream.kill()
                return 128 + ended.number
        return self._result()

    def leave_running(self) -> int:
        """Start it, pass it all of standard input, and leave it to itself; returns its process id in the guest."""
        handle = self._start()
        if self._with_stdin:
            self._pump_input(handle)
        handle.disconnect()
        return int(handle.pid)

    def _start(self) -> Any:
        with sdk_errors(self._sandbox.sandbox_id):
            return self._sandbox.commands.run(self._line, background=True, retain_output=False, **self._options)

    def _result(self) -> int:
        if self._output_closed:
            self._stream.kill()
            return 128 + signal.SIGPIPE
        import e2b.exceptions as sdk

        error = self._stream.error
        is_gone = isinstance(error, sdk.SandboxNotRunningException | sdk.SandboxUnreachableException)
        if self._timeout_s and isinstance(error, sdk.TimeoutException) and not is_gone:
            raise CliError(
                f"the command did not end within {self._timeout_s:g} s and was killed", "give it more: --timeout S", Exit.TIMED_OUT
            )
        return self._stream.result()

    def _write(self, fd: int, text: str) -> None:
        """Write all of it; a closed pipe ends the whole command."""
        if self._output_closed:
            return
        try:
            write_all(fd, text.encode("utf-8", "surrogateescape"))
        except BrokenPipeError:
            self._output_closed = True
            self._stream.done.set()

    def _pump_input(self, handle: Any) -> None:
        try:
            while chunk := os.read(sys.stdin.fileno(), CHUNK_BYTES):
                handle.send_stdin(chunk)
            handle.close_stdin()
        except Exception as error:  # noqa: BLE001 - mostly the command ended without reading all; its end tells the rest
            if not self._stream.done.wait(1.0):
                fail(f"cannot pass standard input on: {error}")


def _pass_bytes_unchanged(handle: Any) -> None:
    """Make the SDK's decoders keep bytes that are not UTF-8 as surrogates, which `_write` turns back."""
    decoder = codecs.getincrementaldecoder("utf-8")
    for name in ("_stdout_decoder", "_stderr_decoder"):
        if hasattr(handle, name):
            setattr(handle, name, decoder(errors="surrogateescape"))
