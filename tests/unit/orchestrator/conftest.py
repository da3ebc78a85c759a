from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentenv.testing.fake_node import FakeNode

_RAM = Path("/dev/shm")


@pytest.fixture
def ram_path() -> Iterator[Path]:
    """A folder in memory: these tests make hundreds of databases, and none of them is about the disk."""
    with tempfile.TemporaryDirectory(prefix="aenv-test-", dir=_RAM if _RAM.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
async def node(ram_path: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode(ram_path / "node")
    await node.start_server()
    yield node
    await node.close()
