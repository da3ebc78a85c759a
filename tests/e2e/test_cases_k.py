"""A host that gets short of memory (cases K), on real guests: its reserve is larger than it. K05 is in `test_sandbox_limits`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from crashes import health, vmms
from e2b import Sandbox, SandboxState
from e2e_node import Node
from guest_programs import wait_for


@contextlib.contextmanager
def settings(node: Node, **changed: str) -> Iterator[None]:
    """A server with other settings takes over, and in the end one with the former."""
    before = dict(node.environment)
    node.environment.update(changed)
    try:
        node.kill_server()
        node.up()
        yield
    finally:
        node.environment.clear()
        node.environment.update(before)
        node.kill_server()
        node.up()


def create(node: Node, **fields: Any) -> httpx.Response:
    headers = {"X-API-KEY": node.options["api_key"]}
    return httpx.post(f"{node.options['api_url']}/v2/sandboxes", headers=headers, json={"templateID": "base", **fields}, timeout=60)


def made(node: Node, **fields: Any) -> Any:
    reply = create(node, timeout=900, **fields)
    assert reply.status_code == 201, reply.text
    return Sandbox.connect(reply.json()["sandboxID"], timeout=900, **node.options)


@pytest.mark.timeout(300)
def test_k06_idle_ones_are_paused_with_leave_busy_ones_run_on_and_new_ones_are_told_to_come_again(node: Node) -> None:
    idle, forbidden, busy = subjects = made(node, pauseWhenIdle=True), made(node, pauseWhenIdle=False), made(node, pauseWhenIdle=True)
    try:
        _shortage(node, idle, forbidden, busy)
    finally:
        for subject in subjects:
            subject.kill()


def _shortage(node: Node, idle: Any, forbidden: Any, busy: Any) -> None:
    idle.files.write("f", "kept")
    busy.commands.run("sh -c 'while :; do :; done'", background=True, timeout=0)
    short = {"AENV_LIMITS_MEMORY_RESERVE_MB": str(1 << 30), "AENV_MEMORY_IDLE_S": "4", "AENV_MEMORY_IDLE_CPU_PERCENT": "50"}
    with settings(node, **short):
        wait_for(lambda: idle.get_info().state == SandboxState.PAUSED, "the idle one is not paused")
        time.sleep(8)
        assert forbidden.get_info().state == SandboxState.RUNNING
        assert busy.get_info().state == SandboxState.RUNNING
        assert "short of memory" in node.aenv("logs", idle.sandbox_id).stdout
        refused = create(node)
        assert (refused.status_code, refused.json()["error_code"]) == (503, "short_of_memory")
        assert int(refused.headers["retry-after"]) >= 1
        assert "short of memory" in health(node)["troubles"]["memory"]
    idle.connect(timeout=900)
    assert idle.files.read("f") == "kept"
    assert health(node) == {"status": "ok"}


def test_what_vms_hold_is_measured(sandbox: Any, node: Node) -> None:
    """The figure that admission goes by is the kernel's, and grows with what a guest uses."""
    from agentenv.host.memory import HostMemory

    pid = vmms(node)[sandbox.sandbox_id]
    before = HostMemory().held_mb(pid)
    assert before is not None
    assert 0 < before < 512
    sandbox.commands.run("python3 -c 'import time; x = b\"1\" * (150 << 20); time.sleep(10)'", background=True)
    wait_for(lambda: (HostMemory().held_mb(pid) or 0) > before + 100, "what the guest uses is not seen")
    assert Path(f"/proc/{pid}").exists()
