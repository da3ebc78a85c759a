"""What every block server and every VMM driver must do, as suites that the fake and the real one both run.

A suite is a class of checks; a test module subclasses it and provides the fixture `rig`:

    class TestMine(BlocksContract):
        @pytest.fixture
        async def rig(self) -> AsyncIterator[BlocksRig]: ...

A rig makes the thing under test and says how to look into it. Blocks are 4 KiB, values one byte.
"""

# ruff: noqa: D102 - the names of the checks say what they check

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest

from agentenv.block.client import BlockClient, Stack, Upper
from agentenv.core.errors import AgentEnvError, Conflict, InvalidInput, NotFound
from agentenv.testing.fake_blocks import FakeBlocks, FakeDevices
from agentenv.vmm.driver import Vm

_BLOCK_BYTES = 4096
_SIZE_BYTES = 64 * _BLOCK_BYTES
_DEADLINE_S = 30.0


class BlocksRig(Protocol):
    """A block server with a folder for layers."""

    folder: Path

    @property
    def client(self) -> BlockClient:
        """A client of it."""
        ...

    def write(self, path: Path, block: int, value: int) -> None:
        """Write a block of the device at `path`, as a guest does. OSError when it takes no writes."""
        ...

    def read(self, path: Path, block: int) -> int:
        """The value of a block; 0 when it was never written."""
        ...

    def in_use(self, path: Path) -> AbstractContextManager[object]:
        """Have the device open for the length of the body."""
        ...


class DeviceFiles:
    """The rig of a real block server: devices are files."""

    def __init__(self, client: BlockClient, folder: Path) -> None:
        self.client, self.folder = client, folder

    def write(self, path: Path, block: int, value: int) -> None:
        """Through the file, to the server."""
        with self.in_use(path) as fd:
            os.pwrite(fd, bytes([value]) * _BLOCK_BYTES, block * _BLOCK_BYTES)

    def read(self, path: Path, block: int) -> int:
        """All bytes of a block must be equal."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, _BLOCK_BYTES, block * _BLOCK_BYTES)
        finally:
            os.close(fd)
        assert data == data[:1] * _BLOCK_BYTES, f"block {block} of {path} is torn"
        return data[0]

    @contextlib.contextmanager
    def in_use(self, path: Path) -> Iterator[int]:
        """A descriptor of the device."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            try:
                os.close(fd)
            except OSError as error:
                if error.errno != errno.ESTALE:  # the device was closed by force meanwhile
                    raise


class FakeDeviceFiles:
    """The rig of the fake one."""

    def __init__(self, devices: FakeDevices, folder: Path) -> None:
        self.devices, self.folder = devices, folder
        self._client = FakeBlocks(devices)

    @property
    def client(self) -> BlockClient:
        """The fake client has the same methods."""
        return self._client  # type: ignore[return-value]

    def write(self, path: Path, block: int, value: int) -> None:
        """Into the upper."""
        self.devices.write(path, str(block), str(value))

    def read(self, path: Path, block: int) -> int:
        """From the topmost layer that has it."""
        return int(self.devices.read(path).get(str(block), "0"))

    @contextlib.contextmanager
    def in_use(self, path: Path) -> Iterator[None]:
        """One more handle."""
        self.devices.map(path, 1)
        try:
            yield
        finally:
            self.devices.map(path, -1)


def upper(rig: BlocksRig, name: str) -> Upper:
    """The files of a writable layer."""
    return Upper(rig.folder / f"{name}.lsmt", rig.folder / f"{name}.index")


async def open_fresh(rig: BlocksRig, stack_id: str, name: str, lowers: tuple[Path, ...] = ()) -> Stack:
    """A writable stack with a new upper."""
    return await rig.client.open(stack_id, lowers, upper(rig, name), None if lowers else _SIZE_BYTES, "direct")


