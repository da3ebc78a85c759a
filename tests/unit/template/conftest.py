from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from build_rig import Rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    await made.builds.open()
    yield made
    await made.builds.close()
    made.assert_rests()
