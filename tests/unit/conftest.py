from __future__ import annotations

import os

import pytest


@pytest.fixture
def root() -> None:
    """For tests that make namespaces and mounts. They do not skip: a run that cannot have them has not tested the product."""
    if os.geteuid() != 0:
        pytest.fail("this test needs root (network namespaces, mounts): run `make test` as root")
