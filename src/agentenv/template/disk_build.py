"""One disk of a build: from its base through steps in a VM, kept after each. It goes on from the last step whose disk is cached."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from agentenv.core.builds import BASE_STEP, CachedStep, base_key, step_key
from agentenv.core.model import Context, Machine
from agentenv.template import steps
from agentenv.template.build_work import BuildWork
from agentenv.template.workshop import Base, Bench

Perform = Callable[[Context, steps.StepTools], Awaitable[tuple[Context, bool]]]
"""Does a step: returns what commands after it start with, and whether it may have changed the disk."""


class DiskBuild:
    """The disk and the VM its steps run in. `prepare` first; `close` ends the VM, and the disk stays."""

    def __init__(self, work: BuildWork, base: Base, machine: Machine) -> None:
        self._work, self.base, self._machine = work, base, machine
        self._bench: Bench | None = None
        self._first = ""
        self.disk = CachedStep("", base.snapshot_id, base.context, 0)

    async def prepare(self) -> None:
        """The base as a disk alone. One that was captured with its memory has files that are not written out: it runs once more."""
        base, key = self.base, base_key(self.base.origin)
        self.disk = CachedStep(key, base.snapshot_id, base.context, 0)
        if self._work.tools.workshop.has_memory(base.snapshot_id):
            if found := await self._work.cached(key):
                self.disk = replace(found, context=base.context)
            else:
                await self._open(base.snapshot_id, base.machine, base.context, cold=False)
                self.disk = await self._keep(key, base.context)
                if self._machine != base.machine:
                    await self.close()
        if self._machine.disk_mb != base.machine.disk_mb:  # what is cached after this has another disk
            self.disk = replace(self.disk, key=self.key(["disk", self._machine.disk_mb]))
        self._first = self.disk.snapshot_id
        if base.preparation:
            await self._prepare_further(base)
            self._first = self.disk.snapshot_id

    async def _prepare_further(self, base: Base) -> None:
        """The base with what it asks for done to it; the caller's steps come after that."""
        key, context = self.disk.key, self.disk.context
        for step in base.preparation:
            key = step_key(key, step.content(), context, self._machine.vcpu_count, self._machine.memory_mb)
        if found := await self._work.cached(key):
            self.disk = found
            return
        for step in base.preparation:
            context, _ = await steps.perform(step, BASE_STEP, context, self._tools())
        self.disk = await self._keep(key, context)

    def key(self, content: list[object]) -> str:
        """The key of a next step that depends on that content."""
        return step_key(self.disk.key, content, self.disk.context, self._machine.vcpu_count, self._machine.memory_mb)

    async def reuse(self, key: str) -> bool:
        """Go on from the cached disk of that key, if there is one."""
        found = await self._work.cached(key)
        if found is None:
            return False
        await self.close()  # its disk is another one
        self.disk = found
        return True

    async def do(self, key: str, perform: Perform) -> None:
        """Do a step, and keep the disk after it under that key."""
        context, changes_disk = await perform(self.disk.context, self._tools())
        if changes_disk:
            self.disk = await self._keep(key, context)
        else:
            await self._work.tools.cache.add(key, self.disk.snapshot_id, context)
            self.disk = CachedStep(key, self.disk.snapshot_id, context, 0)

    async def open_afresh(self, clock_behind_ms: int = 0) -> Bench:
        """A VM that boots from the disk as it is, in place of the one there is."""
        await self.close()
        return await self._open(self.disk.snapshot_id, self._machine, self.disk.context, cold=True, clock_behind_ms=clock_behind_ms)

    async def close(self) -> None:
        """End the VM. Idempotent."""
        if self._bench is not None:
            bench, self._bench = self._bench, None
            await bench.close()

    async def bench(self) -> Bench:
        """The VM, with the disk as the last step has left it."""
        if self._bench is not None:
            return self._bench
        base, disk = self.base, self.disk
        is_as_captured = disk.snapshot_id == self._first and self._machine == base.machine
        if is_as_captured and not base.preparation and self._work.tools.workshop.has_memory(base.snapshot_id):
            return await self._open(base.snapshot_id, self._machine, disk.context, cold=False)
        return await self._open(disk.snapshot_id, self._machine, disk.context, cold=True)

    def _tools(self) -> steps.StepTools:
        return self._work.step_tools(self.bench, self._machine.disk_mb << 20)

    async def _open(self, snapshot_id: str, machine: Machine, context: Context, *, cold: bool, clock_behind_ms: int = 0) -> Bench:
        job, life_s = self._work.job, self._work.tools.deadline_s + 60  # it is ended with the build, long before
        title = f"build {job.build_id} of {job.name}"
        self._bench = await self._work.tools.workshop.open(
            title, snapshot_id, machine, context, cold=cold, life_s=life_s, clock_behind_ms=clock_behind_ms
        )
        return self._bench

    async def _keep(self, key: str, context: Context) -> CachedStep:
        assert self._bench is not None
        snapshot_id = await self._bench.keep()
        self._work.hold(snapshot_id)
        await self._work.tools.cache.add(key, snapshot_id, context)
        return CachedStep(key, snapshot_id, context, 0)
