"""What happens when two calls meet at one sandbox.

They take turns, in the order they came: the second acts on what the first has left, and what it answers is decided then, not when it
was asked. So a pair needs no rule of its own. Three things do not wait: a kill ends the connections into the sandbox at once; the
children of a fork start after their source has its turn behind it; and layers are merged beside everything.
A first call that fails leaves the sandbox as it found it.
"""

from __future__ import annotations

from typing import NamedTuple

from agentenv.core.lifecycle import State


class Outcome(NamedTuple):
    """What a call answers, and the state it leaves."""

    answer: str  # "done", "nothing" (there is nothing to do), or the status of its refusal
    then: State


_RUNNING, _PAUSED, _KILLED = State.RUNNING, State.PAUSED, State.KILLED
_GONE = Outcome("404", _KILLED)


def _both(answer: str = "done") -> dict[State, Outcome]:
    return {_RUNNING: Outcome(answer, _RUNNING), _PAUSED: Outcome(answer, _PAUSED), _KILLED: _GONE}


#: By verb: what it does to a sandbox that it finds in one of the states a sandbox rests in.
OUTCOMES: dict[str, dict[State, Outcome]] = {
    "pause": {_RUNNING: Outcome("done", _PAUSED), _PAUSED: Outcome("409", _PAUSED), _KILLED: _GONE},
    "resume": {_RUNNING: Outcome("409", _RUNNING), _PAUSED: Outcome("done", _RUNNING), _KILLED: _GONE},
    "connect": {_RUNNING: Outcome("done", _RUNNING), _PAUSED: Outcome("done", _RUNNING), _KILLED: _GONE},
    "traffic": {_RUNNING: Outcome("done", _RUNNING), _PAUSED: Outcome("done", _RUNNING), _KILLED: _GONE},
    "set timeout": {_RUNNING: Outcome("done", _RUNNING), _PAUSED: Outcome("409", _PAUSED), _KILLED: _GONE},
    "refresh": _both(),
    "fork": _both(),
    "snapshot": _both(),
    "checkpoint": _both(),
    "rollback": _both(),
    "set network": {_RUNNING: Outcome("done", _RUNNING), _PAUSED: Outcome("409", _PAUSED), _KILLED: _GONE},
    "kill": {_RUNNING: Outcome("done", _KILLED), _PAUSED: Outcome("done", _KILLED), _KILLED: _GONE},
    "timeout (kill)": {
        _RUNNING: Outcome("done", _KILLED),
        _PAUSED: Outcome("nothing", _PAUSED),
        _KILLED: Outcome("nothing", _KILLED),
    },
    "timeout (pause)": {
        _RUNNING: Outcome("done", _PAUSED),
        _PAUSED: Outcome("nothing", _PAUSED),
        _KILLED: Outcome("nothing", _KILLED),
    },
}

#: After these the time that was up is not up any more: the timeout looks again when its turn comes.
EXTENDS = frozenset({"resume", "connect", "set timeout", "refresh", "traffic"})


def meeting(found: State, first: str, second: str) -> Outcome:
    """What `second` does that comes while `first` is under way on a sandbox that was `found` so.

    Both are keys of `OUTCOMES`; `found` is running or paused.
    """
    answer, left = OUTCOMES[first][found]
    extended = answer == "done" and first in EXTENDS and not (first == "traffic" and found is State.RUNNING)
    if second.startswith("timeout") and left is State.RUNNING and extended:
        return Outcome("nothing", left)
    return OUTCOMES[second][left]
