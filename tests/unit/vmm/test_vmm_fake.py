"""The fake driver keeps the contract that the real one keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentenv.core.model import Machine
from agentenv.network.layout import GUEST_MAC, TAP
from agentenv.testing.contracts import VmContract, VmRig
from agentenv.testing.fake_blocks import FakeDevices
from agentenv.testing.fake_vmm import FakeProcesses, FakeVmm
from agentenv.vmm.driver import Vm, VmSpec


class _Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes = FakeProcesses()
        self._devices = self._processes.devices = FakeDevices(folder / "stacks", self._processes.find)
        self._vmm = FakeVmm(self._processes)
        self._state = folder / "vm.state"
        self._state.write_text(json.dumps({"device": "state"}))
        self._specs: dict[int, VmSpec] = {}

    async def restore(self) -> Vm:
        return await self._restore(self._state)

    async def restore_damaged(self) -> Vm:
        return await self._restore(self.folder / "nothing")

    async def _restore(self, state: Path) -> Vm:
        number = len(self._specs)
        for name in ("memory", "disk"):
            self._devices.open(f"{name}-{number}", (), None, 4096, "page")
        memory, disk = (self._devices.mount / f"{name}-{number}" for name in ("memory", "disk"))
        spec = VmSpec(f"vm-{number}", self.folder / f"vm-{number}", Machine(1, 16, 64), memory, disk, f"ns-{number}", TAP, GUEST_MAC)
        vm = await self._vmm.restore(spec, state)
        self._specs[vm.process.pid] = spec
        return vm

    async def adopt(self, vm: Vm) -> Vm:
        return await FakeVmm(self._processes).adopt(self._specs[vm.process.pid], vm.process)

    def is_alive(self, vm: Vm) -> bool:
        return self._processes.find(vm.process.pid) is not None


class TestFakeVmm(VmContract):
    @pytest.fixture
    def vm_rig(self, tmp_path: Path) -> VmRig:
        return _Rig(tmp_path)
