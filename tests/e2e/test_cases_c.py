"""Pausing, resuming, clocks and timeouts of real guests (cases C).

Elsewhere: C04, C06 test_filesystem_pause; C15, C16 unit test_orchestrator_fail_at_step and _stories; C18, C19, C23, C26 unit
test_orchestrator_timeouts and _pairs; the two hours of C33 unit test_orchestrator_soak; C28, C29 unit test_api_lifecycle, test_api_list and
test_proxy_sandboxes; C31 test_damage. C11 is of vsock, which guests here do not have. `AENV_CASES=full` takes the amounts of the reports.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from crashes import open_stacks, vmms
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from e2b import Sandbox, SandboxException, SandboxState
from guest_programs import PATIENCE_S, count, start_counter, wait_beyond, wait_for

from agentenv.client import Sandbox as OwnSandbox

FULL = os.environ.get("AENV_CASES") == "full"
FULL_TIMEOUT = pytest.mark.timeout(7200 if FULL else 300)
pytestmark = FULL_TIMEOUT
FIRST_CALL_S = 1.0 if FULL else 8.0  # more than another call; a stall of the class lasts 30 s, and an emulated guest takes its time
CORES = os.cpu_count() or 1
LANES = min(50, 4 * CORES) if FULL else 2  # of C13: what streams of more guests do to a small machine is not what it looks for


def many(quick: int, full: int) -> int:
    return full if FULL else quick


def seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def require_no_stall(call: Callable[[], object], start_s: float) -> None:
    """A first call takes little more than the next, whatever else keeps the machine busy: the start took its part of that."""
    first_s, next_s = seconds(call), seconds(call)
    assert first_s - next_s < FIRST_CALL_S + start_s, f"{first_s:.2f} s, then {next_s:.2f} s, after a start of {start_s:.2f} s"


@pytest.fixture
def own(node) -> Iterator[Any]:
    """A sandbox with checkpoints that pauses when its time is up."""
    made = OwnSandbox.create("base", timeout=3600, lifecycle={"on_timeout": "pause"}, **node.options)
    yield made
    made.kill()


# --- C01 ---------------------------------------------------------------------------------------------------------------


def test_c01_no_change_is_lost_in_any_cycle(node, own):
    start_counter(own)
    log, size = "", many(4, 64) << 20
    for n in range(many(4, 30)):
        own.files.write(f"f{n}", f"cycle {n}")
        own.commands.run(
            f"yes {n} | head -c {size} | dd of=big bs=64K conv=notrunc status=none; echo {n} >> log; rm -f f{n - 1}", timeout=600
        )
        log += f"{n}\n"
        reached = count(own)
        own.pause()
        if n % 3 == 2:
            node.kill_server()
            node.up()
        own.connect(timeout=3600)
        pattern = (f"{n}\n" * (size // len(f"{n}\n") + 1))[:size].encode()
        assert own.commands.run("md5sum < big", timeout=600).stdout.split()[0] == hashlib.md5(pattern).hexdigest(), f"in cycle {n}"
        assert (own.files.read(f"f{n}"), own.files.read("log")) == (f"cycle {n}", log)
        assert not own.files.exists(f"f{n - 1}")
        wait_beyond(own, reached)


# --- C03, C22, C25 -----------------------------------------------------------------------------------------------------

RECORDS = """
import sys, time
out = open("/home/user/records", "a")
number = 0
while True:
    out.write(f"{number}\\n"); out.flush()
    print(number, flush=True)
    number += 1
    time.sleep(0.001)
