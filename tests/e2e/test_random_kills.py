"""I01: everything is killed at random under load; nothing is left over, every sandbox works or says why not, creates go on.

`AENV_KILLS` (default 10) kills; `AENV_SEED` repeats the choices of a run (not its timing).
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from crashes import at_rest, blockd_info, health, kill, vmms, wait_nothing_left
from e2b import NotFoundException, Sandbox, SandboxException, SandboxState
from e2e_node import Node

KILLS = int(os.environ.get("AENV_KILLS", "10"))
SEED = int(os.environ.get("AENV_SEED", "0")) or random.randrange(1, 1 << 30)
WORKERS = 3
SANDBOXES_OF_WORKER = 2
RECOVER_S = 60
CALL_S = 90


@dataclass
class Load:
    """A client that uses sandboxes until told to stop, whatever happens to the node."""

    node: Node
    seed: int
    stop: threading.Event = field(default_factory=threading.Event)
    tokens: dict[str, str] = field(default_factory=dict)  # what each sandbox that should exist has in its file
    said: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    gone: set[str] = field(default_factory=set)  # those that were said not to be there, though nobody had killed them
    wordless: int = 0  # errors that say nothing

    def run(self) -> None:
        rng = random.Random(self.seed)
        while not self.stop.is_set():
            full = len(self.tokens) >= SANDBOXES_OF_WORKER
            verbs = ["exec", "exec", "pause", "resume", "fork", "kill"] if self.tokens else []
            verb = rng.choice([*verbs, *([] if full else ["create", "create"])])
            subject = "" if verb == "create" else rng.choice(sorted(self.tokens))
            try:
                getattr(self, f"_{verb}")(subject, rng)
                self.done[verb] += 1
            except Exception as error:  # noqa: BLE001 - the node is being killed; that it says something is all we ask
                text = f"{verb}: {type(error).__name__}: {error}"
                self.said[text[:160]] += 1
                self.wordless += not str(error)
                if subject in self.tokens and (isinstance(error, NotFoundException) or "not found" in str(error)):
                    self.tokens.pop(subject, None)
                    self.gone.add(subject)
                time.sleep(0.3)

    def _connect(self, sandbox_id: str) -> Any:
        return Sandbox.connect(sandbox_id, timeout=3600, request_timeout=CALL_S, **self.node.options)

    def _create(self, _subject: str, rng: random.Random) -> None:
        token = f"{rng.random()}"
        made = Sandbox.create("base", timeout=3600, request_timeout=CALL_S, **self.node.options)
        made.files.write("token", token, request_timeout=CALL_S)
        self.tokens[made.sandbox_id] = token

    def _exec(self, subject: str, _rng: random.Random) -> None:
        self._connect(subject).commands.run("cat token", timeout=CALL_S, request_timeout=CALL_S)

    def _pause(self, subject: str, _rng: random.Random) -> None:
        Sandbox.pause(subject, request_timeout=CALL_S, **self.node.options)

    def _resume(self, subject: str, _rng: random.Random) -> None:
        self._connect(subject)

    def _fork(self, subject: str, _rng: random.Random) -> None:
        for outcome in self._connect(subject).fork(count=1, timeout=3600, request_timeout=CALL_S):
            if isinstance(outcome, Sandbox):
                outcome.kill(request_timeout=CALL_S)

    def _kill(self, subject: str, _rng: random.Random) -> None:
        Sandbox.kill(subject, request_timeout=CALL_S, **self.node.options)
        self.tokens.pop(subject, None)


def strike(node: Node, rng: random.Random) -> str:
    """Kill somebody; the server is started again by whoever looks after it, here by us."""
    running = vmms(node)
    victim = rng.choice(["server", "blockd", "vmm", "vmm", "guest", "guest"])
    if victim == "server":
        node.kill_server()
        time.sleep(rng.random())
        node.up()
    elif victim == "blockd":
        kill(int(blockd_info(node)["pid"]))
    elif running and victim == "vmm":
        kill(rng.choice(sorted(running.values())))
    elif running:
        end = rng.choice(["c", "o", "b"])  # panic, power off, reboot
        chosen = Sandbox.connect(rng.choice(sorted(running)), timeout=3600, request_timeout=CALL_S, **node.options)
        with contextlib.suppress(SandboxException):  # its guest is gone before it has said that it began
            chosen.commands.run(f"sync; echo {end} | sudo tee /proc/sysrq-trigger", background=True)
        return f"guest by sysrq {end}"
    return victim


def require_recovered(node: Node, struck: str) -> None:
    """A new sandbox works within the time."""
    end, cause = time.monotonic() + RECOVER_S, ""
    while time.monotonic() < end:
        try:
            fresh = Sandbox.create("base", timeout=600, request_timeout=CALL_S, **node.options)
            assert fresh.commands.run("echo works", timeout=CALL_S).stdout == "works\n"
            fresh.kill()
            return
        except Exception as error:  # noqa: BLE001 - tried again until the deadline
            cause = str(error)
            time.sleep(0.3)
    raise AssertionError(f"no new sandbox works {RECOVER_S} s after the end of {struck}: {cause}")


def verify(node: Node, load: Load) -> Counter[str]:
    """Each works, with its content, or says why not."""
    outcomes: Counter[str] = Counter()
    for sandbox_id, token in load.tokens.items():
        try:
            subject = Sandbox.connect(sandbox_id, timeout=3600, request_timeout=CALL_S, **node.options)
            assert subject.get_info().state == SandboxState.RUNNING
            assert subject.commands.run("cat token", timeout=CALL_S).stdout == token, sandbox_id
            outcomes["works"] += 1
        except NotFoundException:
            load.gone.add(sandbox_id)
    for sandbox_id in load.gone:
        said = node.aenv("logs", sandbox_id).stdout
        assert "reason" in said, f"{sandbox_id} is gone and does not say why: {said}"
        outcomes["ended, and says why"] += 1
    return outcomes


@pytest.mark.timeout(300 + 20 * KILLS)
def test_random_kills_of_everything_under_load(node: Node) -> None:
    rng = random.Random(SEED)
    print(f"AENV_SEED={SEED}")
    require_recovered(node, "nobody")
    before = at_rest(node)
    loads = [Load(node, SEED + number) for number in range(WORKERS)]
    threads = [threading.Thread(target=load.run) for load in loads]
    for thread in threads:
        thread.start()
    struck: Counter[str] = Counter()
    try:
        for number in range(KILLS):
            time.sleep(rng.uniform(0.2, 4))
            try:
                name = strike(node, rng)
            except Exception as error:  # noqa: BLE001 - the victim was gone already, or being ended by the load
                name = f"nobody ({type(error).__name__})"
            struck[name] += 1
            print(f"{number}: {name}", flush=True)
            if number % 10 == 9 or number == KILLS - 1:
                require_recovered(node, name)
    finally:
        for load in loads:
            load.stop.set()
        for thread in threads:
            thread.join(4 * CALL_S)
    assert not any(thread.is_alive() for thread in threads), "a call does not end"
    assert not any(load.wordless for load in loads), "an error said nothing"
    outcomes: Counter[str] = Counter()
    for load in loads:
        outcomes += verify(node, load)
    print(f"struck {dict(struck)}\nsandboxes {dict(outcomes)}\ndone {dict(sum((load.done for load in loads), Counter()))}")
    print("said:", *(f"  {count} x {text}" for load in loads for text, count in load.said.most_common()), sep="\n")
    assert health(node) == {"status": "ok"}
    for item in all_sandboxes(node):
        Sandbox.kill(item.sandbox_id, **node.options)
    wait_nothing_left(node, before)


def all_sandboxes(node: Node) -> list[Any]:
    pages, found = Sandbox.list(**node.options), []
    while pages.has_next:
        found += pages.next_items()
    return found
