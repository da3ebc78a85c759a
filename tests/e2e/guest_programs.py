"""Programs that tests run in guests, and how to read what they say."""

from __future__ import annotations

import time
from typing import Any

#: Counts in a file, replaced in one step so that a reader never sees half of it.
COUNT = "i=0; while :; do i=$((i+1)); echo $i > .n; mv .n n; sleep 0.1; done"

#: Waits are this long: a busy machine makes a guest slow, not wrong.
PATIENCE_S = 60


def start_counter(sandbox: Any) -> Any:
    """Start counting and wait until it has begun."""
    handle = sandbox.commands.run(COUNT, background=True, timeout=0)
    wait_for(lambda: sandbox.files.exists("n"), "the counter does not start")
    return handle


def count(sandbox: Any) -> int:
    """What the counter has reached."""
    return int(sandbox.files.read("n"))


def wait_beyond(sandbox: Any, value: int) -> None:
    """Wait until the counter has passed `value`."""
    wait_for(lambda: count(sandbox) > value, f"the counter stands still at {value}")


def wait_for(condition: Any, complaint: str) -> None:
    """Poll until `condition()` is true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, complaint
        time.sleep(0.1)
