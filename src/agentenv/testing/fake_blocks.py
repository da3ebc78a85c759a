"""A block server in memory over small real files: the same answers as `block.client.BlockClient` without FUSE.

`FakeDevices` is the daemon and survives a killed server; `FakeBlocks` is one server's client of it. A layer is a JSON
object from block number to value, an upper likewise, so tests can see whose bytes a sandbox really has. What the real
daemon would let pass but must never happen is collected in `violations`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentenv.block.client import PROTOCOL, Capture, RemoteBlob, Stack, Upper, Written
from agentenv.core.errors import Conflict, InvalidInput, NotFound, Unavailable
from agentenv.host.process import ProcessId
from agentenv.testing.failpoints import Failpoints

_SIZE_BYTES = 1 << 20
Content = dict[str, str]


class MemoryOwner(Protocol):
    """A process whose private memory can be captured."""

    running: bool
    diverged: Content

    @property
    def memory_path(self) -> Path:
        """The memory file it maps privately."""
        ...


@dataclass
class _Open:
    stack_id: str
    lowers: tuple[Path, ...]
    upper: Upper | None
    virtual_size_bytes: int
    cache: str
    path: Path
    owner: tuple[int, int] | None = None
    open_handles: int = 0
    waits_for_room: bool = False


class FakeDevices:
    """The daemon: what is open, whoever asked for it. `find_process` knows the processes whose memory may be captured."""

    def __init__(self, mount: Path, find_process: Callable[[int], MemoryOwner | None] = lambda pid: None) -> None:
        self.mount = mount
        self.find_process = find_process
        self.violations: list[str] = []
        self.cached_bytes = 0  # blocks of remote layers
        self.has_ublk = False  # disks are devices
        self.daemon, self.gone = ProcessId(1, 0), asyncio.Event()
        self._open: dict[str, _Open] = {}
        self._sizes: dict[Path, int] = {}  # of disks, by their layers' files

    def lose(self) -> None:
        """The daemon went down with its machine."""
        self._open.clear()

    def kill(self) -> None:
        """The daemon is killed: files are lost, devices wait for the next one."""
        self._open = {name: stack for name, stack in self._open.items() if stack.path.parent != self.mount}
        self.gone.set()

    def start(self, daemon: ProcessId) -> None:
        """Another daemon, after the end of one."""
        self.daemon, self.gone = daemon, asyncio.Event()

    @property
    def opened(self) -> list[str]:
        """What is open, oldest first."""
        return list(self._open)

    @property
    def stack_ids(self) -> set[str]:
        """What is open."""
        return set(self._open)

    def at(self, path: Path) -> _Open:
        """The open stack that is exported at `path`. NotFound."""
        if path.name not in self._open or self._open[path.name].path != path:
            raise NotFound(f"{path} does not exist")
        return self._open[path.name]

    def map(self, path: Path, handles: int) -> None:
        """A VMM opens (or with -1 closes) the file at `path`."""
        if path.name in self._open:
            self._open[path.name].open_handles += handles

    def read(self, path: Path) -> Content:
        """What the device at `path` holds."""
        stack = self.at(path)
        merged: Content = {}
        for layer in self.files(stack):
            merged.update(read_layer(layer))
        return merged

    def write(self, path: Path, block: str, value: str) -> None:
        """A guest writes to its disk."""
        upper = self.at(path).upper
        if upper is None:
            raise OSError(30, "Read-only file system", str(path))
        if not upper.data.exists():
            self.violations.append(f"the file of a live upper was deleted: {upper.data.name}")
            return
        upper.data.write_text(json.dumps(read_layer(upper.data) | {block: value}))

    @staticmethod
    def files(stack: _Open) -> list[Path]:
        """The data files of a stack, bottom first."""
        return [*stack.lowers, *([stack.upper.data] if stack.upper else [])]

    def open(
        self,
        stack_id: str,
        lowers: tuple[Path, ...],
        upper: Upper | None,
        size_bytes: int | None,
        cache: str,
        export: str | None = None,
        owner: tuple[int, int] | None = None,
    ) -> _Open:
        """Open or confirm."""
        if stack_id in self._open:
            found = self._open[stack_id]
            if (found.lowers, found.upper, found.cache, found.owner) != (lowers, upper, cache, owner):
                raise Conflict(f"stack {stack_id} is open with other layers or settings")
            return found
        if not lowers and upper is None and size_bytes is None:
            raise InvalidInput("a stack without layers needs a size")
        for path in lowers:
            if not path.is_file():
                raise InvalidInput(f"layer {path} does not exist")
        if upper is not None:
            if any(upper == other.upper for other in self._open.values()):
                raise Conflict(f"{upper.data} is in use")
            for path in (upper.data, upper.index):
                if not path.exists():
                    path.write_text("{}")
        below_bytes = next((self._sizes[path] for path in reversed(lowers) if path in self._sizes), _SIZE_BYTES)
        if lowers and size_bytes is not None and size_bytes < below_bytes:
            raise InvalidInput(f"a stack of {size_bytes} bytes is smaller than its layers")
        size_bytes = size_bytes or below_bytes
        if upper is not None:
            self._sizes[upper.data] = size_bytes
        is_device = self.has_ublk and (export or ("auto" if cache == "direct" else "fuse")) != "fuse"
        folder = Path("/dev") if is_device else self.mount
        self._open[stack_id] = _Open(stack_id, lowers, upper, size_bytes, cache, folder / stack_id, owner)
        return self._open[stack_id]

    def seal(self, stack_id: str, fresh: Upper) -> _Open:
        """The upper becomes the top lower; idempotent by `fresh`."""
        stack = self.by_id(stack_id)
        if stack.upper is None:
            raise InvalidInput(f"stack {stack_id} has no upper")
        if stack.upper != fresh:
            old = stack.upper
            for path in (fresh.data, fresh.index):
                path.write_text("{}")
            stack.lowers, stack.upper = (*stack.lowers, old.data), fresh
            self._sizes[fresh.data] = stack.virtual_size_bytes
            old.index.unlink(missing_ok=True)
        return stack

    def replace(self, stack_id: str, lowers: tuple[Path, ...], replacement: Path) -> _Open:
        """Another layer in the place of some; idempotent by `replacement`."""
        stack = self.by_id(stack_id)
        if replacement in stack.lowers:
            return stack
        places = [at for at in range(len(stack.lowers)) if lowers and stack.lowers[at : at + len(lowers)] == lowers]
        if not places:
            raise Conflict(f"stack {stack_id} does not have these layers one after the other")
        before = self.read(stack.path)
        stack.lowers = (*stack.lowers[: places[0]], replacement, *stack.lowers[places[0] + len(lowers) :])
        if self.read(stack.path) != before:
            self.violations.append(f"stack {stack_id} reads otherwise since {replacement.name} took the place of others")
        return stack

    def close(self, stack_id: str, force: bool) -> None:
        """Forget a stack. Conflict while it is in use, unless forced."""
        if self.by_id(stack_id).open_handles > 0 and not force:
            raise Conflict(f"stack {stack_id} has open handles")
        del self._open[stack_id]

    def capture(self, pid: int, stack_id: str, output: Path) -> int:
        """Write what a process's memory has diverged by; returns how many blocks."""
        process = self._at_rest(pid, stack_id, "captured")
        output.write_text(json.dumps(process.diverged))
        return len(process.diverged)

    def fill(self, pid: int, stack_id: str, layers: Sequence[Path]) -> int:
        """Let a process's memory diverge by what layers hold; returns how many blocks."""
        process = self._at_rest(pid, stack_id, "filled")
        for layer in layers:
            process.diverged.update(read_layer(layer))
        return len(process.diverged)

    def _at_rest(self, pid: int, stack_id: str, what: str) -> MemoryOwner:
        stack, process = self.by_id(stack_id), self.find_process(pid)
        if process is None:
            raise NotFound(f"process {pid} has ended")
        if process.memory_path != stack.path:
            raise InvalidInput(f"process {pid} does not map stack {stack_id}")
        if process.running:
            self.violations.append(f"the memory of process {pid} was {what} while its guest ran")
        return process

    def by_id(self, stack_id: str) -> _Open:
        """NotFound when it is not open."""
        if stack_id not in self._open:
            raise NotFound(f"no stack named {stack_id} is open")
        return self._open[stack_id]

    def describe(self, stack: _Open) -> Stack:
        """What a caller is told."""
        return Stack(
            stack_id=stack.stack_id,
            path=stack.path,
            virtual_size_bytes=stack.virtual_size_bytes,
            open_handles=stack.open_handles,
            upper_data_bytes=stack.upper.data.stat().st_size if stack.upper and stack.upper.data.exists() else 0,
            lowers=stack.lowers,
            upper=stack.upper.data if stack.upper else None,
            waits_for_room=stack.waits_for_room,
        )


