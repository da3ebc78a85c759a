"""This machine's node for the length of a script: started unless it is up, and left as it was found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

AENV = Path(sys.executable).parent / "aenv"


@contextmanager
def node() -> Iterator[dict[str, str]]:
    """Yields the variables that point E2B clients at the node; it is brought down in the end unless it was up before."""
    was_up = subprocess.run([str(AENV), "ls", "--json"], check=False, capture_output=True).returncode == 0
    try:
        if subprocess.run([str(AENV), "up", "--detach"], check=False).returncode != 0:
            sys.exit(1)  # it has said why
        yield json.loads(subprocess.run([str(AENV), "env", "--json"], check=True, capture_output=True).stdout)
    finally:
        if not was_up:
            subprocess.run([str(AENV), "down"], check=False)
