"""The modes of --chmod: octal, or symbolic as in `u=rwX,go=rX`, which goes from the mode that each file has.

Without a letter for whom, what the usual umask (022) forbids stays as it is, as in BuildKit and chmod.
"""

from __future__ import annotations

import re

from agentenv.core.errors import InvalidInput

_OCTAL = re.compile(r"0?[0-7]{1,4}")
_CLAUSE = re.compile(r"(?P<who>[ugoa]*)(?P<changes>(?:[-+=](?:[rwxXst]*|[ugo]))+)")
_CHANGE = re.compile(r"([-+=])([rwxXst]*|[ugo])(?=[-+=]|$)")
_SHIFTS = {"u": 6, "g": 3, "o": 0}
_BITS = {"r": 4, "w": 2, "x": 1}
_SPECIAL = {"u": 0o4000, "g": 0o2000}
_UMASK = 0o022


def check_mode(text: str) -> str:
    """The mode in the form that `apply_mode` takes. InvalidInput."""
    if _OCTAL.fullmatch(text):
        return f"{int(text, 8):o}"
    clauses = text.split(",")
    if not all(_CLAUSE.fullmatch(clause) and _is_change(clause) for clause in clauses):
        raise InvalidInput(f"--chmod={text[:80]}: it is neither octal nor symbolic", "write --chmod=755 or --chmod=u=rwX,go=rX")
    return text


def apply_mode(text: str, mode: int, is_folder: bool) -> int:
    """What `mode` becomes."""
    if _OCTAL.fullmatch(text):
        return int(text, 8)
    for clause in text.split(","):
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise InvalidInput(f"{clause[:80]!r} is no mode")
        who = found["who"]
        mask = 0o7777 if who else ~_UMASK & 0o7777
        for operation, what in _CHANGE.findall(found["changes"]):
            mode = _changed(mode, operation, what, who.replace("a", "ugo") or "ugo", mask, is_folder)
    return mode


def _is_change(clause: str) -> bool:
    changes = clause.lstrip("ugoa")
    return "".join(operation + what for operation, what in _CHANGE.findall(changes)) == changes


def _changed(mode: int, operation: str, what: str, who: str, mask: int, is_folder: bool) -> int:
    bits = whole = 0
    for one in set(who):
        shift = _SHIFTS[one]
        whole |= 7 << shift | _SPECIAL.get(one, 0o1000)
        value = (mode >> _SHIFTS[what] & 7) if what in _SHIFTS else sum(_BITS.get(letter, 0) for letter in set(what))
        if "X" in what and (is_folder or mode & 0o111):
            value |= 1
        bits |= value << shift
        bits |= _SPECIAL.get(one, 0) if "s" in what else 0
    bits |= 0o1000 if "t" in what and "o" in who else 0
    bits &= mask
    if operation == "+":
        return mode | bits
    if operation == "-":
        return mode & ~bits
    kept = 0o6000 if is_folder and "s" not in what else 0  # as chmod does: a folder's setgid is not taken away in passing
    return mode & ~(whole & ~kept) | bits
