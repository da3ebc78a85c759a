"""Fixtures of the end-to-end tests beside the shared `node` (see `tests/conftest.py`)."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from e2e_node import Node, busybox

PROGRAMS = ("sh", "cat", "chmod", "echo", "id", "ls", "mkdir", "pwd", "sed", "sleep", "test", "touch")


@pytest.fixture
def sandbox(node: Node) -> Iterator[Any]:
    """A fresh sandbox, killed in the end."""
    from e2b import Sandbox

    made = Sandbox.create("base", timeout=600, **node.options)
    yield made
    made.kill()


@pytest.fixture
def debian(node: Node, tmp_path: Path) -> Iterator[str]:
    """The name of an image that the node takes for Debian: a root file system of busybox, so that no registry is asked."""
    path, name = tmp_path / "root.tar", "debian:12"
    files = {"bin/busybox": (busybox().read_bytes(), 0o755), "etc/os-release": (b"NAME=stand-in\n", 0o644)}
    files["etc/passwd"] = (b"root:x:0:0:root:/:/bin/sh\n", 0o644)
    with tarfile.open(path, "w") as archive:
        for where, (content, mode) in files.items():
            info = tarfile.TarInfo(where)
            info.size, info.mode = len(content), mode
            archive.addfile(info, BytesIO(content))
        for program in PROGRAMS:
            link = tarfile.TarInfo(f"bin/{program}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    node.aenv("image", "import", str(path), name)
    yield name
    node.aenv("image", "remove", name, check=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A failed test does not leave its sandboxes to the next ones, which count what there is."""
    node = item.funcargs.get("node") if isinstance(item, pytest.Function) else None
    if not isinstance(node, Node):
        yield
        return
    before = node.sandbox_ids()
    outcome = yield
    if outcome.excinfo is not None:  # type: ignore[attr-defined]
        for sandbox_id in node.sandbox_ids() - before:
            node.aenv("kill", sandbox_id, check=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
