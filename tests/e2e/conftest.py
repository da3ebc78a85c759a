"""Fixtures of the end-to-end tests beside the shared `node` (see `tests/conftest.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from e2e_node import Node


@pytest.fixture
def sandbox(node: Node) -> Iterator[Any]:
    """A fresh sandbox, killed in the end."""
    from e2b import Sandbox

    made = Sandbox.create("base", timeout=600, **node.options)
    yield made
    made.kill()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