def read_layer(path: Path) -> Content:
    """The blocks of one layer file."""
    content: Content = json.loads(path.read_text())
    return content


class FakeBlocks:
    """One server's client. Points: `blocks.<call>` and, for calls with an effect, `blocks.<call>:done`."""

    fills_memory = True

    def __init__(self, devices: FakeDevices, points: Failpoints | None = None) -> None:
        self._devices = devices
        self._points = points or Failpoints()

    async def _hit(self, point: str) -> None:
        await self._points.hit(point)
        if self._devices.gone.is_set():
            raise Unavailable("blockd does not answer")

    async def info(self, deadline_s: float = 5.0) -> dict[str, Any]:
        """What the daemon says of itself."""
        await self._hit("blocks.info")
        return {"program": "blockd", "version": "0.0.0", "protocol": PROTOCOL, "pid": 0, "mount": str(self._devices.mount)}

    async def open(
        self,
        stack_id: str,
        lowers: Sequence[Path],
        upper: Upper | None,
        virtual_size_bytes: int | None,
        cache: str,
        export: str | None = None,
        owner: tuple[int, int] | None = None,
        records_zeros: bool = False,
    ) -> Stack:
        """Open layers as one device or file."""
        await self._hit("blocks.open")
        stack = self._devices.open(stack_id, tuple(lowers), upper, virtual_size_bytes, cache, export, owner)
        await self._hit("blocks.open:done")
        return self._devices.describe(stack)

    async def stacks(self) -> list[Stack]:
        """Every open stack."""
        await self._hit("blocks.stacks")
        return [self._devices.describe(self._devices.by_id(stack_id)) for stack_id in self._devices.opened]

    async def seal(self, stack_id: str, fresh: Upper, sync: bool = False) -> Stack:
        """Make the upper a layer and go on with a fresh one."""
        await self._hit("blocks.seal")
        stack = self._devices.seal(stack_id, fresh)
        await self._hit("blocks.seal:done")
        return self._devices.describe(stack)

    async def replace(self, stack_id: str, lowers: Sequence[Path], replacement: Path) -> Stack:
        """One layer for several."""
        await self._hit("blocks.replace")
        stack = self._devices.replace(stack_id, tuple(lowers), replacement)
        await self._hit("blocks.replace:done")
        return self._devices.describe(stack)

    async def flush(self, stack_id: str) -> None:
        """Nothing to do beyond knowing the stack."""
        await self._hit("blocks.flush")
        self._devices.by_id(stack_id)

    async def close_stack(self, stack_id: str, force: bool = False) -> None:
        """Close; no error when it is not open."""
        await self._hit("blocks.close")
        if stack_id in self._devices.stack_ids:
            self._devices.close(stack_id, force)
        await self._hit("blocks.close:done")

    async def capture(self, pid: int, stack_id: str, output: Path, sync: bool = False) -> Capture:
        """Write the diverged memory of a process."""
        await self._hit("blocks.capture")
        pages = self._devices.capture(pid, stack_id, output)
        await self._hit("blocks.capture:done")
        return Capture(output.stat().st_size, pages, 0, pages, 0, 0)

    async def fill(self, pid: int, stack_id: str, layers: Sequence[Path]) -> int:
        """Write layers into the memory of a process."""
        await self._hit("blocks.fill")
        blocks = self._devices.fill(pid, stack_id, layers)
        await self._hit("blocks.fill:done")
        return blocks

    async def import_raw(self, source: Path, output: Path) -> int:
        """A fake raw image is a layer already."""
        await self._hit("blocks.import")
        output.write_bytes(source.read_bytes())
        return output.stat().st_size

    async def commit(self, lowers: Sequence[Path], output: Path) -> int:
        """Flatten."""
        await self._hit("blocks.commit")
        merged: Content = {}
        for path in lowers:
            merged.update(read_layer(path))
        output.write_text(json.dumps(merged))
        return output.stat().st_size

    async def pack(self, layer: Path, output: Path) -> Written:
        """A fake layer is packed as it is."""
        await self._hit("blocks.pack")
        output.write_bytes(layer.read_bytes())
        return Written(output.stat().st_size, hashlib.sha256(output.read_bytes()).hexdigest())

    async def add_remote(self, output: Path, blob: RemoteBlob, login: tuple[str, str] | None = None) -> int:
        """An empty layer that remembers where it is from."""
        await self._hit("blocks.add_remote")
        output.write_text(json.dumps({"remote": f"{blob.blobs_url}/{blob.digest}"}))
        return _SIZE_BYTES

    async def shrink_cache(self, size_bytes: int, dry_run: bool = False) -> int:
        """Free what is cached, as far as it is wanted."""
        await self._hit("blocks.shrink_cache")
        freed = min(size_bytes, self._devices.cached_bytes)
        self._devices.cached_bytes -= 0 if dry_run else freed
        return freed

    async def shutdown(self, force: bool = False) -> None:
        """Close everything."""
        await self._hit("blocks.shutdown")
        for stack_id in self._devices.opened:
            self._devices.close(stack_id, force)

    async def close(self) -> None:
        """The client goes; the daemon stays."""