"""


@pytest.mark.parametrize("how", ["timeout", "by hand"])
def test_c03_every_record_that_was_told_is_there_after_a_pause(own, how):
    own.files.write("writer.py", RECORDS)
    for _ in range(many(2, 50)):
        own.commands.run("rm -f records")
        handle, told = own.commands.run("exec python3 writer.py", background=True, timeout=0), -1
        end = time.monotonic() + 3
        for out, _err, _pty in handle:
            told = int((out or "0").split()[-1])
            if told > 10 and time.monotonic() > end:
                break
        assert told > 10, "the writer ended by itself"
        own.set_timeout(0) if how == "timeout" else own.pause()
        assert own.get_info().state is SandboxState.PAUSED
        own.connect(timeout=3600)
        own.commands.run("pkill -f '[w]riter.py' || true")
        records = own.files.read("records").split()
        assert records[: told + 1] == [str(n) for n in range(told + 1)]


def test_c22_c25_the_policy_outlives_connect_fork_and_restart_and_the_node_acts_by_itself(node, own):
    own.pause()
    again = Sandbox.connect(own.sandbox_id, timeout=3600, **node.options)
    (child,) = own.fork(count=1, timeout=3600)
    for one in (again, child):
        one.set_timeout(15)
    node.kill_server()  # nobody is there when the time is up
    time.sleep(many(3, 30))
    node.up()
    for one in (own, child):
        wait_for(lambda one=one: one.get_info().state is SandboxState.PAUSED, "its time was up, and it was not paused")
        one.connect(timeout=600)
    child.kill()


# --- C07, C09 ----------------------------------------------------------------------------------------------------------


def certificate(since: datetime) -> str:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), since, since + timedelta(hours=1))
    ca = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return ca.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize("how", ["resume", "fork", "rollback"])
def test_c07_c09_after_a_while_the_clock_is_right_from_the_first_command_on(own, how):
    source = own.commands.run("cat /sys/devices/system/clocksource/clocksource0/current_clocksource").stdout.strip()
    assert source in ("tsc", "kvm-clock"), f"{source}: slow, or not kept by the VMM"
    own.commands.run("while :; do date +%s.%N >> ticks; sleep 0.05; done", background=True, timeout=0)
    own.checkpoint("before")
    own.pause()
    time.sleep(many(6, 90))
    issued = datetime.now(UTC)
    began = time.time()
    if how == "resume":
        own.connect(timeout=3600)
        one = own
    elif how == "fork":
        (one,) = own.fork(count=1)
    else:
        own.connect(timeout=3600)
        began = time.time()
        own.rollback("before")
        one = own
    asked = time.time()
    told = float(one.commands.run("date +%s.%N").stdout)
    assert asked - 0.5 <= told <= time.time() + 0.5, f"{told - asked:.2f} s off"
    one.files.write("cert.pem", certificate(issued))
    assert one.commands.run("openssl verify -CAfile cert.pem cert.pem").stdout.strip() == "cert.pem: OK"
    size = int(one.commands.run("wc -c < ticks").stdout)
    time.sleep(2)
    later = [float(tick) for tick in one.commands.run(f"tail -c +{size + 1} ticks | tail -n +2").stdout.split()]
    assert later, "the loop stands still"
    assert min(later) >= began, "a program saw the time of before"
    assert later == sorted(later)
    complaints = one.commands.run("sudo dmesg | grep -iE 'lockup|rcu.*stall' || true").stdout
    assert not complaints, complaints
    if one is not own:
        one.kill()


# --- C10, C13 ----------------------------------------------------------------------------------------------------------


def test_c10_the_first_call_after_each_resume_and_rollback_is_answered_at_once(node, own):
    own.commands.run("exec python3 -m http.server 8000", background=True, timeout=0)
    headers = {"E2b-Sandbox-Id": own.sandbox_id, "E2b-Sandbox-Port": "8000"}
    with httpx.Client(timeout=60) as keeps_alive:

        def ask_port() -> None:
            assert keeps_alive.get(f"{node.url}/", headers=headers).status_code == 200

        def ask_agent() -> None:
            own.files.exists("/home/user")

        wait_for(lambda: httpx.get(f"{node.url}/", headers=headers).status_code == 200, "the server does not answer")
        own.checkpoint("here")
        for _ in range(many(4, 20)):
            start_s = seconds(lambda: own.rollback("here"))
            require_no_stall(ask_port, start_s)
            require_no_stall(ask_agent, start_s)
        own.pause()
        for _ in range(many(3, 20)):  # one snapshot, again and again
            start_s = seconds(lambda: own.connect(timeout=3600))
            require_no_stall(ask_agent, start_s)
            require_no_stall(ask_port, start_s)
            own.pause()
            own.rollback("here")
        own.connect(timeout=3600)


def test_c13_pauses_under_open_streams_and_polling(node):
    failures: list[str] = []

    def cycles(number: int) -> None:
        box = Sandbox.create("base", timeout=3600, **node.options)
        try:
            for cycle in range(many(3, 2000 // LANES)):
                handle = box.commands.run("while :; do echo x; sleep 0.02; done", background=True, timeout=0)
                polls = threading.Thread(target=lambda: [box.is_running() for _ in range(5)])
                polls.start()
                box.pause()
                polls.join()
                box.connect(timeout=3600)
                handle.disconnect()
                if box.commands.run("echo ok").stdout != "ok\n":
                    failures.append(f"{number}/{cycle}: another answer")
                box.commands.kill(handle.pid)
        except Exception as error:  # noqa: BLE001 - told below, by whom
            failures.append(f"{number}: {error!r}")
        finally:
            box.kill()

    lanes = [threading.Thread(target=cycles, args=(number,)) for number in range(LANES)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    assert failures == []


# --- C17, C21 ----------------------------------------------------------------------------------------------------------


def test_c17_a_pause_leaves_no_process_no_disk_and_no_network(node, own):
    assert own.sandbox_id in vmms(node)
    (disk,) = [row["vm"]["disk_stack"] for row in node.records("sandboxes") if row["sandbox_id"] == own.sandbox_id]
    assert disk in open_stacks(node)
    own.pause()
    wait_for(lambda: own.sandbox_id not in vmms(node), "its VMM lives on")
    wait_for(lambda: disk not in open_stacks(node), "its disk is open still")
    wait_for(lambda: not list((node.run / "vms").glob(f"{own.sandbox_id}*")), "its folder is there still")
    own.connect(timeout=3600)
    assert own.commands.run("echo ok").stdout == "ok\n"


def test_c16_c21_a_vmm_that_hangs_fails_the_pause_and_can_be_killed(node):
    box = Sandbox.create("base", timeout=3600, **node.options)
    pid = vmms(node)[box.sandbox_id]
    os.kill(pid, signal.SIGSTOP)  # it ignores everything but SIGKILL
    try:
        with pytest.raises(SandboxException):
            Sandbox.pause(box.sandbox_id, request_timeout=120, **node.options)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: box.get_info().state is SandboxState.RUNNING, "it is left half-way")
    assert box.commands.run("echo ok", timeout=PATIENCE_S).stdout == "ok\n", "it stands still"
    os.kill(pid, signal.SIGSTOP)
    assert box.kill() is True
    wait_for(lambda: box.sandbox_id not in vmms(node), "its VMM lives on")
    assert box.kill() is False


# --- C33 ---------------------------------------------------------------------------------------------------------------


def test_c33_nobody_vanishes_before_its_time_and_the_end_has_a_reason(node):
    boxes = [Sandbox.create("base", timeout=7200, **node.options) for _ in range(many(3, 8 * CORES))]
    restarts, period_s = many(2, 12), many(10, 60)
    try:
        for _ in range(restarts):
            end = time.monotonic() + period_s
            while time.monotonic() < end:
                for box in boxes:
                    assert box.commands.run("echo here").stdout == "here\n"
            node.kill_server()
            node.up()
        os.kill(vmms(node)[boxes[0].sandbox_id], signal.SIGKILL)
        boxes[1].set_timeout(0)
        reasons = {}
        for name, box in (("crashed", boxes[0]), ("expired", boxes[1])):
            wait_for(lambda box=box: not box.is_running(), f"the one that has {name} is there still")
            reasons[name] = node.aenv("logs", box.sandbox_id, "--json").stdout
        assert "ended by itself" in reasons["crashed"]
        assert "its timeout was reached" in reasons["expired"]
    finally:
        for box in boxes:
            box.kill()
