from __future__ import annotations

from collections.abc import Iterator

import pytest
from interpreter_rig import Interpreter, interpreter


@pytest.fixture(scope="module")
def server() -> Iterator[Interpreter]:
    with interpreter() as made:
        yield made
