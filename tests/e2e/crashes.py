"""What tests of crashes share: whom to kill, and what must be true afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from typing import Any

from e2e_node import Node, remains

from agentenv.block.client import BlockClient
from agentenv.host import process

SETTLE_S = 60


def vmms(node: Node) -> dict[str, int]:
    """The process of each VMM by the id of its sandbox, from the machine itself: whatever VMM it is, it works in a folder of its own."""
    return {folder.name.rpartition("-")[0]: found.pid for folder, found in process.working_below(node.run / "vms").items()}


def blockd_info(node: Node) -> dict[str, Any]:
    """What the blockd says that serves this node."""
    return _ask_blockd(node, BlockClient.info)


def blockd_pid(node: Node) -> int:
    return int(blockd_info(node)["pid"])


def open_stacks(node: Node) -> set[str]:
    """The disks and memories that are open, be they files or devices."""
    return {stack.stack_id for stack in _ask_blockd(node, BlockClient.stacks)}


def _ask_blockd(node: Node, call: Callable[[BlockClient], Coroutine[Any, Any, Any]]) -> Any:
    async def ask() -> Any:
        client = BlockClient(node.run / "blockd.sock")
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(ask())


def survives_blockd(node: Node) -> bool:
    """Whether VMs of this node go on when blockd is killed: disk and memory are devices."""
    return node.environment.get("AENV_VMM_DRIVER") == "firecracker" and "ublk" in blockd_info(node)["exports"]


def kill(pid: int) -> None:
    """As a crash does it. No error when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def health(node: Node) -> dict[str, Any]:
    """What the server says of itself; empty when it does not answer."""
    try:
        with urllib.request.urlopen(f"{node.url}/health", timeout=10) as reply:
            return dict(json.load(reply))
    except (OSError, urllib.error.URLError):
        return {}


def at_rest(node: Node) -> dict[str, Any]:
    """What a node without sandboxes has: compare before and after. Files are those of layers and snapshots."""
    found = remains(node.home, node.run)
    return {
        "vmms": sorted(vmms(node)),
        "mounts": found.get("mounts", []),
        "loops": found.get("loops", []),
        "work folders": sorted(path.name for path in (node.run / "vms").iterdir()),
        "layers": sorted(layer_files(node)),
        "snapshots": sorted(path.name for path in (node.home / "snapshots").iterdir()),
    }


def layer_files(node: Node) -> set[str]:
    """All files of layers but the checksums of those that are there: they are taken when a layer is an hour old, during a long run, too."""
    names = {path.name for path in (node.home / "layers").iterdir()}
    return {name for name in names if not (name.endswith(".sha256") and f"{name.partition('.')[0]}.lsmt" in names)}


def leftovers(node: Node, before: dict[str, Any], spare_slots: int = 4) -> dict[str, Any]:
    """What is more than before; network slots only beyond the spare ones."""
    now = at_rest(node)
    found = {name: sorted(set(now[name]) - set(before[name])) for name in before}
    links = remains(node.home, node.run)
    for kind in ("namespaces", "links"):
        if len(links.get(kind, [])) > spare_slots:
            found[kind] = links[kind]
    return {name: value for name, value in found.items() if value}


def wait_nothing_left(node: Node, before: dict[str, Any]) -> None:
    """Wait until the node is as before."""
    end = time.monotonic() + SETTLE_S
    while left := leftovers(node, before):
        assert time.monotonic() < end, f"left over: {left}"
        time.sleep(0.5)
