"""`--secret id=...,src=...|env=...` of a build, as docker words it; what it holds is read here and sent with the build."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_TAKES = "id=NAME,src=FILE or id=NAME,env=VARIABLE"


def secrets_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--secret`, repeatable: contents by id."""
    text = "A secret for RUN --mount=type=secret; may be repeated."
    return click.option("--secret", multiple=True, metavar="id=NAME,src=FILE|env=VARIABLE", callback=_secrets, help=text)(command)


def _secrets(_context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for value in values:
        try:
            name, content = _read(value)
        except ValueError as error:
            raise click.BadParameter(str(error), param=parameter) from error
        if name in found:
            raise click.BadParameter(f"{name!r} is given twice", param=parameter)
        found[name] = content
    return found


def _read(text: str) -> tuple[str, bytes]:
    """Id and content of one. ValueError says what is wrong, and never shows a content."""
    fields: dict[str, str] = {}
    for part in next(csv.reader([text]), []):
        key, equals, value = part.strip().partition("=")
        key = {"source": "src"}.get(key.lower(), key.lower())
        if not equals or not value or key not in ("id", "src", "env", "type"):
            raise ValueError(f"{key[:40]!r} is not understood: write {_TAKES}")
        fields[key] = value
    kind, name = fields.get("type", ""), fields.get("id", "")
    if not name or kind not in ("", "file", "env") or ("src" in fields and "env" in fields):
        raise ValueError(f"write {_TAKES}")
    variable = fields.get("env") or (fields.get("src", name) if kind == "env" else "")
    if not variable and "src" not in fields and kind != "file":
        variable = name if name in os.environ else ""  # as docker does it
    if variable:
        if variable not in os.environ:
            raise ValueError(f"the variable {variable[:80]} of the secret {name[:80]!r} is not set")
        return name, os.environb[variable.encode()]
    path = Path(fields.get("src", name)).expanduser()
    try:
        return name, path.read_bytes()
    except OSError as error:
        raise ValueError(f"the file {path} of the secret {name[:80]!r} cannot be read: {error.strerror}") from error
