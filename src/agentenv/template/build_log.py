"""What a build says while it goes on, numbered from 0: readers ask for what comes after the entries they have seen.

One JSON object a line in a file of its own, so that it outlives the server; a live build's entries are in memory as well.
Bounded in entries and in the length of each; the last words of a build always fit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from agentenv.core.clock import Clock
from agentenv.core.errors import StorageFull
from agentenv.core.model import LOG_LEVELS, LogLevel

ENTRIES_MAX = 10_000  # a build prints thousands of lines when it installs packages; a loop that prints for ever must not fill the disk
MESSAGE_MAX_CHARS = 2000
_SECRET_LEAST_CHARS = 4  # of a line that is concealed: shorter ones are in any text
_RESERVED = 100  # entries for what the build itself says after a step has printed too much
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildEntry:
    """One entry. `step` is as in `core.builds`."""

    timestamp_ms: int
    level: LogLevel
    message: str
    step: str = ""


_ENTRY = TypeAdapter(BuildEntry)


class BuildLog:
    """The log of a build that goes on. `close` it in the end."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        self.entries: list[BuildEntry] = []
        self._said_full = False
        self._secrets: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] | None = path.open("w", encoding="utf-8", errors="replace", buffering=1)
        except OSError as error:
            raise StorageFull(f"the log of the build cannot be written: {error.strerror}", "free some space") from error

    def conceal(self, secrets: Iterable[bytes]) -> None:
        """Never write these out, nor a line of them: whoever prints one by mistake is not the last to see it."""
        texts = (line.strip() for secret in secrets for line in secret.decode(errors="replace").splitlines())
        self._secrets = sorted({text for text in texts if len(text) >= _SECRET_LEAST_CHARS}, key=len, reverse=True)

    def concealed(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def add(self, message: str, step: str = "", level: LogLevel = "info") -> None:
        """Say something. Never fails: the build goes on without a log rather than not at all."""
        if len(self.entries) >= ENTRIES_MAX:
            return
        message = self.concealed(message)
        self._append(BuildEntry(self._clock.now_ms(), level, message[:MESSAGE_MAX_CHARS].encode(errors="replace").decode(), step))

    def output(self, line: str, step: str, level: LogLevel = "info") -> None:
        """A line that a program has printed; beyond a bound such lines are left out, and the log says so once."""
        if len(self.entries) < ENTRIES_MAX - _RESERVED:
            self.add(line, step, level)
        elif not self._said_full:
            self._said_full = True
            self.add(f"more output than {ENTRIES_MAX - _RESERVED} lines; the rest is left out", step, "warn")

    def close(self) -> None:
        """No more is written. Idempotent."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                _log.warning("the log of a build is not whole: %s", error)
            self._file = None

    def _append(self, entry: BuildEntry) -> None:
        self.entries.append(entry)
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(asdict(entry)) + "\n")
        except OSError as error:  # a full disk; what is in memory is still there for those who follow the build
            _log.warning("the log of a build is not whole: %s", error)
            self.close()


def read(path: Path) -> list[BuildEntry]:
    """The entries of a finished build; a line that a crash has cut is left out. Blocks."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    entries = []
    for line in lines[:ENTRIES_MAX]:
        try:
            entries.append(_ENTRY.validate_json(line))
        except ValueError:
            continue
    return entries


def at_least(entries: Iterable[BuildEntry], level: LogLevel) -> list[BuildEntry]:
    """Those of that level or a higher one."""
    lowest = LOG_LEVELS.index(level)
    return [entry for entry in entries if LOG_LEVELS.index(entry.level) >= lowest]


class LineCutter:
    """Cuts the pieces of one output stream into lines; what is too long for an entry is cut, too."""

    def __init__(self) -> None:
        self._rest = b""

    def lines(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 4 * MESSAGE_MAX_CHARS:
            whole, self._rest = [*whole, self._rest], b""
        return [_tidy(line) for line in whole]

    def rest(self) -> list[str]:
        """What comes after the last line end."""
        rest, self._rest = self._rest, b""
        return [_tidy(rest)] if rest else []


def _tidy(line: bytes) -> str:
    """Progress bars write over one line again and again: its last state is what counts."""
    text = line.decode(errors="replace").rstrip("\r")
    return text.rsplit("\r", 1)[-1]
