"""A create that wakes a VM which stands ready (`warm.sandboxes`), in turn with the limit. The node must keep one ready."""

from __future__ import annotations

import re
import time
from typing import Any

from samples import COMMAND, Crowd, N, step, summaries
from verbs import create, kill

from agentenv.config.load import load
from limit import Bare, restore_and_run

_DEADLINE_S = 120.0


def measure(crowd: Crowd, bare: Bare) -> dict[str, Any]:
    """Creates, each of which finds one ready, and the limit."""
    step(f"create from a VM that stands ready, in turn with the limit, {N} times")
    found: dict[str, list[float]] = {"limit": [], "create": []}
    ready = _stood_ready()
    kill(create())  # a template that was used once has none ready yet
    for number in range(N + 1):
        took, made = crowd.together([create])
        if number:  # the first one finds none, either
            found["create"] += took
            found["limit"].append(restore_and_run(bare, COMMAND))
        for one in made:
            kill(one)
        ready = _wait_for_more_than(ready)
    return summaries(found)


def _stood_ready() -> int:
    """How many the node has made so far, by its log."""
    return len(re.findall(r" stands ready", (load().node.home / "log" / "server.log").read_text(errors="replace")))


def _wait_for_more_than(before: int) -> int:
    end = time.monotonic() + _DEADLINE_S
    while (now := _stood_ready()) <= before:
        if time.monotonic() > end:
            raise RuntimeError("the node makes no VM ready; its log says why")
        time.sleep(0.02)
    return now
