"""A VMM or `blockd` that is killed under a create or a resume: a retryable answer, nothing left, and the next call works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import httpx
import pytest
from crashes import at_rest, blockd_pid, kill, vmms, wait_nothing_left
from e2b import Sandbox
from e2e_node import Node

_ATTEMPTS = 5  # a kill may come too late


def strike_new_vmm(node: Node, before: set[int]) -> int:
    """Kill the next VMM as soon as it is there; its process."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if fresh := set(vmms(node).values()) - before:
            kill(pid := fresh.pop())
            return pid
    raise AssertionError("no VMM was started")


def post(node: Node, path: str) -> httpx.Response:
    headers = {"X-API-KEY": node.options["api_key"]}
    return httpx.post(f"{node.options['api_url']}{path}", headers=headers, json={"templateID": "base", "timeout": 60}, timeout=120)


def listed(node: Node) -> list[str]:
    """Sandboxes that run or are paused."""
    headers = {"X-API-KEY": node.options["api_key"]}
    found = httpx.get(f"{node.options['api_url']}/v2/sandboxes", headers=headers, timeout=30).json()
    return [str(one["sandboxID"]) for one in found]


def answered(node: Node, path: str, strike: Callable[[], object]) -> httpx.Response:
    """What a call is answered while a thread strikes."""
    striking = threading.Thread(target=strike)
    striking.start()
    reply = post(node, path)
    striking.join()
    return reply


def require_retryable(reply: httpx.Response) -> None:
    assert reply.status_code == 503, f"{reply.status_code}: {reply.text}"
    assert reply.headers["Retry-After"]
    assert "try again" in reply.text


def pause_one(node: Node) -> str:
    """A paused sandbox that has a file."""
    made = Sandbox.create("base", timeout=600, **node.options)
    made.files.write("kept", "kept")
    made.pause()
    return str(made.sandbox_id)


@pytest.mark.parametrize("verb", ["create", "resume"])
def test_a_vmm_that_is_killed_under_a_start(node: Node, verb: str) -> None:
    before = at_rest(node)
    for _ in range(_ATTEMPTS):  # a kill that comes too late ends the sandbox, as it should
        paused, alive = pause_one(node), set(vmms(node).values())
        path = "/v2/sandboxes" if verb == "create" else f"/sandboxes/{paused}/resume"
        reply = answered(node, path, partial(strike_new_vmm, node, alive))
        if reply.status_code != 201:
            break
    require_retryable(reply)
    Sandbox.create("base", timeout=60, **node.options).kill()
    again = Sandbox.connect(paused, timeout=60, **node.options)
    assert again.files.read("kept") == "kept"
    for info in listed(node):
        Sandbox.kill(info, **node.options)
    wait_nothing_left(node, before)


def test_a_block_server_that_is_killed_under_a_create(node: Node) -> None:
    before = at_rest(node)

    def strike() -> None:
        alive = set(vmms(node).values())
        end = time.monotonic() + 60
        while not set(vmms(node).values()) - alive and time.monotonic() < end:
            pass
        kill(blockd_pid(node))

    for _ in range(_ATTEMPTS):
        reply = answered(node, "/v2/sandboxes", strike)
        if reply.status_code != 201:
            break
    require_retryable(reply)
    end = time.monotonic() + 60
    while (again := post(node, "/v2/sandboxes")).status_code == 503:  # until the next blockd answers
        assert time.monotonic() < end
        time.sleep(1)
    assert again.status_code == 201, again.text
    for info in listed(node):
        Sandbox.kill(info, **node.options)
    wait_nothing_left(node, before)