class BlocksContract:
    """Checks of a block server."""

    async def test_a_repeated_open_is_the_same_and_another_one_is_refused(self, rig: BlocksRig) -> None:
        first = await open_fresh(rig, "a", "a0")
        assert await open_fresh(rig, "a", "a0") == first
        with pytest.raises(Conflict):
            await open_fresh(rig, "a", "a1")
        assert [stack.stack_id for stack in await rig.client.stacks()] == ["a"]
        assert (first.upper, first.lowers) == (upper(rig, "a0").data, ())

    async def test_what_is_written_is_read_and_lies_over_what_is_below(self, rig: BlocksRig) -> None:
        stack = await open_fresh(rig, "a", "a0")
        rig.write(stack.path, 1, 11)
        rig.write(stack.path, 2, 12)
        sealed = await rig.client.seal("a", upper(rig, "a1"))
        rig.write(stack.path, 2, 22)
        assert [rig.read(stack.path, block) for block in range(4)] == [0, 11, 22, 0]
        assert (sealed.lowers, sealed.upper) == ((upper(rig, "a0").data,), upper(rig, "a1").data)
        below = await rig.client.open("b", sealed.lowers, None, None, "page")
        assert [rig.read(below.path, block) for block in range(4)] == [0, 11, 12, 0]

    async def test_a_repeated_seal_seals_once(self, rig: BlocksRig) -> None:
        stack = await open_fresh(rig, "a", "a0")
        rig.write(stack.path, 1, 11)
        first = await rig.client.seal("a", upper(rig, "a1"))
        again = await rig.client.seal("a", upper(rig, "a1"))
        assert (again.lowers, again.upper) == (first.lowers, first.upper)

    async def test_two_stacks_over_one_layer_part(self, rig: BlocksRig) -> None:
        base = await open_fresh(rig, "base", "base0")
        rig.write(base.path, 1, 11)
        lowers = (await rig.client.seal("base", upper(rig, "base1"))).lowers
        left, right = await open_fresh(rig, "l", "l0", lowers), await open_fresh(rig, "r", "r0", lowers)
        rig.write(left.path, 1, 21)
        rig.write(right.path, 2, 32)
        assert [rig.read(left.path, block) for block in (1, 2)] == [21, 0]
        assert [rig.read(right.path, block) for block in (1, 2)] == [11, 32]

    async def test_a_closed_stack_keeps_its_writes_and_closing_twice_is_fine(self, rig: BlocksRig) -> None:
        stack = await open_fresh(rig, "a", "a0")
        rig.write(stack.path, 3, 33)
        for _ in range(2):
            await rig.client.close_stack("a")
        assert await rig.client.stacks() == []
        assert rig.read((await open_fresh(rig, "a", "a0")).path, 3) == 33

    async def test_a_stack_in_use_is_closed_by_force_only(self, rig: BlocksRig) -> None:
        stack = await open_fresh(rig, "a", "a0")
        with rig.in_use(stack.path):
            assert (await rig.client.stacks())[0].open_handles == 1
            with pytest.raises(Conflict):
                await rig.client.close_stack("a")
            await rig.client.close_stack("a", force=True)
        assert await rig.client.stacks() == []

    async def test_an_upper_has_one_stack(self, rig: BlocksRig) -> None:
        await open_fresh(rig, "a", "a0")
        with pytest.raises(Conflict):
            await open_fresh(rig, "b", "a0")
        assert [stack.stack_id for stack in await rig.client.stacks()] == ["a"]

    async def test_a_stack_without_upper_takes_no_writes(self, rig: BlocksRig) -> None:
        stack = await rig.client.open("zero", (), None, _SIZE_BYTES, "page")
        assert rig.read(stack.path, 0) == 0
        with pytest.raises(OSError, match="Read-only"):
            rig.write(stack.path, 0, 1)

    async def test_what_is_missing_is_refused(self, rig: BlocksRig) -> None:
        with pytest.raises(InvalidInput):
            await rig.client.open("a", (rig.folder / "nothing.lsmt",), None, None, "page")
        with pytest.raises(NotFound):
            await rig.client.seal("nothing", upper(rig, "x"))
        with pytest.raises(NotFound):
            await rig.client.flush("nothing")
        with pytest.raises(NotFound):
            await rig.client.capture(1, "nothing", rig.folder / "x.lsmt")
        assert not (rig.folder / "x.lsmt").exists()
        assert await rig.client.stacks() == []

    async def test_layers_are_flattened_into_one(self, rig: BlocksRig) -> None:
        stack = await open_fresh(rig, "a", "a0")
        for generation in range(3):
            rig.write(stack.path, 0, 10 + generation)
            rig.write(stack.path, generation + 1, 20 + generation)
            sealed = await rig.client.seal("a", upper(rig, f"a{generation + 1}"))
        assert await rig.client.commit(sealed.lowers, rig.folder / "flat.lsmt") > 0
        flat = await rig.client.open("flat", (rig.folder / "flat.lsmt",), None, None, "page")
        assert [rig.read(flat.path, block) for block in range(5)] == [12, 20, 21, 22, 0]

    async def test_layers_of_an_open_stack_are_replaced_by_one(self, rig: BlocksRig) -> None:
        stack = await open_fresh(rig, "a", "a0")
        for generation in range(4):
            rig.write(stack.path, generation, 10 + generation)
            sealed = await rig.client.seal("a", upper(rig, f"a{generation + 1}"))
        rig.write(stack.path, 1, 99)
        run, flat = sealed.lowers[1:3], rig.folder / "flat.lsmt"
        await rig.client.commit(run, flat)
        for _ in range(2):
            replaced = await rig.client.replace("a", run, flat)
            assert replaced.lowers == (sealed.lowers[0], flat, sealed.lowers[3])
        for path in run:
            path.unlink()
        assert [rig.read(stack.path, block) for block in range(5)] == [10, 99, 12, 13, 0]
        for wrong in ((), sealed.lowers[::-1], sealed.lowers[:2]):
            with pytest.raises(Conflict):
                await rig.client.replace("a", wrong, rig.folder / "a0.lsmt.other")
        with pytest.raises(NotFound):
            await rig.client.replace("nothing", run, flat)


