"""`aenv info`: all about one sandbox."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from agentenv.cli.output import duration, print_fields, print_json, when
from agentenv.cli.verb import format_option, id_argument, verb

_LABELS = {
    "envdVersion": "envd",
    "allowInternetAccess": "internet",
    "pauseMode": "paused with",
}
_LEFT_OUT = ("clientID", "alias", "templateID", "startedAt", "endAt", "cpuCount", "memoryMB", "diskSizeMB", "state", "sandboxID")
"""Shown by the first lines, or of no use to people."""


@verb("info", section="Sandboxes", aliases=("in",))
@id_argument
@format_option("-f")
def command(sandbox_id: str, as_json: bool) -> None:
    """Show all about one sandbox."""
    from agentenv.cli.api import Api, without_secrets

    with Api() as api:
        found = without_secrets(api.sandbox(api.full_id(sandbox_id)))
    if as_json:
        print_json(found)
    else:
        print_fields(_lines(found, datetime.now(UTC)))


def _lines(found: dict[str, Any], now: datetime) -> list[tuple[str, str]]:
    age = now - datetime.fromisoformat(found["startedAt"])
    left = datetime.fromisoformat(found["endAt"]) - now
    template = f"{found['alias']} ({found['templateID']})" if found.get("alias") else found["templateID"]
    lines = [
        ("id", found["sandboxID"]),
        ("template", template),
        ("state", found["state"]),
        ("started", f"{when(found['startedAt'])} ({duration(age.total_seconds())} ago)"),
    ]
    if found["state"] == "running":
        lines.append(("ends", f"{when(found['endAt'])} (in {duration(left.total_seconds())})"))
    lines.append(("machine", f"{found['cpuCount']} CPU, {found['memoryMB']} MiB memory, {found['diskSizeMB']} MiB disk"))
    more = {name: value for name, value in found.items() if name not in _LEFT_OUT and value not in (None, {}, [], "")}
    return lines + [(_LABELS.get(name, name), _text(value)) for name, value in more.items()]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
