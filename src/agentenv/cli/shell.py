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
from agentenv.cli.output import info
from agentenv.cli.stream import Ended, Stream, ending_signals, write_all
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
        self._stream = Stream(sandbox)
        self._resized = False
        self._keep_alive_at = time.monotonic() + KEEP_ALIVE_EVERY_S

    def run(self) -> int:
        with ending_signals():
            previous = signal.signal(signal.SIGWINCH, self._note_resize)
            try:
                with raw():
                    self._stream.start(self._handle, on_pty=lambda data: write_all(sys.stdout.fileno(), data))
                    left = self._pump_input()
            except Ended as ended:
                self._stream.kill()
                return 128 + ended.number
            finally:
                signal.signal(signal.SIGWINCH, previous)
        if left:
            self._stream.kill()
            info("left the shell")
            return Exit.OK
        if self._stream.error is not None:
            sys.stderr.write("\n")  # after the guest's last output
        return self._stream.result()

    def _note_resize(self, _number: int, _frame: FrameType | None) -> None:
        self._resized = True

    def _pump_input(self) -> bool:
        """Pass keys on until the shell ends. True when the user left by the escape keys, or our terminal is gone."""
        keys = EscapeKeys()
        fd = sys.stdin.fileno()
        while not self._stream.done.is_set():
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
        self._stream.done.wait(POLL_S * 10)
        return False

    def _send(self, data: bytes) -> bool:
        try:
            self._sandbox.pty.send_stdin(self._handle.pid, data, request_timeout=10)
        except Exception as error:  # noqa: BLE001 - a shell that ends while a key is on its way is no error
            if not self._stream.done.wait(1.0):
                self._stream.error = error
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
