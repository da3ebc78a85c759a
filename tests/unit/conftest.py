from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@pytest.fixture
def root() -> None:
    """For tests that make namespaces and mounts. They do not skip: a run that cannot have them has not tested the product."""
    if os.geteuid() != 0:
        pytest.fail("this test needs root (network namespaces, mounts): run `make test` as root")


@dataclass
class SmallDisk:
    """A file system of its own that fills quickly."""

    path: Path

    def resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", self.path], check=True)


@pytest.fixture
def small_disk(root: None, tmp_path: Path) -> Iterator[Callable[[str], SmallDisk]]:
    """Mounts file systems in memory, of sizes such as `3m`; they go with the test."""
    mounted: list[Path] = []

    def make(size: str) -> SmallDisk:
        place = tmp_path / f"small-{len(mounted)}"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "small", place], check=True)
        mounted.append(place)
        return SmallDisk(place)

    yield make
    for place in mounted:
        subprocess.run(["umount", place], check=True)
