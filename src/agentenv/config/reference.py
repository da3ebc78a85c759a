"""Texts generated from the schema: `default.toml` and the reference page. A test checks that the files in the tree are fresh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentenv.config.load import settings, variable


def _toml(value: Any) -> str:
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, tuple):
        value = list(value)
    return json.dumps(value)


def default_toml() -> str:
    """A configuration file that spells out every default."""
    lines = ["# Every setting with its default. Copy what you change to /etc/agentenv/config.toml."]
    current = ""
    for section, key, field in settings():
        if section != current:
            lines += ["", f"[{section}]"]
            current = section
        lines += [f"# {field.description}  ({variable(section, key)})", f"{key} = {_toml(field.default)}"]
    return "\n".join(lines) + "\n"


def reference_page() -> str:
    """The settings as a Markdown page."""
    lines = [
        "# Settings",
        "",
        "Read from `/etc/agentenv/config.toml` (or the file `AENV_CONFIG` names), then from the environment; the last wins.",
        "Lists in the environment have commas between their items, or are JSON arrays.",
    ]
    current = ""
    for section, key, field in settings():
        if section != current:
            lines += ["", f"## {section}", "", "| setting | default | variable | meaning |", "|---|---|---|---|"]
            current = section
        lines.append(f"| `{key}` | `{_toml(field.default)}` | `{variable(section, key)}` | {field.description} |")
    return "\n".join(lines) + "\n"
