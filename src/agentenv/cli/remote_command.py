"""One command in a sandbox with its streams joined to ours.

Three threads: the SDK's event stream (it blocks outside the interpreter, where Ctrl-C cannot reach it), standard input,
and the main thread, which only waits and takes signals. Invariants: bytes pass unchanged both ways; when we are
interrupted, or our output is closed, the command is killed before we leave.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from agentenv.cli.dataplane import sdk_errors
from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import fail

if TYPE_CHECKING:
    from e2b import Sandbox

POLL_S = 0.1
KILL_DEADLINE_S = 10.0
CHUNK_BYTES = 64 << 10
"""How much standard input goes in one message; the guest takes each in one piece."""


class Ended(Exception):
    """A signal asked us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class RemoteCommand:
    """A command line for `sandbox`; `run` runs it once."""

    def __init__(
        self, sandbox: Sandbox, line: str, user: str | None, cwd: str | None, env: dict[str, str], timeout_s: float, with_stdin: bool
    ) -> None:
        self._sandbox = sandbox
        self._line = line
        self._options: dict[str, Any] = {"user": user, "cwd": cwd, "envs": env, "timeout": timeout_s, "stdin": with_stdin}
        self._timeout_s = timeout_s
        self._with_stdin = with_stdin
        self._done = threading.Event()
        self._code = 0
        self._error: BaseException | None = None
        self._output_closed = False
        self._handle: Any = None

    def run(self) -> int:
        """Run it to its end; returns the exit code for our own process. Raises CliError when it could not be run."""
        previous = {number: signal.signal(number, _raise_ended) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            with sdk_errors(self._sandbox.sandbox_id):
                self._handle = self._sandbox.commands.run(self._line, background=True, retain_output=False, **self._options)
            _pass_bytes_unchanged(self._handle)
            threading.Thread(target=self._pump_output, daemon=True).start()
            if self._with_stdin:
                threading.Thread(target=self._pump_input, daemon=True).start()
            while not self._done.wait(POLL_S):
                pass
        except KeyboardInterrupt:
            self._kill()
            return Exit.INTERRUPTED
        except Ended as ended:
            self._kill()
            return 128 + ended.number
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._result()

    def _result(self) -> int:
        if self._output_closed:
            self._kill()
            return 128 + signal.SIGPIPE
        if self._error is None:
            return self._code
        import e2b.exceptions as sdk

        is_gone = isinstance(self._error, sdk.SandboxNotRunningException | sdk.SandboxUnreachableException)
        if self._timeout_s and isinstance(self._error, sdk.TimeoutException) and not is_gone:
            raise CliError(
                f"the command did not end within {self._timeout_s:g} s and was killed", "give it more: --timeout S", Exit.TIMED_OUT
            )
        with sdk_errors(self._sandbox.sandbox_id):
            raise self._error
        raise AssertionError("unreachable")

    def _pump_output(self) -> None:
        from e2b import CommandExitException

        try:
            self._handle.wait(on_stdout=lambda text: self._write(1, text), on_stderr=lambda text: self._write(2, text))
        except CommandExitException as error:
            self._code = exit_code(error.exit_code, error.error)
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which maps it
            self._error = error
        finally:
            self._done.set()

    def _write(self, fd: int, text: str) -> None:
        """Write all of it; a closed pipe ends the whole command."""
        left = memoryview(text.encode("utf-8", "surrogateescape"))
        while left and not self._output_closed:
            try:
                left = left[os.write(fd, left) :]
            except BrokenPipeError:
                self._output_closed = True
                self._done.set()

    def _pump_input(self) -> None:
        try:
            while chunk := os.read(sys.stdin.fileno(), CHUNK_BYTES):
                self._handle.send_stdin(chunk)
            self._handle.close_stdin()
        except Exception as error:  # noqa: BLE001 - mostly the command ended without reading all; its end tells the rest
            if not self._done.wait(1.0):
                fail(f"cannot pass standard input on: {error}")

    def _kill(self) -> None:
        if self._handle is None:
            return
        killer = threading.Thread(target=self._kill_quietly, daemon=True)
        killer.start()
        killer.join(KILL_DEADLINE_S)

    def _kill_quietly(self) -> None:
        try:
            self._handle.kill()
        except Exception as error:  # noqa: BLE001 - we are leaving; say what may be left behind
            fail(f"the command may still run: {error}", f"`aenv kill {self._sandbox.sandbox_id}` ends its sandbox")


def exit_code(code: int, error: str | None) -> int:
    """The shell's exit code for an end event: `exitCode -1, error "signal: killed"` is 137 (contract section 3.4)."""
    if code >= 0:
        return code & 0xFF if code > 255 else code
    name = (error or "").removeprefix("signal: ").strip()
    return 128 + _SIGNALS.get(name, 0) if name in _SIGNALS else Exit.FAILURE


_SIGNALS: dict[str, int] = {(signal.strsignal(number) or "").lower(): int(number) for number in signal.valid_signals()}
_SIGNALS |= {"terminated": signal.SIGTERM, "killed": signal.SIGKILL, "broken pipe": signal.SIGPIPE}


def _pass_bytes_unchanged(handle: Any) -> None:
    """Make the SDK's decoders keep bytes that are not UTF-8 as surrogates, which `_write` turns back."""
    decoder = codecs.getincrementaldecoder("utf-8")
    for name in ("_stdout_decoder", "_stderr_decoder"):
        if hasattr(handle, name):
            setattr(handle, name, decoder(errors="surrogateescape"))


def _raise_ended(number: int, _frame: FrameType | None) -> None:
    raise Ended(number)
