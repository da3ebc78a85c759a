"""Where the native programs are: inside the package, put there by the build."""

from __future__ import annotations

from pathlib import Path

from agentenv.core.errors import HostNotReady

FOLDER = Path(__file__).parents[1] / "_bin"


def program(name: str) -> Path:
    """The path of one of them. HostNotReady when the package was not built."""
    path = FOLDER / name
    if not path.is_file():
        raise HostNotReady(f"the native program {name} is missing ({path})", "build it with `make setup`, or install the wheel")
    return path
