"""How far a message body reaches: scanners that count body bytes without touching them.

Invariants:
- `take(data)` returns how many leading bytes of `data` belong to the body; only once `done` is true may that be fewer than all.
- The chunk scanner accepts exactly the strict grammar (CRLF line ends, bare hex size, bounded lines, well-formed trailers), so the
  bytes it lets pass mean the same to every server behind us. Anything else raises `FramingError` at the first wrong line.
- Nothing is buffered but one unfinished line (bounded in `limits`).
"""

from __future__ import annotations

import re
from typing import Protocol

from agentenv.proxy.limits import CHUNK_LINE_BYTES_MAX, TRAILER_BYTES_MAX

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[\t\x20-\x7e\x80-\xff]*\r\n")
FORBIDDEN_TRAILERS = frozenset(
    (b"content-length", b"transfer-encoding", b"host", b"connection", b"trailer", b"upgrade", b"e2b-sandbox-id", b"e2b-sandbox-port")
)

_SIZE, _DATA, _DATA_END, _TRAILER, _DONE = range(5)


class FramingError(Exception):
    """The body breaks the chunk grammar; the connection cannot be used any further."""


class BodyScanner(Protocol):
    """Counts the bytes of one message body."""

    done: bool

    def take(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """Count the leading bytes of `data` that belong to the body; append their content to `payload` if given.

        Raises FramingError.
        """


class LengthBody:
    """A body of known length (> 0)."""

    __slots__ = ("_left", "done")

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self.done = size_bytes == 0

    def take(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """See `BodyScanner.take`."""
        count = len(data)
        if count >= self._left:
            count = self._left
            self.done = True
        self._left -= count
        if payload is not None:
            payload.append(data[:count])
        return count


class UntilCloseBody:
    """A response body that ends with the connection; never done by itself."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False

    def take(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """See `BodyScanner.take`."""
        if payload is not None:
            payload.append(data)
        return len(data)


class ChunkScanner:
    """A chunked body, its trailers included; `trailers` are bounded like its lines."""

    __slots__ = ("_left", "_line", "_state", "_trailer_bytes", "done", "trailers")

    def __init__(self) -> None:
        self._state = _SIZE
        self._left = 0
        self._line = b""
        self._trailer_bytes = 0
        self.done = False
        self.trailers: list[tuple[bytes, bytes]] = []

    def take(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """See `BodyScanner.take`."""
        pos, end = 0, len(data)
        while pos < end and not self.done:
            if self._state == _DATA:
                count = min(self._left, end - pos)
                if payload is not None:
                    payload.append(data[pos : pos + count])
                pos += count
                self._left -= count
                if not self._left:
                    self._state = _DATA_END
            elif self._state == _SIZE and not self._line and (match := _SIZE_LINE.match(data, pos, pos + CHUNK_LINE_BYTES_MAX)):
                pos = match.end()
                self._size_known(int(match[1], 16))
            elif self._state == _DATA_END and not self._line and data.startswith(b"\r\n", pos):
                pos += 2
                self._state = _SIZE
            else:
                pos = self._slow_line(data, pos)
        return pos

    def _size_known(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._state = _DATA if size_bytes else _TRAILER

    def _slow_line(self, data: bytes, pos: int) -> int:
        """Take a line that may be split over several reads; returns the new position."""
        newline = data.find(b"\n", pos)
        stop = len(data) if newline < 0 else newline + 1
        if len(self._line) + stop - pos > max(CHUNK_LINE_BYTES_MAX, TRAILER_BYTES_MAX):
            raise FramingError("a chunk or trailer line is too long")
        self._line += data[pos:stop]
        if newline >= 0:
            line, self._line = self._line, b""
            self._whole_line(line)
        else:
            self._check_partial_line()
        return stop

    def _check_partial_line(self) -> None:
        """Refuse early what can never become a good line, instead of waiting for its end."""
        line = self._line
        if self._state == _DATA_END and not b"\r\n".startswith(line):
            raise FramingError("a chunk is longer than its size says")
        if self._state == _SIZE and (len(line) > CHUNK_LINE_BYTES_MAX or not re.match(rb"[0-9A-Fa-f]{1,15}(?:[;\r]|\Z)", line)):
            raise FramingError("a chunk size is not a plain hexadecimal number")

    def _whole_line(self, line: bytes) -> None:
        if self._state == _DATA_END:
            if line != b"\r\n":
                raise FramingError("a chunk is longer than its size says")
            self._state = _SIZE
        elif self._state == _SIZE:
            match = _SIZE_LINE.fullmatch(line)
            if match is None or len(line) > CHUNK_LINE_BYTES_MAX:
                raise FramingError("a chunk size is not a plain hexadecimal number")
            self._size_known(int(match[1], 16))
        elif line == b"\r\n":
            self._state = _DONE
            self.done = True
        else:
            self._trailer(line)

    def _trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > TRAILER_BYTES_MAX:
            raise FramingError(f"the trailers are larger than {TRAILER_BYTES_MAX} bytes")
        match = _TRAILER_LINE.fullmatch(line)
        if match is None:
            raise FramingError("a trailer line is malformed")
        name = match[1].lower()
        if name in FORBIDDEN_TRAILERS:
            raise FramingError(f"the field {match[1].decode()} is not allowed in trailers")
        self.trailers.append((name, line.partition(b":")[2].strip()))
