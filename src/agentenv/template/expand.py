"""Variables in the arguments of steps, as Dockerfiles have them: `$NAME`, `${NAME}`, `${NAME:-word}`, `${NAME:+word}`, and `\\$`."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REFERENCE = re.compile(
    r"\\\$|\$(?:(?P<plain>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<operator>[-+])(?P<word>[^{}]*))?\})"
)


def names_in(text: str) -> set[str]:
    """The variables that `text` refers to, those in words of `${NAME:-word}` included."""
    found: set[str] = set()
    for match in _REFERENCE.finditer(text):
        if name := match["plain"] or match["name"]:
            found |= {name} | names_in(match["word"] or "")
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with its variables replaced; one that is not set is empty. What is no reference stays as it is."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "\\$":
            return "$"
        found = variables.get(match["plain"] or match["name"], "")
        if match["operator"] == "-":
            return found or expand(match["word"], variables)
        if match["operator"] == "+":
            return expand(match["word"], variables) if found else ""
        return found

    return _REFERENCE.sub(value, text)
