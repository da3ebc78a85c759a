"""What the agent costs: size, memory and descriptors, at rest and after much work (budgets of the contract's issue)."""

import base64
import concurrent.futures
import hashlib
import http.client
import json
import re
import struct
import subprocess
import threading
import time
from pathlib import Path

from envd_rig import Stream, frame

COMMANDS = 10_000
LANES = 4
STREAM = {"Content-Type": "application/connect+json"}


def test_the_program_is_static_and_small(binary):
    told = subprocess.run(["readelf", "-ld", str(binary)], capture_output=True, text=True, check=True).stdout
    if "debug" not in binary.parts:
        assert "INTERP" not in told, "the program needs a dynamic loader"
        assert "NEEDED" not in told
        assert binary.stat().st_size < 8 << 20


def test_memory_at_rest(binary, fresh):
    assert fresh.run("echo ok").stdout == b"ok\n"
    limit_mib = 24 if "debug" in binary.parts else 6
    assert fresh.rss_bytes() < limit_mib << 20


class Lane:
    """One connection that runs one short command after another, as a client with keep-alive does."""

    def __init__(self, envd):
        self.connection = http.client.HTTPConnection("127.0.0.1", envd.port, timeout=120)

    def run(self, message):
        self.connection.request("POST", "/process.Process/Start", frame(message), STREAM)
        return self.connection.getresponse().read()


def descriptors(envd):
    return len(list(Path(f"/proc/{envd.child.pid}/fd").iterdir()))


def threads(envd):
    return len(list(Path(f"/proc/{envd.child.pid}/task").iterdir()))


def settled(read, limit, wait_s=60):
    """The last reading: the first at or below `limit`, else the one after `wait_s`."""
    end = time.monotonic() + wait_s
    while (found := read()) > limit and time.monotonic() < end:
        time.sleep(0.2)
    return found


def test_ten_thousand_commands_leave_nothing(fresh):
    """Memory after the first tenth is that after all of them, but for what the statuses kept for 30 s take."""
    lanes = [Lane(fresh) for _ in range(LANES)]
    message = {"process": {"cmd": "/bin/true", "args": ["x" * 2000]}, "stdin": False}

    def work(lane, count):
        for _ in range(count):
            assert b'"exitCode":0' in lane.run(message)

    def all_lanes(count):
        with concurrent.futures.ThreadPoolExecutor(LANES) as pool:
            for done in [pool.submit(work, lane, count // LANES) for lane in lanes]:
                done.result()

    all_lanes(COMMANDS // 10)
    before_bytes, before_fds = fresh.rss_bytes(), descriptors(fresh)
    all_lanes(COMMANDS - COMMANDS // 10)
    # 4096 statuses are kept, of a few dozen bytes each; arguments and buffers of ended commands are not.
    assert fresh.rss_bytes() - before_bytes < 2 << 20
    assert settled(lambda: descriptors(fresh), before_fds) <= before_fds
    assert threads(fresh) <= 20
    assert fresh.pids() == set()
    for lane in lanes:
        lane.connection.close()
    assert settled(lambda: descriptors(fresh), before_fds - LANES) <= before_fds - LANES


def test_three_hundred_megabytes_arrive_byte_for_byte(envd):
    size_bytes = 300_000_000
    script = f"""
import hashlib, sys
digest, out, left, n = hashlib.sha256(), sys.stdout.buffer, {size_bytes}, 0
while left:
    block = b"".join(hashlib.sha512(b"%d" % (n + i)).digest() for i in range(64)) * 256
    block = block[:left]
    n += 64
    left -= len(block)
    digest.update(block)
    out.write(block)
out.flush()
sys.stderr.write(digest.hexdigest())
"""
    message = {"process": {"cmd": "python3", "args": ["-c", script]}, "stdin": False}
    connection = http.client.HTTPConnection("127.0.0.1", envd.port, timeout=300)
    connection.request("POST", "/process.Process/Start", frame(message), STREAM)
    reply = connection.getresponse()
    received, digest, told = 0, hashlib.sha256(), b""
    while head := reply.read(5):
        flags, length = struct.unpack(">BI", head)
        payload = reply.read(length)
        if found := re.search(rb'"stdout":"([^"]*)"', payload):
            block = base64.b64decode(found[1])
            received += len(block)
            digest.update(block)
        elif found := re.search(rb'"stderr":"([^"]*)"', payload):
            told += base64.b64decode(found[1])
        if flags == 2:
            assert payload == b"{}"
    assert received == size_bytes
    assert digest.hexdigest() == told.decode()
    assert envd.rss_bytes() < 32 << 20


def test_many_quiet_processes_take_little(fresh):
    """Case L02 in small: what waits without output holds no buffers."""
    before_bytes = fresh.rss_bytes()
    streams, message = [], {"process": {"cmd": "/bin/sleep", "args": ["300"]}, "stdin": False}
    try:
        for _ in range(300):
            streams.append(Stream(fresh.port, "process.Process/Start", message, {}, 60))
        assert fresh.rss_bytes() - before_bytes < 300 * 64 << 10
        assert len(fresh.pids()) == 300
    finally:
        for pid in fresh.pids():
            fresh.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 15})
        for stream in streams:
            stream.close()
    assert settled(lambda: len(fresh.pids()), 0) == 0


def test_a_client_that_leaves_while_its_command_starts_leaves_it_followed(fresh):
    """The command runs to its end, and its deadline holds (case A06)."""
    message = {"process": {"cmd": "/bin/sleep", "args": ["300"]}, "stdin": False}

    def one():
        connection = http.client.HTTPConnection("127.0.0.1", fresh.port, timeout=20)
        connection.request("POST", "/process.Process/Start", frame(message), {**STREAM, "Connect-Timeout-Ms": "2000"})
        connection.close()

    workers = [threading.Thread(target=one) for _ in range(40)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert settled(lambda: len(fresh.pids()), 0, 20) == 0
    assert json.loads(fresh.request("POST", "/process.Process/List", "{}", {"Content-Type": "application/json"})[2]) == {"processes": []}


def test_a_slow_follower_does_not_hold_up_the_others_for_ever(fresh):
    """Case A12: it is given 30 s to take something, then it is told that it was dropped and the others go on."""
    stream = fresh.shell("head -c 40000000 /dev/zero; echo; echo done >&2")
    pid = stream.pid()
    slow = fresh.open("process.Process/Connect", {"process": {"pid": pid}}, timeout_s=120)
    assert slow.pid() == pid
    before = time.monotonic()
    result = stream.result()
    assert len(result.stdout) == 40_000_001
    assert time.monotonic() - before < 90
    error = slow.error()
    assert error["code"] == "resource_exhausted"
    assert "connect again" in error["message"]
