"""Which VMM a node runs on, and its driver: the only place that knows them all.

`auto` is Firecracker where it can run (KVM that runs ordinary guests, its two programs), else QEMU.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentenv.config.schema import VmmConfig
from agentenv.core.errors import HostNotReady, Unsupported
from agentenv.host.command import Progress
from agentenv.host.doctor import kvm_kind
from agentenv.host.requirements import find_program
from agentenv.host.tsc import tsc_khz
from agentenv.vmm.driver import Vmm
from agentenv.vmm.firecracker import FirecrackerDriver, FirecrackerSettings, installed_version
from agentenv.vmm.firecracker_requests import cpu_template
from agentenv.vmm.qemu import QemuDriver, QemuSettings, cpu_name
from agentenv.vmm.qemu_install import QemuInstallation, ensure_qemu

Accelerator = Literal["kvm", "pvm", "tcg"]
_NO_KVM = {
    "absent": "there is no /dev/kvm",
    "pvm": "/dev/kvm is of the PVM kind, on which ordinary guests do not run",
    "forbidden": "/dev/kvm cannot be opened",
}


@dataclass(frozen=True, slots=True)
class FirecrackerInstallation:
    """The programs of one release."""

    firecracker: Path
    jailer: Path
    version: str


@dataclass(frozen=True, slots=True)
class VmmInstallation:
    """What this node's VMs run on; exactly one of the two programs is there."""

    accelerator: Accelerator
    qemu: QemuInstallation | None = None
    firecracker: FirecrackerInstallation | None = None

    @property
    def name(self) -> str:
        """Of the driver, as in the settings."""
        return "qemu" if self.firecracker is None else "firecracker"


def find_firecracker(config: VmmConfig) -> FirecrackerInstallation:
    """The programs if VMs can run on them here. HostNotReady, naming all that is missing."""
    lacks, steps = [], []
    kind = kvm_kind()
    if config.virtualization == "pvm" and kind != "pvm":
        lacks.append("vmm.virtualization is pvm, but there is no /dev/kvm of that kind")
        steps.append("load the module kvm-pvm, or set vmm.virtualization to kvm")
    elif config.virtualization == "kvm" and kind != "usable":
        lacks.append(_NO_KVM[kind])
        steps.append("use a machine (or an instance type) with KVM")
    found = {name: shutil.which(setting) if setting else find_program(name) for name, setting in _programs(config).items()}
    for name, setting in _programs(config).items():
        if found[name] is None:
            lacks.append(f"vmm.{name} names {setting}, which cannot be run" if setting else f"there is no program {name}")
            steps.append(f"install {name} 1.12 or newer, or set vmm.{name} to where it is")
    if lacks:
        raise HostNotReady(f"Firecracker cannot run here: {'; '.join(lacks)}", "; ".join((*steps, "or set vmm.driver to auto or qemu")))
    firecracker, jailer = (Path(str(found[name])).absolute() for name in ("firecracker", "jailer"))
    return FirecrackerInstallation(firecracker, jailer, installed_version(firecracker, jailer))


def _programs(config: VmmConfig) -> dict[str, str]:
    return {"firecracker": config.firecracker, "jailer": config.jailer}


def choose(config: VmmConfig) -> FirecrackerInstallation | None:
    """Firecracker, or None for QEMU. HostNotReady or Unsupported when Firecracker is asked for and cannot be had."""
    if config.driver == "qemu" or (config.driver == "auto" and config.accelerator == "tcg"):
        return None
    if config.accelerator == "tcg":
        raise Unsupported("Firecracker does not emulate, but vmm.accelerator is tcg", "set vmm.accelerator to auto, or vmm.driver to qemu")
    try:
        return find_firecracker(config)
    except HostNotReady:
        if config.driver == "firecracker":
            raise
        return None


def accelerator_of(config: VmmConfig) -> Literal["kvm", "tcg"]:
    """What QEMU runs on. Unsupported when KVM is demanded where ordinary guests do not run on it."""
    kind = kvm_kind()
    if config.accelerator == "kvm" and kind != "usable":
        raise Unsupported(f"vmm.accelerator is kvm, but KVM here is {kind}", "set vmm.accelerator to auto or tcg")
    return "kvm" if kind == "usable" and config.accelerator != "tcg" else "tcg"


def ensure_vmm(cache: Path, config: VmmConfig, verify: bool, progress: Progress) -> VmmInstallation:
    """What VMs run on; a QEMU is fetched if the host has none that is fit. Blocks."""
    if (firecracker := choose(config)) is not None:
        return VmmInstallation(config.virtualization, firecracker=firecracker)
    accelerator = accelerator_of(config)
    return VmmInstallation(accelerator, ensure_qemu(cache, program=config.qemu, verify=verify, progress=progress))


def driver_for(installed: VmmInstallation, config: VmmConfig) -> Vmm:
    """The driver."""
    found = installed.firecracker
    if found is not None:
        cpu, template = f"host {cpu_name(Path('/proc/cpuinfo').read_text())}", cpu_template(config.cpu_template)
        settings = FirecrackerSettings(
            found.firecracker, found.jailer, found.version, cpu, cpu_template=template, virtualization=config.virtualization
        )
        return FirecrackerDriver(settings)
    return QemuDriver(qemu_settings(installed, config))


def qemu_settings(installed: VmmInstallation, config: VmmConfig) -> QemuSettings:
    """How QEMU is run. Unsupported on a node that runs on something else."""
    if installed.qemu is None:
        raise Unsupported(f"this node runs on {installed.name}", "set vmm.driver to qemu")
    return QemuSettings(installed.qemu.argv, installed.qemu.version, installed.accelerator, tsc_khz(), config.code_cache_mb)
