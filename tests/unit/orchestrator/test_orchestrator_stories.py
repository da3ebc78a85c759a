"""The orchestrator under overlapping calls, failures, dead VMs and killed servers: nothing is lost, leaked or stuck, whatever happens.

The same stories every time by default. `AENV_TEST_STORIES=500` writes so many new ones; a story that fails is printed with
what replays it.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from lifecycle_verbs import Stories

_MORE = int(os.environ.get("AENV_TEST_STORIES", "0"))

TestStories = Stories.TestCase
TestStories.pytestmark = [
    pytest.mark.timeout(0 if _MORE else 900),  # to shorten a story that fails takes up to five minutes
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),  # of servers that were killed before they began it
]
TestStories.settings = settings(
    max_examples=_MORE or 50,
    stateful_step_count=60,
    derandomize=not _MORE,
    database=None,
    print_blob=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
