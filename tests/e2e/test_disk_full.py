"""A full disk while pausing: a clear error, the sandbox runs on, nothing is lost, and it can be paused once there is room.

The node's layer store is put on a small tmpfs for these tests, which holds the template and little more.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from e2b import Sandbox, SandboxException, SandboxState, Template
from e2b.exceptions import BuildException
from e2e_node import HOME, POOL_CIDR, RUN, Node, free_port, remains
from guest_programs import wait_for

ROOM_MB = 60
#: QEMU waits for room. Firecracker's guests are stopped while there is some left; without a reserve their devices wait for it.
RESERVES_MB = {"firecracker": ("30", "0")}.get(os.environ.get("AENV_VMM_DRIVER", ""), ("0",))
SMALL_HOME, SMALL_RUN = HOME.with_name(f"{HOME.name}-small"), RUN.with_name(f"{RUN.name}-small")
SMALL_POOL_CIDR = f"{POOL_CIDR.rsplit('.', 2)[0]}.255.0/24"  # the end of the other node's


def resize(size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(SMALL_HOME / "layers")], check=True)


@pytest.fixture
def reserve_mb():
    return RESERVES_MB[0]


@pytest.fixture
def small_node(node, reserve_mb):
    """A second node beside the first, whose home has `ROOM_MB` left once its template is there."""
    node.aenv("ls")
    shutil.rmtree(SMALL_HOME, ignore_errors=True)
    assets = Path("cache", "assets")
    # Under names of its own, for a node with a full disk collects what it does not need; without what is just being made.
    shutil.copytree(HOME / assets, SMALL_HOME / assets, copy_function=os.link, ignore=shutil.ignore_patterns(".*"))
    environment = node.environment | {
        "AENV_NODE_HOME": str(SMALL_HOME),
        "AENV_NODE_RUN": str(SMALL_RUN),
        "AENV_NETWORK_POOL_CIDR": SMALL_POOL_CIDR,
        "AENV_LIMITS_DISK_RESERVE_MB": reserve_mb,
    }
    subject = Node(free_port(), environment, {}, home=SMALL_HOME, run=SMALL_RUN)
    layers = SMALL_HOME / "layers"
    try:
        subject.up()
        subject.aenv("down")
        used_mb = sum(path.stat().st_blocks for path in layers.iterdir()) // 2048
        layers.rename(SMALL_HOME / "layers-made")
        layers.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={used_mb + ROOM_MB}m", "small", str(layers)], check=True)
        subprocess.run(["cp", "-a", "--sparse=always", f"{SMALL_HOME}/layers-made/.", str(layers)], check=True)
        subject.up()
        subject.variables = json.loads(subject.aenv("env", "--json").stdout)
        yield subject
    finally:
        subject.aenv("down", "--kill", check=False)
        subprocess.run(["umount", str(layers)], check=False)
        shutil.rmtree(SMALL_HOME, ignore_errors=True)
        assert remains(SMALL_HOME, SMALL_RUN) == {}


@pytest.mark.parametrize("reserve_mb", RESERVES_MB)
def test_a_guest_that_fills_the_nodes_disk_waits_for_room(small_node):
    subject = Sandbox.create("base", timeout=900, **small_node.options)
    write = f"head -c {(ROOM_MB + 40) << 20} /dev/urandom > big; sync; sha256sum big"
    writer = subject.commands.run(write, background=True, timeout=0)
    wait_for(lambda: "stands still" in small_node.aenv("logs", subject.sandbox_id, "--json").stdout, "nobody saw the full disk")
    resize("2g")
    first = writer.wait().stdout.split()[0]
    assert "goes on" in small_node.aenv("logs", subject.sandbox_id, "--json").stdout
    subject.commands.run("echo 3 | sudo tee /proc/sys/vm/drop_caches")
    assert subject.commands.run("sha256sum big", timeout=300).stdout.split()[0] == first, "the disk does not hold what was written"
    assert subject.commands.run("sudo dmesg | grep -ci 'I/O error' || true").stdout.strip() == "0"
    subject.kill()


def test_pause_with_a_full_disk(small_node):
    subject = Sandbox.create("base", timeout=600, **small_node.options)
    fill = f"import os, hashlib; block = os.urandom({ROOM_MB + 60} << 20); print(hashlib.sha256(block).hexdigest(), flush=True); input()"
    hold = subject.commands.run(
        f"exec python3 -c '{fill}; print(hashlib.sha256(block).hexdigest())'", background=True, stdin=True, timeout=0
    )
    digest = next(iter(hold))[0].strip()
    subject.files.write("f", "kept")
    before = sorted(path.name for path in (SMALL_HOME / "layers").iterdir())
    with pytest.raises(SandboxException, match=r"no room|[Nn]o space"):
        subject.pause()
    assert subject.get_info().state == SandboxState.RUNNING
    assert sorted(path.name for path in (SMALL_HOME / "layers").iterdir()) == before, "a failed pause left files behind"
    assert subject.files.read("f") == "kept"
    resize("2g")
    subject.pause()
    subject.connect(timeout=600)
    assert subject.files.read("f") == "kept"
    again = subject.commands.connect(hold.pid, timeout=60)
    subject.commands.send_stdin(hold.pid, "\n")
    seen = "".join(out or "" for out, _err, _pty in again)
    assert seen.strip() == digest, "memory changed on the way"
    subject.kill()


def test_a_build_that_fills_the_nodes_disk_fails_and_says_so(small_node):
    """Repeated with room it works; and what it has cached makes room again when it is asked to."""
    options, name = small_node.options, "e2e-too-large"
    made = (
        Template().from_template("base").run_cmd("echo first > first").run_cmd(f"head -c {(ROOM_MB + 40) << 20} /dev/urandom > big; sync")
    )
    with pytest.raises(BuildException, match="the node's disk is full"):
        Template.build(made, name, **options)
    resize("2g")
    Template.build(made, name, **options)
    subject = Sandbox.create(name, timeout=600, **options)
    assert subject.commands.run("cat first; wc -c < big").stdout.split() == ["first", str((ROOM_MB + 40) << 20)]
    subject.kill()
    small_node.aenv("template", "delete", "--yes", name)
    freed = json.loads(small_node.aenv("gc", "--all", "--json").stdout)
    assert {item["kind"] for item in freed["evicted"]} == {"build step"}
    assert freed["freedBytes"] > ROOM_MB << 20
    Sandbox.create("base", timeout=60, **options).kill()
