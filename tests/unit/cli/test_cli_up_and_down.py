"""The server process: start, find, refuse, stop. As real processes, with a node that has no VMs."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aenv_runner import aenv_process, free_port, process_environment, wait_for

from agentenv.cli.node import ServerRecord, load_config, read_record
from agentenv.host.process import start_ticks


@pytest.fixture
def down():
    """Ends whatever server a test leaves."""
    yield
    record = read_record(load_config())
    if record is not None and record.is_alive():
        os.kill(record.pid, signal.SIGKILL)


@pytest.fixture
def fit_host(monkeypatch):
    """These tests are about the server, so a host that lacks something must not stop them; the check itself has its own."""
    monkeypatch.setenv("FAKE_HOST", "fit")


def up(*arguments, **environment):
    return aenv_process("up", "--detach", *arguments, env=environment)


def test_up_env_ls_down(down, fit_host):
    first = up()
    assert first.returncode == 0, first.stderr
    assert "fetch guest kernel: 100.0 MiB / 100.0 MiB" in first.stderr
    record = read_record(load_config())
    assert record.is_alive()
    assert f"pid {record.pid}" in first.stderr

    again = up()
    assert again.returncode == 0
    assert f"already up: http://127.0.0.1:{record.port} (pid {record.pid}" in again.stderr

    exports = aenv_process("env")
    assert exports.stderr == ""
    started = aenv_process("start")
    assert started.returncode == 0, started.stderr
    assert started.stdout.strip() in aenv_process("ls").stdout
    shell = subprocess.run(
        ["sh", "-c", 'eval "$1"; echo "$E2B_API_URL $E2B_API_KEY"', "sh", exports.stdout], capture_output=True, text=True, check=True
    )
    assert shell.stdout.split() == [f"http://127.0.0.1:{record.port}", "e2b_" + "0123456789" * 4]

    ended = aenv_process("down")
    assert ended.returncode == 0, ended.stderr
    assert f"stopped the server, pid {record.pid}" in ended.stderr
    assert "paused 2 sandboxes" in ended.stderr
    assert not record.is_alive()
    assert read_record(load_config()) is None
    second = aenv_process("down")
    assert second.returncode == 0
    assert "the server is not running" in second.stderr


def test_template_of_a_node_that_is_up_must_be_there(down, fit_host):
    assert up("--template", "code-interpreter-v1").returncode == 0  # the node without VMs makes none
    refused = up("--template", "base", "--template", "code-interpreter-v1")
    assert refused.returncode == 1
    assert "the node is up without code-interpreter-v1" in refused.stderr
    assert "`aenv down` (sandboxes are paused), then `aenv up --template code-interpreter-v1`" in refused.stderr
    assert up("--template", "base").returncode == 0


def test_unknown_template_is_a_usage_error(fit_host):
    refused = up("--template", "nope")
    assert refused.returncode == 2
    assert "code-interpreter-v1" in refused.stderr


def test_port_and_home_of_up_hold_for_later_commands(down, fit_host, tmp_path):
    port = free_port()
    assert up("--port", str(port), "--home", str(tmp_path / "elsewhere")).returncode == 0
    values = json.loads(aenv_process("env", "--json").stdout)
    assert values["E2B_API_URL"] == f"http://127.0.0.1:{port}"
    assert aenv_process("ls").returncode == 0
    assert (tmp_path / "elsewhere" / "log" / "server.log").exists()
    assert aenv_process("down").returncode == 0


def test_busy_port_names_the_holder_and_the_option(fit_host):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        result = up("--port", str(port))
    assert result.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use by" in result.stderr
    assert f"(pid {os.getpid()})" in result.stderr
    assert "--port N" in result.stderr
    assert read_record(load_config()) is None


@pytest.mark.parametrize(
    ("mode", "says"),
    [("prepare-fails", "no mirror answers"), ("serve-dies", "ended with status 7"), ("serve-dies", "about to die of a bad database")],
)
def test_failed_start_says_why_and_leaves_nothing(fit_host, mode, says):
    result = up(FAKE_WIRING=mode)
    assert result.returncode == 1
    assert says in result.stderr
    assert "hint: " in result.stderr
    assert read_record(load_config()) is None


def test_a_server_that_never_answers_is_ended(fit_host):
    result = up(FAKE_WIRING="serve-hangs", FAKE_HEALTH_DEADLINE_S="1.5")
    assert result.returncode == 1
    assert "no answer on" in result.stderr
    assert read_record(load_config()) is None


def test_interrupted_up_leaves_no_server(fit_host):
    process = subprocess.Popen(
        [sys.executable, "-m", "agentenv.cli", "up", "--detach"],
        env=process_environment({"FAKE_WIRING": "serve-hangs"}),
        stderr=subprocess.PIPE,
        text=True,
    )
    record = wait_for(lambda: read_record(load_config()))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert not record.is_alive()


def test_foreground_server_stops_with_ctrl_c(fit_host):
    process = subprocess.Popen([sys.executable, "-m", "agentenv.cli", "up"], env=process_environment({}), stderr=subprocess.PIPE, text=True)
    record = wait_for(lambda: read_record(load_config()))
    assert record.pid == process.pid
    wait_for(lambda: aenv_process("ls").returncode == 0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode in (0, 130)
    assert read_record(load_config()) is None


def test_a_server_that_ignores_sigterm_is_killed(down, fit_host):
    assert up(FAKE_WIRING="stop-hangs").returncode == 0
    record = read_record(load_config())
    result = aenv_process("down", env={"FAKE_STOP_DEADLINE_S": "1"})
    assert result.returncode == 0
    assert "killed: it did not stop by itself" in result.stderr
    assert not record.is_alive()


def test_record_of_a_recycled_pid_is_not_the_server(fit_host):
    config = load_config()
    config.node.run.mkdir(parents=True)
    (config.node.run / "server.pid").write_text(f"{os.getpid()} {start_ticks(os.getpid()) + 1}\n")
    (config.node.run / "server.json").write_text(json.dumps({"host": "127.0.0.1", "port": config.api.port, "home": str(config.node.home)}))
    assert not read_record(config).is_alive()
    result = aenv_process("down")
    assert result.returncode == 0
    assert "the server is not running" in result.stderr


@pytest.mark.parametrize("content", ["", "x y", "12", "1 2 3"])
def test_damaged_record_is_no_record(content):
    config = load_config()
    config.node.run.mkdir(parents=True)
    (config.node.run / "server.pid").write_text(content)
    (config.node.run / "server.json").write_text("{}")
    assert read_record(config) is None


def test_up_on_another_home_after_a_crash_is_refused(down, fit_host, tmp_path):
    assert up("--home", str(tmp_path / "first")).returncode == 0
    record = read_record(load_config())
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not record.is_alive())
    refused = up()
    assert refused.returncode == 1
    assert f"--home {tmp_path / 'first'}" in refused.stderr
    assert up("--home", str(tmp_path / "first")).returncode == 0
    assert aenv_process("down").returncode == 0
    assert up().returncode == 0


def test_two_ups_at_once_start_one_server(down, fit_host):
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "agentenv.cli", "up", "--detach"], env=process_environment({}), stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert 0 in codes
    for code, text in zip(codes, errors, strict=True):
        assert code == 0 or "another `aenv up` is at work" in text or "is in use" in text
    assert sum("the node is up" in text for text in errors) == 1
    assert read_record(load_config()).is_alive()


def test_down_kill(fit_host):
    assert "killed 2 sandboxes" in aenv_process("down", "--kill").stderr


def test_unfit_host_is_told_check_by_check():
    result = aenv_process("up", "--detach", env={"FAKE_HOST": "bare"})
    assert result.returncode == 1
    assert "this machine cannot be a node yet" in result.stderr
    assert "nft: no program nft" in result.stderr
    assert "apt-get install nftables" in result.stderr
    assert read_record(load_config()) is None


def test_assets():
    result = aenv_process("assets", "--json", "--verify")
    assert json.loads(result.stdout) == {"kernel": {"version": "6.12", "path": "/x"}, "verified": True}
    assert "kernel.version  6.12" in aenv_process("assets").stdout


def test_record_names_port_and_home():
    record = ServerRecord(1, 2, "127.0.0.1", 3000, Path("/x"))
    assert record.is_alive() is False
