"""A program in a sandbox whose streams are joined to ours: what one command and a shell have in common.

A thread of its own reads the SDK's event stream (it blocks outside the interpreter, where Ctrl-C cannot reach it), so
that the main thread can take signals. Invariants: signal handlers are as before afterwards; ending the program has a
deadline, and what may be left behind is said.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from agentenv.cli.dataplane import sdk_errors
from agentenv.cli.exits import Exit
from agentenv.cli.output import fail

if TYPE_CHECKING:
    from e2b import Sandbox

KILL_DEADLINE_S = 10.0


class Ended(Exception):
    """A signal asked us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stream:
    """The events of a program, read to their end: afterwards `done` is set, and there is a code or an error."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.done = threading.Event()
        self.code = 0
        self.error: BaseException | None = None
        self.handle: Any = None

    def start(self, handle: Any, **callbacks: Callable[[Any], None]) -> None:
        """Begin to read the events of the SDK's `handle` in a thread; output goes to `callbacks`, in that thread."""
        self.handle = handle
        threading.Thread(target=self._read, kwargs=callbacks, daemon=True).start()

    def _read(self, **callbacks: Callable[[Any], None]) -> None:
        from e2b import CommandExitException

        try:
            self.handle.wait(**callbacks)
        except CommandExitException as error:
            self.code = exit_code(error.exit_code, error.error)
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which maps it
            self.error = error
        finally:
            self.done.set()

    def result(self) -> int:
        """The exit code for our own process. CliError when the program could not be followed to its end."""
        if self.error is not None:
            with sdk_errors(self.sandbox.sandbox_id):
                raise self.error
        return self.code

    def kill(self) -> None:
        """End the program, if it was started."""
        if self.handle is None:
            return
        killer = threading.Thread(target=self._kill, daemon=True)
        killer.start()
        killer.join(KILL_DEADLINE_S)

    def _kill(self) -> None:
        try:
            self.handle.kill()
        except Exception as error:  # noqa: BLE001 - we are leaving; say what may be left behind
            fail(f"the program may still run: {error}", f"`aenv kill {self.sandbox.sandbox_id}` ends its sandbox")


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Ended` in the main thread while the block runs."""
    previous = {number: signal.signal(number, _raise_ended) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, however small the pieces that `fd` takes."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def exit_code(code: int, error: str | None) -> int:
    """The shell's exit code for an end event: `exitCode -1, error "signal: killed"` is 137 (contract section 3.4)."""
    if code >= 0:
        return code & 0xFF if code > 255 else code
    name = (error or "").removeprefix("signal: ").strip()
    return 128 + _SIGNALS.get(name, 0) if name in _SIGNALS else Exit.FAILURE


_SIGNALS: dict[str, int] = {(signal.strsignal(number) or "").lower(): int(number) for number in signal.valid_signals()}
_SIGNALS |= {"terminated": signal.SIGTERM, "killed": signal.SIGKILL, "broken pipe": signal.SIGPIPE}


def _raise_ended(number: int, _frame: FrameType | None) -> None:
    raise Ended(number)
