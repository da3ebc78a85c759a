"""RFC 3339 text to epoch time (contract section 2.1); the other direction is `core.clock.rfc3339`."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:[Zz]|([+-])(\d\d):(\d\d))")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_rfc3339_us(text: str) -> int:
    """Microseconds since the epoch, finer digits cut off. ValueError when `text` is not an RFC 3339 time."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError(f"not an RFC 3339 time: {text[:64]!r}")
    date, clock, fraction, sign, offset_hours, offset_minutes = match.groups()
    whole_s = int((datetime.fromisoformat(f"{date}T{clock}+00:00") - _EPOCH).total_seconds())
    if sign:
        if int(offset_hours) > 23 or int(offset_minutes) > 59:
            raise ValueError(f"not an RFC 3339 time: {text[:64]!r}")
        offset_s = int(offset_hours) * 3600 + int(offset_minutes) * 60
        whole_s += -offset_s if sign == "+" else offset_s
    return whole_s * 1_000_000 + int((fraction or "").ljust(9, "0")[:6] or "0")
