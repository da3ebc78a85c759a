"""Sources of COPY and ADD as paths: literal, or with the wildcards of Go's `filepath.Match`, which BuildKit uses.

`*` and `?` match anything but `/`, a dot at the beginning included; `[a-z]`, `[^a]` and `\\\\` are as usual. With --parents `**` stands
for any folders, none included, and what comes before `/./` is not kept.
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
    pivot: int = 0  # how many parts are not kept by --parents
    deep: int | None = None  # where the first `**` is

    @property
    def is_pattern(self) -> bool:
        """Whether it has a wildcard, so that it may match nothing."""
        return any(pattern is not None for pattern in self.patterns)

    def match(self, parts: Parts) -> tuple[Parts, Parts] | None:
        """What of an entry's path names a match, and what comes below it; None when it belongs to none."""
        if self.deep is not None:
            return self._match_deep(parts)
        count = len(self.parts)
        if len(parts) < count or not all(self.fits(at, part) for at, part in enumerate(parts[:count])):
            return None
        return parts[:count], parts[count:]

    def above(self) -> str:
        """The folder below which all matches are."""
        return "/".join(self.parts[: self.deep])

    def _match_deep(self, parts: Parts) -> tuple[Parts, Parts] | None:
        reached = self._skip({0})
        for count in range(len(parts) + 1):
            if len(self.parts) in reached:
                return parts[:count], parts[count:]
            if count == len(parts):
                break
            on = {at + 1 for at in reached if at < len(self.parts) and self.parts[at] != "**" and self.fits(at, parts[count])}
            reached = self._skip(on | {at for at in reached if at < len(self.parts) and self.parts[at] == "**"})
        return None

    def _skip(self, reached: set[int]) -> set[int]:
        """With the places behind every `**`, which may stand for no folder."""
        for at in range(len(self.parts)):
            if at in reached and self.parts[at] == "**":
                reached = reached | {at + 1}
        return reached

    def fits(self, at: int, name: str) -> bool:
        """Whether the part at that place may be `name`."""
        pattern = self.patterns[at]
        return name == self.parts[at] if pattern is None else pattern.fullmatch(name) is not None


def parse_source(text: str, parents: bool = False) -> SourcePath:
    """A source below the root; `.` is the root itself. InvalidInput when a pattern is none."""
    parts = _split(text)
    patterns = tuple(_compiled(part, text) if _WILDCARDS & set(part) else None for part in parts)
    if not parents:
        return SourcePath(text, parts, patterns)
    before, pivot, _ = text.partition("/./")
    return SourcePath(text, parts, patterns, len(_split(before)) if pivot else 0, parts.index("**") if "**" in parts else None)


def _split(text: str) -> Parts:
    return tuple(part for part in text.split("/") if part not in ("", "."))


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
