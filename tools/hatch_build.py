"""Wheel hook: build the native programs and carry them in the wheel, which is then of this platform only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs `tools/build_native.py` for real wheels; an editable install uses the tree as it is."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it packs the wheel."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "tools"))
        from build_native import build

        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
        for path in build():
            build_data["force_include"][str(path)] = f"agentenv/_bin/{path.name}"
