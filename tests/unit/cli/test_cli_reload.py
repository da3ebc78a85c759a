"""`aenv reload`, and the servers that it leaves to their streams. As real processes, with a node that has no VMs (and no succession)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from aenv_runner import aenv_process, wait_for

from agentenv.cli import succession
from agentenv.cli.node import load_config, read_record
from agentenv.host.process import ProcessId, is_alive, start_ticks


@pytest.fixture(autouse=True)
def fit_host(monkeypatch):
    monkeypatch.setenv("FAKE_HOST", "fit")
    yield
    record = read_record(load_config())
    if record is not None and record.is_alive():
        os.kill(record.pid, signal.SIGKILL)


@pytest.fixture
def former():
    """A process that stands in for a server with streams left."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield ProcessId(process.pid, start_ticks(process.pid))
    process.kill()
    process.wait()


def test_without_a_server_there_is_nothing_to_replace():
    done = aenv_process("reload")
    assert done.returncode == 4
    assert "no server runs" in done.stderr
    assert "aenv up" in done.stderr


def test_it_is_told_when_nobody_serves_any_more():
    assert aenv_process("up", "--detach").returncode == 0
    done = aenv_process("reload")  # the stand-in dies of the signal
    assert done.returncode == 1
    assert "the server was not replaced, nobody serves now" in done.stderr
    assert "aenv doctor" in done.stderr


def test_the_next_server_remembers_the_one_before_and_down_ends_both(former):
    config = load_config()
    (config.node.run).mkdir(parents=True)
    dead = "999999 1\n"
    (config.node.run / "server.former").write_text(f"{former.pid} {former.start_ticks}\n{dead}")
    succession.remember_former(config)
    assert succession.formers(config) == [former]
    assert dead not in (config.node.run / "server.former").read_text()
    done = aenv_process("down")
    assert done.returncode == 0, done.stderr
    assert "ended 1 former server(s)" in done.stderr
    wait_for(lambda: not is_alive(former))
    assert not (config.node.run / "server.former").exists()


def test_a_recorded_server_that_lives_becomes_a_former_one(former):
    config = load_config()
    config.node.run.mkdir(parents=True)
    (config.node.run / "server.pid").write_text(f"{former.pid} {former.start_ticks}\n")
    (config.node.run / "server.json").write_text('{"host": "127.0.0.1", "port": 1, "home": "/x"}')
    succession.remember_former(config)
    assert succession.formers(config) == [former]


@pytest.mark.parametrize("damage", ["", "one\n", "1 2 3\n", "a b\n"])
def test_a_damaged_list_is_no_list(damage):
    config = load_config()
    config.node.run.mkdir(parents=True)
    (config.node.run / "server.former").write_text(damage)
    assert succession.formers(config) == []
