"""Disks larger than the template's, on real guests: of one sandbox, and of a template made of an image without any program for it."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from e2b import Sandbox
from e2e_node import Node

MIB = 1 << 20
TEMPLATE_MB, LARGE_MB = 8192, 20480
SIZE = "stat -f -c '%b %S' / | { read blocks bytes; echo $((blocks * bytes)); }"


def post(node: Node, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"X-API-KEY": node.options["api_key"]}
    return httpx.post(f"{node.options['api_url']}{path}", headers=headers, json=body, timeout=120)


def file_system_mb(sandbox: Any) -> int:
    return int(sandbox.commands.run(SIZE).stdout) // MIB


def disk_size_mb(node: Node, sandbox: Any) -> int:
    headers = {"X-API-KEY": node.options["api_key"]}
    return int(httpx.get(f"{node.options['api_url']}/sandboxes/{sandbox.sandbox_id}", headers=headers).json()["diskSizeMB"])


def disk_total_mb(sandbox: Any) -> int:
    """What the guest's agent says of its root file system, once there is a sample."""
    end = time.monotonic() + 60
    while not (samples := sandbox.get_metrics()):
        assert time.monotonic() < end
        time.sleep(1)
    return int(samples[-1].disk_total) // MIB


def require_large(node: Node, sandbox: Any) -> None:
    assert disk_size_mb(node, sandbox) == LARGE_MB
    assert int(sandbox.commands.run("cat /sys/block/vda/size").stdout) * 512 == LARGE_MB * MIB
    assert 0.95 * LARGE_MB < file_system_mb(sandbox) <= LARGE_MB


def test_a_sandbox_asks_for_a_larger_disk_and_keeps_it(node: Node) -> None:
    reply = post(node, "/v2/sandboxes", {"templateID": "base", "timeout": 600, "diskSizeMB": LARGE_MB})
    assert reply.status_code == 201, reply.text
    sandbox = Sandbox.connect(reply.json()["sandboxID"], timeout=600, **node.options)
    try:
        require_large(node, sandbox)
        # beyond where the template's disk ends, too
        sandbox.commands.run(
            "fallocate -l 9G /home/user/room && echo end | dd of=/home/user/room bs=1 seek=9600000000 conv=notrunc && sync"
        )
        sandbox.pause()
        sandbox.connect(timeout=600)
        require_large(node, sandbox)
        assert sandbox.commands.run("tail -c +9600000001 room | head -c 3").stdout == "end"
        written_mb = int(sandbox.commands.run("awk '$3 == \"vda\" {print $10 / 2048}' /proc/diskstats | cut -d. -f1").stdout)
        assert written_mb < 64, "new inode tables were written"
    finally:
        sandbox.kill()


@pytest.mark.parametrize(("asked_mb", "words"), [(TEMPLATE_MB - 1, "disks do not shrink"), (1 << 21, "limits.disk_mb_of_sandbox")])
def test_what_cannot_be_is_refused_with_the_way_out(node: Node, asked_mb: int, words: str) -> None:
    reply = post(node, "/v2/sandboxes", {"templateID": "base", "diskSizeMB": asked_mb})
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["message"] + reply.json().get("hint", "")


def test_a_template_of_an_image_has_the_disk_that_its_build_asked_for(node: Node, debian: str) -> None:
    node.aenv("template", "build", debian, "--name", "large-disk", "--disk", str(LARGE_MB), "--no-start")
    try:
        sandbox = Sandbox.create("large-disk", timeout=600, **node.options)
        try:
            assert disk_size_mb(node, sandbox) == LARGE_MB
            size = int(sandbox.commands.run("cat /sys/block/vda/size", user="root").stdout) * 512
            assert size == LARGE_MB * MIB
            assert 0.95 * LARGE_MB < disk_total_mb(sandbox) <= LARGE_MB
        finally:
            sandbox.kill()
    finally:
        node.aenv("template", "delete", "large-disk", "--yes", check=False)
