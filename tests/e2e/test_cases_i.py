"""Restarts, crashes and what they leave (cases I). I01 is `test_random_kills`, I05 in `tests/unit/network`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crashes import at_rest, blockd_pid, health, kill, survives_blockd, vmms, wait_nothing_left
from e2b import Sandbox, SandboxQuery, SandboxState
from e2e_node import Node
from guest_programs import count, start_counter, wait_beyond, wait_for

REPORTED_S = 5
LEFT_NAMESPACES = int(os.environ.get("AENV_LEFT_NAMESPACES", "150"))


def make(node: Node, **more: Any) -> Any:
    return Sandbox.create("base", timeout=900, **more, **node.options)


def test_i02_leftover_namespaces_do_not_hold_up_the_start(node: Node) -> None:
    """A twentieth of 3,000 (`AENV_LEFT_NAMESPACES` for more): the API answers as soon as without them, a create works, all go."""
    from agentenv.core.paths import NodePaths
    from agentenv.network.layout import Layout

    tag = NodePaths(node.home, node.run).tag
    prefix = Layout(node.environment["AENV_NETWORK_POOL_CIDR"], tag).namespace_prefix
    node.kill_server()
    plain_s, bringing = answered_after(node)
    bringing.join(120)
    node.kill_server()
    names = [f"{prefix}{number}" for number in range(1000, 1000 + LEFT_NAMESPACES)]
    subprocess.run(["ip", "-batch", "-"], input="".join(f"netns add {name}\n" for name in names), text=True, check=True)
    begun = time.monotonic()
    answered_s, bringing = answered_after(node)
    make(node).kill()
    created_s = time.monotonic() - begun - answered_s
    bringing.join(120)
    while left := [name for name in names if Path("/run/netns", name).exists()]:
        assert time.monotonic() - begun < 120, f"{len(left)} namespaces are still there"
        time.sleep(0.2)
    gone_s = time.monotonic() - begun
    print(f"answered after {answered_s:.1f} s ({plain_s:.1f} s without), created in {created_s:.1f} s, all gone after {gone_s:.1f} s")
    assert answered_s < plain_s + 5
    assert created_s < 10


def answered_after(node: Node) -> tuple[float, threading.Thread]:
    """Start the server; how long until it answers, in seconds, and what waits for the command that starts it."""
    begun = time.monotonic()
    bringing = threading.Thread(target=node.up)
    bringing.start()
    while not health(node):
        assert time.monotonic() - begun < 60, "the server does not come up"
        time.sleep(0.05)
    return time.monotonic() - begun, bringing


def test_i04_everything_works_after_each_component_was_restarted_alone_and_together(node: Node) -> None:
    """Three that run and three that are paused; where disks are files the end of blockd ends those that run, and says so."""
    running, paused = [make(node) for _ in range(3)], [make(node) for _ in range(3)]
    for number, subject in enumerate(paused):
        subject.files.write("f", f"kept {number}")
        subject.pause()
    for subject in running:
        start_counter(subject)
    before = [count(subject) for subject in running]
    node.kill_server()
    node.up()
    for subject, value in zip(running, before, strict=True):
        wait_beyond(subject, value)
    require_paused(paused)
    node.aenv("down")
    node.up()
    for subject in running:  # down has paused them
        subject.connect(timeout=900)
        wait_beyond(subject, before[0])
    require_paused(paused)
    for together in (False, True):
        blockd = blockd_pid(node)
        if together:
            node.kill_server()
        kill(blockd)
        if together:
            node.up()
        require_paused(paused)
    survives = survives_blockd(node)
    for subject in running:
        if survives:
            wait_beyond(subject, count(subject))
            subject.kill()
            continue
        assert not subject.is_running()
        assert "the block server" in node.aenv("logs", subject.sandbox_id).stdout
    fresh = make(node)
    assert fresh.commands.run("echo works").stdout == "works\n"
    for subject in (*paused, fresh):
        subject.kill()


def require_paused(subjects: list[Any]) -> None:
    """Each resumes, has its file, and is paused again."""
    for number, subject in enumerate(subjects):
        assert subject.get_info().state == SandboxState.PAUSED
        again(lambda subject=subject: subject.connect(timeout=900))
        assert subject.files.read("f") == f"kept {number}"
        subject.pause()


def again(call: Any, within_s: float = 15) -> Any:
    """Repeat while the node is being mended."""
    end = time.monotonic() + within_s
    while True:
        try:
            return call()
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def test_i08_the_state_told_is_that_of_the_process(node: Node) -> None:
    subject = make(node)
    moves = (lambda: None, subject.pause, lambda: subject.connect(timeout=900), subject.pause, lambda: subject.connect(timeout=900))
    for move in moves:
        move()
        (item,) = [one for one in Sandbox.list(**node.options).next_items() if one.sandbox_id == subject.sandbox_id]
        runs = item.state == SandboxState.RUNNING
        assert runs == subject.is_running()
        wait_for(lambda runs=runs: runs == (subject.sandbox_id in vmms(node)), f"told to be {item.state}, which its VMM is not")
        if runs:
            assert subject.commands.run("echo on").stdout == "on\n"
    subject.kill()
    assert subject.sandbox_id not in vmms(node)
    assert not any(one.sandbox_id == subject.sandbox_id for one in Sandbox.list(**node.options).next_items())


CLIENT = """
import sys, threading
from e2b import Sandbox
options = dict(zip(("api_key", "api_url", "sandbox_url"), sys.argv[2:], strict=True))
def create():
    while True:
        Sandbox.create("base", timeout=30, metadata={"run": sys.argv[1]}, **options)
        sys.stdout.write("made one\\n")  # in one piece: print writes the end of a line by itself
        sys.stdout.flush()
