"""Disks that are kept without memory are clean: there is nothing to recover, whoever wrote until the last moment (cases C04, C06)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox, Template

from agentenv.block.client import BlockClient, Upper

_STACK = "checked-by-a-test"


def _rows(node: Any, query: str, *values: str) -> list[str]:
    with contextlib.closing(sqlite3.connect(f"file:{node.home / 'node.db'}?mode=ro", uri=True)) as records:
        return [first for (first,) in records.execute(query, values)]


def _layers(node: Any, snapshot_id: str) -> list[str]:
    (body,) = _rows(node, "SELECT body FROM snapshots WHERE snapshot_id = ?", snapshot_id)
    snapshot = json.loads(body)
    assert snapshot["memory_layers"] == [], "it has memory, in which there may be what the disk lacks"
    return snapshot["disk_layers"]


def _assert_clean(node: Any, layers: list[str], scratch: Path) -> None:
    """Nothing to recover, and no fault once the files are gone that programs had deleted and still held open (a mount does that, too)."""

    scratch.mkdir(exist_ok=True)

    async def check() -> list[subprocess.CompletedProcess[str]]:
        client = BlockClient(node.run / "blockd.sock")
        try:
            upper = Upper(scratch / "checked.data", scratch / "checked.index")
            stack = await client.open(_STACK, [node.home / "layers" / f"{layer}.lsmt" for layer in layers], upper, None, "direct", "fuse")
            try:
                commands = (("dumpe2fs", "-h"), ("e2fsck", "-p"), ("e2fsck", "-f", "-n"))
                return [await asyncio.to_thread(_run, *command, str(stack.path)) for command in commands]
            finally:
                await client.close_stack(_STACK, force=True)
        finally:
            await client.close()

    header, freed, checked = asyncio.run(check())
    (features,) = [line for line in header.stdout.splitlines() if line.startswith("Filesystem features:")]
    assert "needs_recovery" not in features
    assert re.search(r"^Filesystem state: +clean$", header.stdout, re.MULTILINE), header.stdout
    assert freed.returncode in (0, 1), freed.stdout
    not_freed = [line for line in freed.stdout.splitlines() if "orphaned inode" not in line and ": clean, " not in line]
    assert not_freed == [], "more than files that were held open"
    assert checked.returncode == 0, checked.stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("how", ["pause", "snapshot"])
def test_c04_under_writers(node, sandbox, how, tmp_path):
    held = (
        "exec 3>held; rm held; head -c 3000000 /dev/urandom >&3; sleep 600"  # deleted and open: the disk has it until it is mounted again
    )
    sandbox.commands.run(held, background=True, timeout=0)
    for number in range(4):
        write = f"dd if=/dev/urandom of=f{number} bs=64k count=8 oflag=append conv=notrunc,fsync status=none; rm -f g; cp f{number} g"
        sandbox.commands.run(f"while :; do {write}; done", background=True, timeout=0)
    sandbox.commands.run("sleep 2")
    if how == "pause":
        sandbox.pause(mode="filesystem")
        (body,) = _rows(node, "SELECT body FROM sandboxes WHERE sandbox_id = ?", sandbox.sandbox_id)
        snapshot_id = json.loads(body)["snapshot_id"]
    else:
        url, headers = f"{node.url}/sandboxes/{sandbox.sandbox_id}/snapshots", {"X-API-Key": node.options["api_key"]}
        assert httpx.post(url, headers=headers, json={"name": "c04", "memory": False}, timeout=120).status_code == 201
        (body,) = [body for body in _rows(node, "SELECT body FROM templates") if "c04" in json.loads(body)["aliases"]]
        snapshot_id = json.loads(body)["builds"][0]["snapshot_id"]
    _assert_clean(node, _layers(node, snapshot_id), tmp_path)
    if how == "snapshot":
        Sandbox.delete_snapshot("c04", **node.options)


def test_c06_every_step_of_a_build(node, tmp_path):
    steps = ("head -c 3000000 /dev/urandom > /home/user/big", "rm /home/user/big; mkdir -p /srv/many; cd /srv/many; touch $(seq 400)")
    recipe = Template().from_template("base")
    for step in steps:
        recipe = recipe.run_cmd(step)
    before = set(_rows(node, "SELECT body FROM cached_steps"))
    Template.build(recipe, "e2e-clean", **node.options)
    try:
        made = [json.loads(body) for body in set(_rows(node, "SELECT body FROM cached_steps")) - before]
        assert len(made) >= len(steps)
        for step in made:
            _assert_clean(node, _layers(node, step["snapshot_id"]), tmp_path / step["snapshot_id"])
        box = Sandbox.create("e2e-clean", timeout=600, **node.options)
        differs = box.commands.run("dpkg -V coreutils bash python3-minimal libc6 || true", user="root", timeout=120).stdout
        changed = [line for line in differs.splitlines() if not line.startswith("missing ")]  # the template has no manuals
        assert changed == [], "files of packages are not what they were"
        box.kill()
    finally:
        node.aenv("template", "delete", "--yes", "e2e-clean", check=False)
