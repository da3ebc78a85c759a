"""The fake block server keeps the contract that the real one keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.testing.contracts import BlocksContract, BlocksRig, FakeDeviceFiles
from agentenv.testing.fake_blocks import FakeDevices


class TestFakeBlocks(BlocksContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> BlocksRig:
        return FakeDeviceFiles(FakeDevices(tmp_path / "stacks"), tmp_path)
