"""blockd is killed while the server runs. With files (FUSE) running sandboxes lose their disk; everything else goes on by itself."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from typing import Any

import pytest
from crashes import blockd_info, blockd_pid
from e2b import Sandbox, SandboxState
from e2e_node import Node

WITHIN_S = 15


def health(node: Node) -> dict[str, Any]:
    with urllib.request.urlopen(f"{node.url}/health", timeout=10) as reply:
        return dict(json.load(reply))


@pytest.fixture
def files_only(node: Node) -> None:
    """On a host with ublk the disks would go on."""
    if "ublk" in blockd_info(node)["exports"]:
        pytest.fail("this test is about disks that are files; with devices see tests/lab")


@pytest.mark.usefixtures("files_only")
def test_running_sandboxes_end_with_the_reason_the_paused_resume_and_creates_work_within_seconds(node: Node) -> None:
    running = [Sandbox.create("base", timeout=600, **node.options) for _ in range(2)]
    paused = Sandbox.create("base", timeout=600, **node.options)
    paused.files.write("f", "kept")
    paused.pause()
    ended: list[Exception] = []
    following = threading.Event()

    def follow() -> None:
        try:
            command = running[0].commands.run("echo on; sleep 300", background=True, timeout=0)
            for _ in command:
                following.set()
            command.wait()
        except Exception as error:  # noqa: BLE001 - any error will do, silence would not
            ended.append(error)

    follower = threading.Thread(target=follow)
    follower.start()
    assert following.wait(60), "the command does not start"
    before = blockd_pid(node)
    killed_at = time.monotonic()
    os.kill(before, signal.SIGKILL)
    fresh = create_again(node, killed_at)
    assert fresh.commands.run("echo works").stdout == "works\n"
    fresh.kill()
    assert blockd_pid(node) != before
    follower.join(WITHIN_S)
    assert not follower.is_alive(), "the stream of a lost sandbox does not end"
    assert ended, "the stream of a lost sandbox ends without an error"
    for lost in running:
        assert not lost.is_running()
        reason = node.aenv("logs", lost.sandbox_id).stdout
        assert "the block server" in reason
    assert paused.get_info().state == SandboxState.PAUSED
    paused.connect(timeout=600)
    assert paused.files.read("f") == "kept"
    paused.kill()
    assert health(node) == {"status": "ok"}


def create_again(node: Node, since: float) -> Any:
    """A sandbox, once it can be had again."""
    while True:
        try:
            return Sandbox.create("base", timeout=600, **node.options)
        except Exception:
            if time.monotonic() - since > WITHIN_S:
                raise
            time.sleep(0.2)


@pytest.mark.usefixtures("files_only")
def test_one_that_is_killed_again_and_again_comes_back_each_time(node: Node) -> None:
    for _ in range(3):
        os.kill(blockd_pid(node), signal.SIGKILL)
        end = time.monotonic() + WITHIN_S
        while health(node)["status"] != "ok" or not alive(node):
            assert time.monotonic() < end, health(node)
            time.sleep(0.05)
    create_again(node, time.monotonic()).kill()


def alive(node: Node) -> bool:
    from agentenv.core.errors import Unavailable

    try:
        return blockd_pid(node) > 0
    except Unavailable:
        return False
