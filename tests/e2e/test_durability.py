"""What was written or held in memory before a pause is there after the resume, ten times in a row."""

from __future__ import annotations

import random

CYCLES = 10

#: Holds a block of memory whose content it can prove, and changes part of it at every beat.
HOLDER = r"""
import hashlib, os, random, sys, time
size, seed = 24 << 20, 1
block = bytearray(random.Random(seed).randbytes(size))
generation = 0
while True:
    name = "/home/user/ask"
    if os.path.exists(name):
        os.remove(name)
        generation += 1
        patch = random.Random(1000 + generation).randbytes(1 << 20)
        at = (generation * 3 << 20) % (size - (1 << 20))
        block[at:at + len(patch)] = patch
        with open("/home/user/.answer", "w") as out:
            out.write(f"{generation} {hashlib.sha256(block).hexdigest()}")
        os.rename("/home/user/.answer", "/home/user/answer")
    time.sleep(0.02)
"""


def expected_digests() -> list[str]:
    import hashlib

    size = 24 << 20
    block = bytearray(random.Random(1).randbytes(size))
    found = []
    for generation in range(1, CYCLES + 1):
        patch = random.Random(1000 + generation).randbytes(1 << 20)
        at = (generation * 3 << 20) % (size - (1 << 20))
        block[at : at + len(patch)] = patch
        found.append(f"{generation} {hashlib.sha256(block).hexdigest()}")
    return found


def test_ten_cycles_of_disk_and_memory(sandbox):
    sandbox.files.write("/home/user/holder.py", HOLDER)
    holder = sandbox.commands.run("exec python3 holder.py", background=True, timeout=0)
    wanted = expected_digests()
    for cycle in range(CYCLES):
        content = random.Random(cycle).randbytes(300_000)
        sandbox.files.write(f"/home/user/plain-{cycle}", content)  # in the guest's page cache only
        sandbox.commands.run(
            'python3 -c "import os;'
            f" f = open('synced-{cycle}', 'wb'); f.write(bytes([{cycle}]) * 70000); f.flush(); os.fsync(f.fileno())\""
        )
        if cycle:
            sandbox.commands.run(f"rm plain-{cycle - 1}")
        sandbox.pause()
        sandbox.connect(timeout=600)
        answer = sandbox.commands.run("touch ask; while [ ! -e answer ]; do sleep 0.02; done; cat answer; rm answer", timeout=120).stdout
        assert answer == wanted[cycle], f"memory differs after cycle {cycle}"
        assert bytes(sandbox.files.read(f"plain-{cycle}", format="bytes")) == content
        for earlier in range(cycle + 1):
            assert bytes(sandbox.files.read(f"synced-{earlier}", format="bytes")) == bytes([earlier]) * 70000
        if cycle:
            assert not sandbox.files.exists(f"plain-{cycle - 1}")
    assert holder.pid in [process.pid for process in sandbox.commands.list()]
    sandbox.commands.run("sync; echo 3 | sudo tee /proc/sys/vm/drop_caches >/dev/null")
    content = random.Random(CYCLES - 1).randbytes(300_000)
    assert bytes(sandbox.files.read(f"plain-{CYCLES - 1}", format="bytes")) == content, "what is on the disk differs from what was cached"
    assert "errors=" not in sandbox.commands.run("sudo dmesg | grep -i 'ext4.*error' || true").stdout
    assert sandbox.commands.run("sudo dmesg | grep -ci 'I/O error' || true").stdout.strip() == "0"
