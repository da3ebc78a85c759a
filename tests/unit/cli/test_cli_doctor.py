"""The checks of `aenv doctor`: each outcome of each check, and what the command makes of them."""

import json
import os
import socket
import threading

import pytest
from click.testing import CliRunner

from agentenv.cli import checks
from agentenv.cli.main import cli
from agentenv.cli.node import load_config
from agentenv.host import doctor, production, requirements
from agentenv.host.doctor import Check, host_checks, kvm_kind
from agentenv.host.requirements import Finding


def run(*arguments):
    return CliRunner().invoke(cli, ["doctor", *arguments], prog_name="aenv")


def test_every_check_that_is_not_ok_says_what_to_do(monkeypatch):
    monkeypatch.setattr(requirements, "find_program", lambda name: None)
    found = host_checks(load_config())
    assert len({check.name for check in found}) == len(found)
    for check in found:
        assert check.detail
        assert check.status == "ok" or check.hint, check.name
    missing = [check for check in found if check.name in ("ip", "nft", "mmdebstrap", "mke2fs")]
    assert [check.status for check in missing] == ["fail"] * 4
    assert all("install" in check.hint for check in missing)


def test_every_requirement_is_checked_and_optional_ones_only_warn():
    found = {check.name for check in host_checks(load_config())}
    assert {entry.name for entry in requirements.REQUIREMENTS} - found == {"qemu"}
    for entry in requirements.REQUIREMENTS:
        check = doctor._required(Finding(entry, "broken"))
        assert check.status == ("fail" if entry.required else "warn")
        assert "broken" in check.detail
        assert entry.why in check.detail


def test_json_shape_and_exit_code(monkeypatch):
    monkeypatch.setattr(doctor, "host_checks", lambda config: [Check("root", "ok", "fine"), Check("kvm", "warn", "slow", "faster machine")])
    monkeypatch.setattr(checks, "product_checks", lambda config: [])
    monkeypatch.setattr(production, "production_checks", lambda config: [])
    result = run("--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == [
        {"name": "root", "status": "ok", "detail": "fine", "hint": "", "group": "sandboxes", "need": "needed"},
        {"name": "kvm", "status": "warn", "detail": "slow", "hint": "faster machine", "group": "sandboxes", "need": "needed"},
    ]
    monkeypatch.setattr(checks, "product_checks", lambda config: [Check("envd", "fail", "missing", "build it")])
    result = run()
    assert result.exit_code == 1
    assert "fail  envd" in result.stdout
    assert "-> build it" in result.stdout
    assert "not ready: envd" in result.stderr
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("present", "accessible", "kind"),
    [
        ((), True, "absent"),
        (("/dev/kvm",), True, "usable"),
        (("/dev/kvm",), False, "forbidden"),
        (("/dev/kvm", "/sys/module/kvm_pvm"), True, "pvm"),
    ],
)
def test_kvm_kinds(monkeypatch, present, accessible, kind):
    monkeypatch.setattr(doctor.Path, "exists", lambda path: str(path) in present)
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: accessible)
    assert kvm_kind() == kind


@pytest.mark.parametrize("kind", ["absent", "pvm", "forbidden"])
def test_kvm_is_only_fatal_when_it_is_demanded(monkeypatch, kind):
    monkeypatch.setattr(doctor, "kvm_kind", lambda: kind)
    assert doctor._kvm(load_config()).status == "warn"
    demanded = doctor._kvm(load_config(vmm_accelerator="kvm"))
    assert demanded.status == "fail"
    assert "vmm.accelerator" in demanded.hint


@pytest.mark.parametrize(("free", "status"), [(100 << 20, "fail"), (4 << 30, "warn"), (100 << 30, "ok")])
def test_disk(monkeypatch, free, status):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free})())
    check = doctor._disk(load_config())
    assert check.status == status


def test_memory_names_the_settings(monkeypatch):
    monkeypatch.setattr(doctor, "_meminfo", lambda: {"MemAvailable": 100 << 10})
    check = doctor._memory(load_config())
    assert check.status == "warn"
    assert "limits.memory_reserve_mb" in check.hint


def test_busy_port_is_told_with_its_holder():
    config = load_config()
    with socket.create_server(("127.0.0.1", config.api.port)):
        check = checks._server(config)
    assert check.status == "fail"
    assert f"(pid {os.getpid()})" in check.detail
    assert checks._server(config).status == "ok"


def test_native_programs(monkeypatch, tmp_path):
    monkeypatch.setattr("agentenv.host.native.FOLDER", tmp_path)
    assert checks._native("blockd", "version").status == "fail"
    program = tmp_path / "blockd"
    program.write_text("#!/bin/sh\necho blockd 1.2.3\n")
    program.chmod(0o755)
    assert checks._native("blockd", "version") == Check("blockd", "ok", "blockd 1.2.3")
    program.write_text("#!/bin/sh\necho broken library >&2; exit 127\n")
    broken = checks._native("blockd", "version")
    assert broken.status == "fail"
    assert "broken library" in broken.detail
    program.write_text("not a program")
    assert checks._native("blockd", "version").status == "fail"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"protocol": 1, "pid": 77}', "ok", "pid 77"),
        (b'{"protocol": 99, "pid": 77}', "fail", "speaks protocol 99"),
        (None, "warn", "blockd does not answer"),
    ],
)
def test_handshake_with_a_running_blockd(monkeypatch, tmp_path, body, status, says):
    monkeypatch.setattr("agentenv.host.native.FOLDER", tmp_path)
    (tmp_path / "blockd").write_text("#!/bin/sh\necho blockd 1.2.3\n")
    (tmp_path / "blockd").chmod(0o755)
    config = load_config()
    config.node.run.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(config.node.run / "blockd.sock"))
    if body is not None:
        listener.listen()

        def answer():
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
    check = checks._blockd(config)
    listener.close()
    assert check.status == status
    assert says in check.detail


def test_only_with_production_does_it_fail_for_what_production_needs(monkeypatch):
    monkeypatch.setattr(doctor, "host_checks", lambda config: [Check("root", "ok", "fine")])
    monkeypatch.setattr(checks, "product_checks", lambda config: [])
    advised = Check("swap", "warn", "on", "turn it off", "production", "advised")
    needed = Check("cgroup v2", "warn", "none", "boot anew", "production", "needed")
    monkeypatch.setattr(production, "production_checks", lambda config: [needed, advised])
    assert run().exit_code == 0
    result = run("--production")
    assert result.exit_code == 1
    assert "not ready for production: cgroup v2\n" in result.stderr
    assert (
        result.stdout.index("production needs")
        < result.stdout.index("cgroup v2")
        < result.stdout.index("advised")
        < result.stdout.index("swap")
    )
    monkeypatch.setattr(production, "production_checks", lambda config: [advised])
    assert run("--production").exit_code == 0
