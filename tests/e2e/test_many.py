"""Twenty sandboxes at once on a small machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from e2b import Sandbox

COUNT = 20


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


def test_nothing_of_the_dead_remains(node):
    """Slots, VMs, disks and layer files of killed sandboxes are gone; only those of templates and snapshots are left."""
    import json
    import subprocess
    import time

    kept = len(json.loads(node.aenv("templates", "--json").stdout)) + len(json.loads(node.aenv("snapshot", "ls", "--json").stdout))
    end = time.monotonic() + 20
    while True:
        layers = [path.name for path in (node.home / "layers").iterdir()]
        vms = list((node.run / "vms").iterdir())
        stacks = [path.name for path in (node.run / "stacks").iterdir()]
        if len(layers) <= 3 * kept and not vms and all(name.startswith("mem-") for name in stacks):
            break
        assert time.monotonic() < end, f"left: layers {layers}, VMs {vms}, stacks {stacks}"
        time.sleep(0.2)
    assert subprocess.run(["pgrep", "-f", str(node.run / "vms")], capture_output=True, check=False).stdout == b""
