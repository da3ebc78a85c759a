"""Which VMM a node runs on, for every kind of host and setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.cli import checks
from agentenv.config.schema import Config, VmmConfig
from agentenv.core.errors import HostNotReady, Unsupported
from agentenv.host.doctor import KvmKind
from agentenv.vmm import choice
from agentenv.vmm.firecracker import FirecrackerDriver
from agentenv.vmm.qemu import QemuDriver
from agentenv.vmm.qemu_install import QemuInstallation


@pytest.fixture
def programs(tmp_path: Path) -> VmmConfig:
    for name in ("firecracker", "jailer"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho {name.capitalize()} v1.12.1\n")
        program.chmod(0o755)
    return VmmConfig(firecracker=str(tmp_path / "firecracker"), jailer=str(tmp_path / "jailer"))


def on_host(monkeypatch: pytest.MonkeyPatch, kind: KvmKind) -> None:
    monkeypatch.setattr(choice, "kvm_kind", lambda: kind)


@pytest.mark.parametrize(
    ("driver", "accelerator", "kind", "expected"),
    [
        ("auto", "auto", "usable", "firecracker"),
        ("auto", "kvm", "usable", "firecracker"),
        ("auto", "tcg", "usable", "qemu"),
        ("auto", "auto", "pvm", "qemu"),
        ("auto", "auto", "absent", "qemu"),
        ("qemu", "auto", "usable", "qemu"),
        ("firecracker", "auto", "usable", "firecracker"),
    ],
)
def test_the_host_and_the_settings_decide(
    programs: VmmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str, accelerator: str, kind: KvmKind, expected: str
) -> None:
    on_host(monkeypatch, kind)
    monkeypatch.setattr(choice, "tsc_khz", lambda: 2_000_000)
    monkeypatch.setattr(choice, "ensure_qemu", lambda *_, **__: QemuInstallation(("/qemu",), "10.0.2", "", "host"))
    config = programs.model_copy(update={"driver": driver, "accelerator": accelerator})
    installed = choice.ensure_vmm(tmp_path, config, False, lambda *_: None)
    made = choice.driver_for(installed, config)
    assert installed.name == expected
    assert type(made) is {"qemu": QemuDriver, "firecracker": FirecrackerDriver}[expected]
    identity = made.identity("k", "i")
    assert (identity.driver, identity.tsc_khz) == (expected, 2_000_000 if expected == "qemu" else 0)
    assert (made.memory.owner is None) == (expected == "qemu")


@pytest.mark.parametrize(
    ("kind", "gone", "reasons"),
    [
        ("pvm", "", ["PVM"]),
        ("absent", "", ["no /dev/kvm"]),
        ("forbidden", "", ["cannot be opened"]),
        ("usable", "jailer", ["vmm.jailer names"]),
        ("absent", "firecracker", ["no /dev/kvm", "vmm.firecracker names"]),
    ],
)
def test_what_is_missing_is_named_where_firecracker_is_asked_for(
    programs: VmmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: KvmKind, gone: str, reasons: list[str]
) -> None:
    on_host(monkeypatch, kind)
    if gone:
        (tmp_path / gone).unlink()
    wanted = programs.model_copy(update={"driver": "firecracker"})
    with pytest.raises(HostNotReady) as error:
        choice.choose(wanted)
    assert all(reason in error.value.message for reason in reasons)
    assert "vmm.driver" in error.value.hint
    assert choice.choose(programs) is None
    check = checks._vmm(Config(vmm=wanted))
    assert (check.status, check.detail) == ("fail", error.value.message)
    shown = checks._vmm(Config(vmm=programs))
    assert reasons[0] in shown.detail


def test_a_program_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch, "usable")
    monkeypatch.setattr(choice, "find_program", lambda name: None)
    with pytest.raises(HostNotReady, match="no program firecracker; there is no program jailer"):
        choice.choose(VmmConfig(driver="firecracker"))


def test_doctor_tells_what_vms_run_on(programs: VmmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch, "usable")
    assert checks._vmm(Config(vmm=programs)).detail == "Firecracker 1.12.1, jailed"
    emulated = programs.model_copy(update={"accelerator": "tcg"})
    assert "vmm.accelerator is tcg" in checks._vmm(Config(vmm=emulated)).detail


def test_firecracker_does_not_emulate(programs: VmmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch, "usable")
    with pytest.raises(Unsupported, match="does not emulate"):
        choice.choose(programs.model_copy(update={"driver": "firecracker", "accelerator": "tcg"}))


@pytest.mark.parametrize(("kind", "fits"), [("pvm", True), ("usable", False), ("absent", False)])
def test_pvm_is_taken_where_it_is_asked_for_and_is_in_the_identity(
    programs: VmmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: KvmKind, fits: bool
) -> None:
    on_host(monkeypatch, kind)
    config = programs.model_copy(update={"driver": "firecracker", "virtualization": "pvm"})
    if not fits:
        with pytest.raises(HostNotReady, match="no /dev/kvm of that kind"):
            choice.choose(config)
        return
    installed = choice.ensure_vmm(tmp_path, config, False, lambda *_: None)
    assert choice.driver_for(installed, config).identity("k", "i").accelerator == "pvm"
