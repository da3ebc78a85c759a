"""What one sandbox may use of the node, on real guests: CPU, disk, network, memory of the VMM, who goes first when memory is used up."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from crashes import blockd_pid, vmms
from e2b import Sandbox
from e2e_node import Node

MIB = 1 << 20


@pytest.fixture
def limited(node: Node) -> Iterator[Any]:
    """Makes sandboxes with limits, which the official clients do not know."""
    made: list[Any] = []

    def make(**limits: int) -> Any:
        reply = post(node, {"templateID": "base", "timeout": 600, "limits": limits})
        assert reply.status_code == 201, reply.text
        made.append(Sandbox.connect(reply.json()["sandboxID"], timeout=600, **node.options))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.kill()


def post(node: Node, body: dict[str, Any]) -> httpx.Response:
    headers = {"X-API-KEY": node.options["api_key"]}
    return httpx.post(f"{node.options['api_url']}/v2/sandboxes", headers=headers, json=body, timeout=60)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed_s(call: Any) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def test_cpu_is_shared_out(node: Node, limited: Any) -> None:
    subject = limited(cpuPercent=30)
    subject.commands.run("sh -c 'while :; do :; done'", background=True)
    pid = vmms(node)[subject.sandbox_id]
    begun, before = time.monotonic(), cpu_s(pid)
    time.sleep(5)
    used = (cpu_s(pid) - before) / (time.monotonic() - begun)
    assert 0.1 < used < 0.4, f"{used:.2f} CPUs"


def test_the_disk_is_as_slow_as_asked_for(limited: Any) -> None:
    subject = limited(diskBytesPerSecond=2 * MIB)
    write = "dd if=/dev/zero of=f bs=256K count=32 oflag=direct"
    spent_s = timed_s(lambda: subject.commands.run(write, timeout=120))
    assert spent_s > 2.5, f"8 MiB in {spent_s:.1f} s"
    subject.pause()
    subject.connect(timeout=600)
    spent_s = timed_s(lambda: subject.commands.run(write, timeout=120))
    assert spent_s > 2.5, f"8 MiB in {spent_s:.1f} s after a pause"


def test_the_network_is_as_slow_as_asked_for(limited: Any) -> None:
    subject = limited(networkBytesPerSecond=MIB)
    subject.commands.run("head -c 4194304 /dev/urandom > f")
    spent_s = timed_s(lambda: subject.files.read("f", format="bytes"))
    assert spent_s > 2.5, f"4 MiB out in {spent_s:.1f} s"
    spent_s = timed_s(lambda: subject.files.write("g", os.urandom(4 * MIB)))
    assert spent_s > 2.5, f"4 MiB in in {spent_s:.1f} s"


def test_what_the_node_does_not_give_is_refused(node: Node) -> None:
    for limits, words in (({"cpuPercent": 1}, "limits.cpuPercent"), ({"diskOperationsPerSecond": 3}, "limits.diskOperationsPerSecond")):
        reply = post(node, {"templateID": "base", "limits": limits})
        assert reply.status_code == 400
        assert words in reply.json()["message"]


def test_k05_a_guest_that_fills_its_memory_keeps_its_vmm(sandbox: Any, node: Node) -> None:
    """With anonymous memory and page cache, for half a minute; the limit is the guest's memory and the VMM's own."""
    fill = "python3 -c 'import time; x = bytearray(300 << 20); x[::4096] = b\"1\" * len(x[::4096]); time.sleep(20)'"
    pid = vmms(node)[sandbox.sandbox_id]
    filling = sandbox.commands.run(fill, background=True, timeout=120)
    sandbox.commands.run("timeout 20 sh -c 'while :; do cat /usr/bin/* > /dev/null; done' || true", timeout=120)
    filling.wait()
    assert vmms(node)[sandbox.sandbox_id] == pid
    assert sandbox.commands.run("echo on").stdout == "on\n"


def test_server_and_blockd_are_the_last_that_the_kernel_takes_and_vms_the_first(sandbox: Any, node: Node) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    last = -900 if may_protect() else 0  # a container may not have the right
    assert (score(node.server_pid()), score(blockd_pid(node))) == (last, last)
    assert score(vmms(node)[sandbox.sandbox_id]) == 500


def may_protect() -> bool:
    return subprocess.run(["sh", "-c", "echo -900 > /proc/self/oom_score_adj"], capture_output=True, check=False).returncode == 0
