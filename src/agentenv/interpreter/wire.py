"""The lines of a reply to `POST /execute`, and how a worker's results become them (contract section 4).

Every line is ASCII JSON: JavaScript clients decode each network chunk by itself, so no character may be split over two. A
representation that is absent is absent from the line, too. Own media types carry what notebooks have no name for.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

DATA_TYPE = "application/vnd.agentenv.data+json"
"""A table as column name -> values."""
CHART_TYPE = "application/vnd.agentenv.chart+json"
"""What a matplotlib figure shows."""

_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    DATA_TYPE: "data",
    CHART_TYPE: "chart",
}

Line = dict[str, Any]


def encode(line: Line) -> bytes:
    """One line of the stream."""
    return json.dumps(line).encode("ascii") + b"\n"


def output(stream: str, text: str) -> Line:
    """Output of a cell; `stream` is `stdout` or `stderr`."""
    return {"type": stream, "text": text, "timestamp": datetime.now(UTC).isoformat()}


def error(name: str, value: str, traceback: str = "") -> Line:
    """A cell that failed. Clients read all three, so none is ever absent."""
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def result(bundle: dict[str, Any], is_main: bool) -> Line:
    """A result from its representations by media type. `is_main` tells the value of the cell's last expression from displays."""
    line: Line = {"type": "result", "is_main_result": is_main}
    extra = {}
    for media_type, value in bundle.items():
        if value is None or value == {}:
            continue
        field = _FIELDS.get(media_type)
        if field is None:
            extra[media_type] = value
        else:
            line[field] = _unquoted(value) if field == "text" else value
    return {**line, "extra": extra} if extra else line


def _unquoted(text: Any) -> Any:
    """A string's text is the string, not its representation: clients compare `execution.text` with what they expect."""
    if isinstance(text, str) and len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


KEEPALIVE: Line = {"type": "keepalive"}
END: Line = {"type": "end_of_execution"}
