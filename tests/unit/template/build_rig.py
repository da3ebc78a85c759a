"""A node's builds over a workshop without VMs, for the tests of builds."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

from agentenv.config.schema import LimitsConfig
from agentenv.core.builds import BuildPlan, MachineSize, Step
from agentenv.core.paths import NodePaths
from agentenv.template.builds import Builds
from agentenv.testing.fake_orchestrator import ManualClock, TemplateBook, make_template
from agentenv.testing.fake_workshop import FakeImages, FakeWorkshop

HASH = "f" * 64


class Rig:
    """A node's builds; `restart` is a new server over the same records."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.clock = ManualClock()
        self.book = TemplateBook([make_template("base")], {})
        self.workshop = FakeWorkshop(self.book.templates)
        self.images = FakeImages(self.workshop)
        self._paths = NodePaths(folder, folder / "run")
        self._limits = LimitsConfig(disk_reserve_mb=0, **limits)
        self.builds = self._make()

    def _make(self) -> Builds:
        return Builds(self.book, self.workshop, self._paths, self.clock, self._limits, self.images, 600)

    async def restart(self) -> None:
        self.builds = self._make()
        await self.builds.open()

    async def begin(self, *steps: Step, name: str = "mine", tags: tuple[str, ...] = (), **plan: object):
        sizes = {size: plan.pop(size, None) for size in ("vcpu_count", "memory_mb", "disk_mb")}
        job = await self.builds.request(name, tags, MachineSize(**sizes))
        if not {"from_image", "dockerfile"} & plan.keys():
            plan.setdefault("from_template", "base")
        return await self.builds.start(job.template_id, job.build_id, BuildPlan(steps=steps, **plan))

    async def build(self, *steps: Step, **plan: object):
        job = await self.begin(*steps, **plan)
        await self.finish()
        return self.builds.job(job.template_id, job.build_id)

    async def finish(self) -> None:
        """Until no build goes on; the clock moves as they wait for it."""
        settled = asyncio.ensure_future(self.builds.settle())
        while not settled.done():
            await asyncio.sleep(0.002)
            self.clock.advance_ms(1000)
        await settled

    async def said(self, job) -> list[str]:
        return [entry.message for entry in await self.builds.entries(job)]

    def disk(self, name: str = "mine") -> tuple[str, ...]:
        template = next(t for t in self.book.templates() if name in t.aliases)
        return self.workshop.disks[template.builds[0].snapshot_id].did

    def template(self, name: str = "mine"):
        return next((t for t in self.book.templates() if name in t.aliases), None)

    def assert_rests(self) -> None:
        assert (self.workshop.open_benches, self.workshop.held, self.builds._running, self.builds._logs) == ([], {}, {}, {})
        assert not list(self._paths.build_scratch.glob("*"))


def run(command: str, user: str | None = None, force: bool = False) -> Step:
    return Step("RUN", (command,) if user is None else (command, user), force=force)


async def upload(rig: Rig, *names: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))

    async def chunks() -> AsyncIterator[bytes]:
        yield buffer.getvalue()

    await rig.builds.files.receive(HASH, rig.builds.files.ticket(HASH), None, chunks())
