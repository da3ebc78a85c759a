"""Twenty sandboxes at once on a small machine."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from e2b import Sandbox

COUNT = 20
TABLES = ("templates", "snapshots", "cached_steps", "images")


def test_twenty_at_once(node):
    with ThreadPoolExecutor(COUNT) as pool:
        made = list(pool.map(lambda number: Sandbox.create("base", timeout=900, metadata={"n": str(number)}, **node.options), range(COUNT)))
        try:
            names = list(pool.map(lambda one: one.commands.run("hostname", timeout=120).stdout.strip(), made))
            assert names == [one.sandbox_id for one in made]
            assert len(set(names)) == COUNT
            list(pool.map(lambda item: item[1].files.write("n", str(item[0])), enumerate(made)))
            assert list(pool.map(lambda one: one.files.read("n"), made)) == [str(number) for number in range(COUNT)]
        finally:
            assert all(pool.map(lambda one: one.kill(), made))
    assert Sandbox.list(**node.options).next_items() == []


def kept_layers(node) -> set[str]:
    """The layers that templates, snapshots, images and the cache of build steps reach, by the node's own records."""
    rows = {table: node.records(table) for table in TABLES}
    named = {build["snapshot_id"] for template in rows["templates"] for build in template["builds"]}
    named |= {row["snapshot_id"] for table in ("cached_steps", "images") for row in rows[table]}
    snapshots = [snapshot for snapshot in rows["snapshots"] if snapshot["snapshot_id"] in named]
    return {layer for snapshot in snapshots for layer in (*snapshot["memory_layers"], *snapshot["disk_layers"])}


def test_nothing_of_the_dead_remains(node):
    """Slots, VMs, disks and layer files of killed sandboxes are gone; only those of templates, images and cached steps are left."""
    end = time.monotonic() + 20
    while True:
        left = {path.name.split(".")[0] for path in (node.home / "layers").iterdir()} - kept_layers(node)
        vms = list((node.run / "vms").iterdir())
        stacks = [path.name for path in (node.run / "stacks").iterdir()]
        if not left and not vms and all(name.startswith("mem-") for name in stacks):
            break
        assert time.monotonic() < end, f"left: layers {left}, VMs {vms}, stacks {stacks}"
        time.sleep(0.2)
    assert subprocess.run(["pgrep", "-f", str(node.run / "vms")], capture_output=True, check=False).stdout == b""
