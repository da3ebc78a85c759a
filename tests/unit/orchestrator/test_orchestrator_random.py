"""The orchestrator under random interleavings of verbs, failures, dead VMs and killed servers. One seed is one story."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from random_driver import Driver

_FIRST_SEED = int(os.environ.get("AENV_TEST_SEED", "1"))
_SEEDS = int(os.environ.get("AENV_TEST_SEEDS", "12"))
_BATCHES = 40


@pytest.mark.parametrize("seed", range(_FIRST_SEED, _FIRST_SEED + _SEEDS))
async def test_nothing_is_lost_leaked_or_stuck_whatever_happens(ram_path: Path, seed: int) -> None:
    driver = Driver(ram_path / "node", seed)
    try:
        await driver.run(_BATCHES)
    except BaseException as error:
        story = "\n  ".join(driver.story)
        error.add_note(f"seed {seed} (run it alone with AENV_TEST_SEED={seed} AENV_TEST_SEEDS=1):\n  {story}")
        raise
    finally:
        await driver.node.close()
