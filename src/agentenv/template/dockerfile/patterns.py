"""Sources of COPY and ADD as paths: literal, or with the wildcards of Go's `filepath.Match`, which BuildKit uses.

`*` and `?` match anything but `/`, a dot at the beginning included; `[a-z]`, `[^a]` and `\\\\` are as usual.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentenv.core.errors import InvalidInput

_WILDCARDS = frozenset("*?[\\")
Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourcePath:
    """A source: its parts, and for each a pattern, or None where it is meant literally."""

    text: str
    parts: Parts
    patterns: tuple[re.Pattern[str] | None, ...]

    @property
    def is_pattern(self) -> bool:
        """Whether it has a wildcard, so that it may match nothing."""
        return any(pattern is not None for pattern in self.patterns)

    def match(self, parts: Parts) -> tuple[Parts, Parts] | None:
        """What of an entry's path names a match, and what comes below it; None when it belongs to none."""
        count = len(self.parts)
        if len(parts) < count or not all(self.fits(at, part) for at, part in enumerate(parts[:count])):
            return None
        return parts[:count], parts[count:]

    def fits(self, at: int, name: str) -> bool:
        """Whether the part at that place may be `name`."""
        pattern = self.patterns[at]
        return name == self.parts[at] if pattern is None else pattern.fullmatch(name) is not None


def parse_source(text: str) -> SourcePath:
    """A source below the root; `.` is the root itself. InvalidInput when a pattern is none."""
    parts = tuple(part for part in text.split("/") if part not in ("", "."))
    return SourcePath(text, parts, tuple(_compiled(part, text) if _WILDCARDS & set(part) else None for part in parts))


def _compiled(part: str, text: str) -> re.Pattern[str]:
    out, at = "", 0
    while at < len(part):
        char, at = part[at], at + 1
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[":
            group, at = _group(part, at, text)
            out += group
        elif char == "\\":
            if at == len(part):
                raise _no_pattern(text)
            out, at = out + re.escape(part[at]), at + 1
        else:
            out += re.escape(char)
    return re.compile(out, re.DOTALL)


def _group(part: str, at: int, text: str) -> tuple[str, int]:
    """What stands between brackets, and where it ends."""
    out = "["
    if part[at : at + 1] == "^":
        out, at = out + "^", at + 1
    first = at
    while at < len(part):
        if part[at] == "]" and at > first:
            return out + "]", at + 1
        low, at = _one(part, at, text)
        high = low
        if part[at : at + 1] == "-":
            high, at = _one(part, at + 1, text)
        if low > high:
            raise _no_pattern(text)
        out += f"{re.escape(low)}-{re.escape(high)}"
    raise _no_pattern(text)


def _one(part: str, at: int, text: str) -> tuple[str, int]:
    if part[at : at + 1] == "\\":
        at += 1
    elif part[at : at + 1] in ("-", "]"):
        raise _no_pattern(text)
    if at >= len(part):
        raise _no_pattern(text)
    return part[at], at + 1


def _no_pattern(text: str) -> InvalidInput:
    return InvalidInput(f"{text[:200]!r} is no pattern: a bracket or a backslash has no end")
