"""Which sizes of a disk may be asked for."""

from __future__ import annotations

import pytest

from agentenv.core.disk_size import check_most, with_disk
from agentenv.core.errors import InvalidInput
from agentenv.core.model import Machine

MACHINE = Machine(1, 512, 8192)


@pytest.mark.parametrize(("asked_mb", "expected_mb"), [(None, 8192), (8192, 8192), (8193, 8193), (65536, 65536)])
def test_as_much_or_more(asked_mb: int | None, expected_mb: int) -> None:
    assert with_disk(MACHINE, asked_mb, "template base") == Machine(1, 512, expected_mb)


@pytest.mark.parametrize("asked_mb", [1, 8191])
def test_less_is_refused_with_what_there_is(asked_mb: int) -> None:
    with pytest.raises(InvalidInput, match=f"diskSizeMB: {asked_mb} is less than the 8192 of template base.*more"):
        with_disk(MACHINE, asked_mb, "template base")


def test_the_nodes_most() -> None:
    check_most(None, 1024)
    check_most(1024, 1024)
    with pytest.raises(InvalidInput, match=r"diskSizeMB: 1025 is more .*limits\.disk_mb_of_sandbox"):
        check_most(1025, 1024)
