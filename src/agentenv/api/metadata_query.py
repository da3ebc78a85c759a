"""The `metadata` filter of the lists, which arrives encoded three deep (contract section 2.3).

The caller percent-encodes each key and value, form-encodes the pairs, and the HTTP client encodes that as a query value. The
web framework has undone the last step; here are the other two.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

from agentenv.core.errors import InvalidInput

_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_NEXT_STEP = "send metadata=<key>=<value>&... with each key and value percent-encoded, and the whole encoded once more"


def parse_metadata_filter(query_value: str) -> dict[str, str]:
    """The pairs that must all be equal; no text means no filter. InvalidInput when it is not of that form."""
    if not query_value:
        return {}
    wanted: dict[str, str] = {}
    for pair in _decode(query_value).split("&"):
        key, equals, value = pair.partition("=")
        if not equals or "=" in value:
            raise InvalidInput(f"metadata: {pair[:80]!r} is not of the form key=value", _NEXT_STEP)
        name = _decode(key)
        if name in wanted:
            raise InvalidInput(f"metadata: key {name[:80]!r} is given twice", _NEXT_STEP)
        wanted[name] = _decode(value)
    return wanted


def _decode(text: str) -> str:
    if _BROKEN_ESCAPE.search(text):
        raise InvalidInput(f"metadata: {text[:80]!r} holds a % that starts no escape", _NEXT_STEP)
    try:
        return unquote_plus(text, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"metadata: {text[:80]!r} does not decode to UTF-8 text", _NEXT_STEP) from error