for _ in range(2):
    threading.Thread(target=create, daemon=True).start()
threading.Event().wait()
"""


def test_i10_what_a_killed_client_has_made_is_found_and_ends(node: Node) -> None:
    """By its metadata, also what was under way; all at once by a kill of each, and by themselves by their timeout."""
    run = f"run-{os.getpid()}"
    options = [node.options[name] for name in ("api_key", "api_url", "sandbox_url")]
    client = subprocess.Popen([sys.executable, "-c", CLIENT, run, *options], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    try:
        made = [client.stdout.readline() for _ in range(3)]
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait(30)
    assert made == ["made one\n"] * 3
    query = SandboxQuery(metadata={"run": run})

    def found() -> list[str]:
        return [one.sandbox_id for one in Sandbox.list(query=query, **node.options).next_items()]

    time.sleep(3)  # what was under way is there by then
    left = found()
    assert len(left) >= 3
    assert set(left) <= set(vmms(node))
    assert Sandbox.kill(left[0], **node.options)
    end = time.monotonic() + 90  # the others' timeout is 30 s
    while found():
        assert time.monotonic() < end, "sandboxes of a client that is gone do not end"
        time.sleep(0.5)
    assert not set(left) & set(vmms(node))


def crash_by_sysrq(letter: str) -> Any:
    def crash(_node: Node, subject: Any) -> None:
        subject.commands.run(f"echo {letter} | sudo tee /proc/sysrq-trigger", background=True)

    return crash


def crash_vmm(node: Node, subject: Any) -> None:
    kill(vmms(node)[subject.sandbox_id])


CRASHES = {
    "panic": (crash_by_sysrq("c"), "the guest's kernel panicked: sysrq triggered crash"),
    "power off": (crash_by_sysrq("o"), "the guest powered off"),
    "reboot": (crash_by_sysrq("b"), "sysrq: Resetting"),
    "kill of the VMM": (crash_vmm, "its VMM was killed"),
}


@pytest.mark.parametrize("name", CRASHES)
def test_i11_a_guest_that_crashes_is_reported_with_the_reason_and_freed(node: Node, name: str) -> None:
    crash, reason = CRASHES[name]
    make(node).kill()
    before = at_rest(node)
    subject = make(node)
    handle = subject.commands.run("echo on; sleep 600", background=True, timeout=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.wait)
        crash(node, subject)
        begun = time.monotonic()
        while subject.is_running():
            assert time.monotonic() - begun < REPORTED_S, f"nobody noticed within {REPORTED_S} s"
            time.sleep(0.05)
        with pytest.raises(Exception, match=r".+"):
            waiting.result(REPORTED_S)
    said = node.aenv("logs", subject.sandbox_id).stdout
    assert "its VM ended by itself" in said
    assert reason in said
    assert subject.sandbox_id not in vmms(node)
    with pytest.raises(Exception, match=r"not found|doesn.t exist"):
        Sandbox.connect(subject.sandbox_id, **node.options)  # nothing is begun anew behind the caller's back
    wait_nothing_left(node, before)
