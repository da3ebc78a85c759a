"""An interactive shell in a sandbox: its terminal is ours.

Invariants: our terminal is restored however it ends; the guest's terminal follows our size; the sandbox does not run
out of time under an open shell (its life is extended, never shortened); `Enter ~ .` leaves even when the guest hangs.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from agentenv.cli.api import Api
from agentenv.cli.dataplane import open_sandbox, sdk_errors
from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import info, warn
from agentenv.cli.remote_command import Ended, exit_code
from agentenv.cli.terminal import raw, require_terminal, terminal_size

if TYPE_CHECKING:
    from e2b import Sandbox

POLL_S = 0.2
KEEP_ALIVE_EVERY_S = 20.0
KEEP_ALIVE_FOR_S = 60
CHUNK_BYTES = 16 << 10


class EscapeKeys:
    """Finds `~.` at the start of a line, as ssh does. `~~` sends one `~`."""

    def __init__(self) -> None:
        self._at_line_start = True
        self._held = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """What of `data` goes to the guest, and whether the user asked to leave."""
        out = bytearray()
        for byte in data:
            if self._held:
                self._held = False
                if byte == ord("."):
                    return bytes(out), True
                if byte != ord("~"):
                    out.append(ord("~"))
            elif self._at_line_start and byte == ord("~"):
                self._held = True
                continue
            out.append(byte)
            self._at_line_start = byte in b"\r\n"
        return bytes(out), False


def run_shell(api: Api, given_id: str, user: str | None = None, cwd: str | None = None, env: dict[str, str] | None = None) -> int:
    """Open a shell and stay in it to its end. Returns the exit code for our process."""
    require_terminal()
    sandbox = open_sandbox(api, given_id)
    from e2b import PtySize

    rows, columns = terminal_size()
    with sdk_errors(sandbox.sandbox_id):
        handle = sandbox.pty.create(PtySize(rows=rows, cols=columns), user=user, cwd=cwd, envs=env, timeout=0)
    return _Session(api, sandbox, handle).run()


class _Session:
    def __init__(self, api: Api, sandbox: Sandbox, handle: Any) -> None:
        self._api = api
        self._sandbox = sandbox
        self._handle = handle
        self._done = threading.Event()
        self._code = 0
        self._error: BaseException | None = None
        self._resized = False
        self._keep_alive_at = time.monotonic() + KEEP_ALIVE_EVERY_S

    def run(self) -> int:
        previous = {number: signal.signal(number, _raise_ended) for number in (signal.SIGTERM, signal.SIGHUP)}
        previous[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._note_resize)
        left = False
        try:
            with raw():
                threading.Thread(target=self._pump_output, daemon=True).start()
                left = self._pump_input()
        except Ended as ended:
            self._kill()
            return 128 + ended.number
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if left:
            self._kill()
            info("left the shell")
            return Exit.OK
        if self._error is not None:
            sys.stderr.write("\n")  # after the guest's last output
            with sdk_errors(self._sandbox.sandbox_id):
                raise self._error
        return self._code

    def _note_resize(self, _number: int, _frame: FrameType | None) -> None:
        self._resized = True

    def _pump_output(self) -> None:
        from e2b import CommandExitException

        try:
            self._handle.wait(on_pty=_write_all)
        except CommandExitException as error:
            self._code = exit_code(error.exit_code, error.error)
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which maps it
            self._error = error
        finally:
            self._done.set()

    def _pump_input(self) -> bool:
        """Pass keys on until the shell ends. True when the user left by the escape keys, or our terminal is gone."""
        keys = EscapeKeys()
        fd = sys.stdin.fileno()
        while not self._done.is_set():
            self._follow_size()
            self._keep_alive()
            try:
                ready, _, _ = select.select([fd], [], [], POLL_S)
            except InterruptedError:
                continue
            if not ready:
                continue
            data = os.read(fd, CHUNK_BYTES)
            passed, leave = keys.feed(data)
            if leave or not data:
                return True
            if passed and not self._send(passed):
                break
        self._done.wait(POLL_S * 10)
        return False

    def _send(self, data: bytes) -> bool:
        try:
            self._sandbox.pty.send_stdin(self._handle.pid, data, request_timeout=10)
        except Exception as error:  # noqa: BLE001 - a shell that ends while a key is on its way is no error
            if not self._done.wait(1.0):
                self._error = error
            return False
        return True

    def _follow_size(self) -> None:
        if not self._resized:
            return
        self._resized = False
        from e2b import PtySize

        rows, columns = terminal_size()
        try:
            self._sandbox.pty.resize(self._handle.pid, PtySize(rows=rows, cols=columns), request_timeout=10)
        except Exception:  # noqa: BLE001 - a wrong size is a nuisance; the stream itself tells when the shell is gone
            return

    def _keep_alive(self) -> None:
        """In a thread of its own, so that keys do not wait for it."""
        if time.monotonic() < self._keep_alive_at:
            return
        self._keep_alive_at = time.monotonic() + KEEP_ALIVE_EVERY_S
        threading.Thread(target=self._refresh, daemon=True).start()

    def _refresh(self) -> None:
        try:
            self._api.refresh(self._sandbox.sandbox_id, KEEP_ALIVE_FOR_S)
        except CliError:  # tried again soon; a sandbox that is gone ends the stream
            return

    def _kill(self) -> None:
        try:
            self._handle.kill()
        except Exception as error:  # noqa: BLE001 - we are leaving; say what may be left behind
            warn(f"the shell may still run: {error}")


def _write_all(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(sys.stdout.fileno(), left) :]


def _raise_ended(number: int, _frame: FrameType | None) -> None:
    raise Ended(number)
