"""Reading the data of sparse files ahead."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agentenv.host.files import warm

MB = 1 << 20


@pytest.mark.parametrize(
    ("size_mb", "data_at_mb", "limit_mb", "expected_mb"),
    [(64, (), 64, 0), (64, (0,), 64, 1), (64, (3, 40, 63), 64, 3), (64, (3, 40, 63), 2, 2), (2, (0, 1), 64, 2), (0, (), 64, 0)],
)
def test_only_data_is_read_and_no_more_than_allowed(
    tmp_path: Path, size_mb: int, data_at_mb: tuple[int, ...], limit_mb: int, expected_mb: int
):
    path = tmp_path / "sparse"
    with path.open("wb") as out:
        for at in data_at_mb:
            out.seek(at * MB)
            out.write(os.urandom(MB))
        out.truncate(size_mb * MB)
    assert warm(path, limit_mb * MB) == expected_mb * MB


def test_of_a_device_nothing_is_read(root: None, tmp_path: Path):
    device = tmp_path / "device"
    os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(7, 250))  # nothing is there: to open it would fail
    assert warm(device, MB) == 0
