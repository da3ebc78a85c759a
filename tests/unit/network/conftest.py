from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture
def scratch_namespace(root: None) -> Iterator[str]:
    """A namespace of the test's own, for rules that must not touch the host's."""
    name = f"aenvtest-rules-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True)
