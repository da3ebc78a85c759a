"""The packaged service under a real systemd: sandboxes outlive every way in which the server ends, and no connection is refused."""

from __future__ import annotations

import sys
import time
import urllib.request
from pathlib import Path

import pytest
from e2e_node import POOL_CIDR, free_port
from systemd_machine import SYSTEMD, Machine

REPOSITORY = Path(__file__).parents[2]
SERVICE = "agentenv.service"
SERVER_CAPABILITIES = 18


@pytest.fixture
def machine(node, tmp_path):
    """A machine that is set up by `aenv setup`, with the home of the tests' node, which is down meanwhile."""
    assert SYSTEMD.exists(), "these tests need systemd: `tools/setup.sh tests`"
    node.aenv("down", "--kill")
    port = free_port()
    shared = {REPOSITORY, Path(sys.prefix), node.home}
    with Machine(tmp_path / "machine", sorted(shared), tmp_path / "systemd.log") as made:
        settings = f'[node]\nhome = "{node.home}"\n[network]\npool_cidr = "{POOL_CIDR}"\n[api]\nport = {port}\n'
        made.run("sh", "-c", 'mkdir -p /etc/agentenv; printf %s "$1" > /etc/agentenv/config.toml', "sh", settings)
        # The kernel is this machine's, which a test leaves alone: another name of the root folder is another machine's to `setup`.
        made.aenv("setup", "--root", "/proc/self/root", "--no-packages", "--yes")
        made.run("systemctl", "daemon-reload")
        made.port = port
        try:
            yield made
        finally:
            made.aenv("down", "--kill", check=False)
    node.up()


def main_pid(machine) -> str:
    return machine.run("systemctl", "show", "--property=MainPID", "--value", SERVICE).stdout.strip()


def serves(machine) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{machine.port}/health", timeout=60) as answer:  # no try: nobody refuses
        assert answer.status == 200


@pytest.mark.timeout(1200)
def test_a_sandbox_outlives_every_end_of_its_server(machine):
    machine.run("systemctl", "start", SERVICE, timeout_s=1200)
    status = dict(
        line.split(":\t") for line in machine.run("cat", f"/proc/{main_pid(machine)}/status").stdout.splitlines() if ":\t" in line
    )
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert int(status["CapBnd"], 16).bit_count() <= SERVER_CAPABILITIES
    sandbox = machine.aenv("start").strip()
    machine.aenv("exec", sandbox, "(while :; do echo beat >> /tmp/beat; sleep 0.2; done) > /dev/null 2>&1 &")

    def beats() -> int:
        return int(machine.aenv("exec", sandbox, "wc -l < /tmp/beat"))

    seen = [beats()]

    def goes_on(what: str) -> None:
        end = time.monotonic() + 60
        while (now := beats()) <= seen[-1]:
            assert time.monotonic() < end, f"the sandbox stands still after {what}"
        seen.append(now)

    pids = [main_pid(machine)]
    for verb in ("reload", "restart"):
        machine.run("systemctl", verb, SERVICE)
        pids.append(main_pid(machine))
        goes_on(verb)
    with machine.streaming(sandbox):  # the server before this one lives on for it, which must hide nothing from systemd
        machine.run("systemctl", "reload", SERVICE)
        machine.run("kill", "-9", main_pid(machine))
        serves(machine)
        pids.append(main_pid(machine))
        goes_on("kill -9 beside a former server")
    machine.run("kill", "-9", main_pid(machine))
    serves(machine)
    pids.append(main_pid(machine))
    goes_on("kill -9")
    assert len(set(pids)) == 5, pids
    machine.run("sh", "-c", "cp /etc/agentenv/config.toml /tmp/kept; echo broken >> /etc/agentenv/config.toml")
    assert machine.run("systemctl", "reload", SERVICE, check=False).returncode != 0
    machine.run("sh", "-c", "cat /tmp/kept > /etc/agentenv/config.toml")
    assert main_pid(machine) == pids[-1]
    goes_on("a reload with a broken configuration")
    machine.run("systemctl", "stop", SERVICE)
    machine.run("systemctl", "start", SERVICE)
    goes_on("stop and start")
    machine.aenv("pause", sandbox)
    machine.aenv("resume", sandbox)
    goes_on("pause and resume")
    machine.aenv("kill", sandbox)
    machine.aenv("down")
    assert machine.run("systemctl", "is-active", SERVICE, check=False).stdout.strip() == "inactive", "started again after `aenv down`"
    machine.aenv("setup", "--root", "/proc/self/root", "--remove", "--yes")
    assert SERVICE not in machine.run("ls", "/etc/systemd/system", "/etc/systemd/system/multi-user.target.wants").stdout
