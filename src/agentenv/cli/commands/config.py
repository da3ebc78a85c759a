"""`aenv config`: the settings."""

from __future__ import annotations

import json
import os
from typing import Any

from agentenv.cli.output import print_json, print_table
from agentenv.cli.verb import json_option, verb


@verb("config", section="Node")
@json_option
def command(as_json: bool) -> None:
    """Show every setting, its default and its variable.

    Settings come from /etc/agentenv/config.toml (or the file AENV_CONFIG names), then from the environment.
    """
    from agentenv.cli.node import config_in_force
    from agentenv.config.load import settings, variable

    values = config_in_force().model_dump(mode="json")
    rows = []
    for section, key, field in settings():
        default = field.get_default(call_default_factory=True)
        rows.append(
            {
                "setting": f"{section}.{key}",
                "value": values[section][key],
                "default": json.loads(json.dumps(default, default=os.fspath)),
                "variable": variable(section, key),
                "meaning": field.description or "",
            }
        )
    if as_json:
        print_json(rows)
        return
    shown = [
        (row["setting"], _text(row["value"]), _text(row["default"]) if row["value"] != row["default"] else "", row["variable"])
        for row in rows
    ]
    print_table(("SETTING", "VALUE", "DEFAULT (WHERE IT DIFFERS)", "VARIABLE"), shown)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"{', '.join(value[:2])}, ... ({len(value)})" if len(value) > 3 else ", ".join(value)
    return str(value) if value != "" else '""'