class VmRig(Protocol):
    """A way to restore VMs of one snapshot."""

    folder: Path

    async def restore(self) -> Vm:
        """A new VM whose guest is on its way; the rig ends what a check leaves."""
        ...

    async def restore_damaged(self) -> Vm:
        """The same with a state file that is not there."""
        ...

    async def adopt(self, vm: Vm) -> Vm:
        """Take `vm` over, as a new server does."""
        ...

    def is_alive(self, vm: Vm) -> bool:
        """Whether its process exists."""
        ...


class VmContract:
    """Checks of a driver and its VMs."""

    async def test_a_vm_can_be_stopped_saved_and_run_again_and_again(self, vm_rig: VmRig) -> None:
        vm = await vm_rig.restore()
        for number in range(3):
            state = vm_rig.folder / f"state-{number}"
            await vm.pause()
            await vm.save_state(state)
            assert state.stat().st_size > 0
            await vm.resume()
            await vm.resume()  # harmless when it runs
        assert not await vm.stalled()
        assert vm_rig.is_alive(vm)

    async def test_a_kill_ends_it_is_seen_and_may_be_repeated(self, vm_rig: VmRig) -> None:
        vm = await vm_rig.restore()
        ended = asyncio.create_task(vm.ended())
        await asyncio.sleep(0)
        assert not ended.done()
        await vm.kill()
        assert not vm_rig.is_alive(vm)
        async with asyncio.timeout(_DEADLINE_S):
            assert await ended
            assert await vm.ended()
        await vm.kill()
        with pytest.raises(AgentEnvError):
            await vm.pause()
        with pytest.raises(AgentEnvError):
            await vm.save_state(vm_rig.folder / "state")

    async def test_a_vm_that_is_let_go_lives_and_can_be_taken_over(self, vm_rig: VmRig) -> None:
        former = await vm_rig.restore()
        await former.close()
        assert vm_rig.is_alive(former)
        vm = await vm_rig.adopt(former)
        assert vm.process == former.process
        await vm.pause()
        await vm.resume()
        await vm.kill()
        with pytest.raises(NotFound):
            await vm_rig.adopt(former)

    async def test_a_missing_state_starts_nothing(self, vm_rig: VmRig) -> None:
        with pytest.raises(NotFound):
            await vm_rig.restore_damaged()

    async def test_a_cancelled_wait_for_the_end_harms_nothing(self, vm_rig: VmRig) -> None:
        vm = await vm_rig.restore()
        waiting = asyncio.create_task(vm.ended())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert vm_rig.is_alive(vm)
        await vm.pause()
