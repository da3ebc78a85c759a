"""What all parts of one build share: its job and log, what it works with, the disks it holds, its time, and where a failure is."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.builds import BASE_STEP, BuildFailure, BuildJob, BuildPlan, CachedStep
from agentenv.core.clock import Clock
from agentenv.core.disk_size import with_disk
from agentenv.core.errors import AgentEnvError
from agentenv.core.model import Machine
from agentenv.template import steps
from agentenv.template.build_files import BuildFiles
from agentenv.template.build_log import BuildLog
from agentenv.template.fetching import Fetcher
from agentenv.template.run_caches import RunCaches
from agentenv.template.step_cache import StepCache
from agentenv.template.workshop import Base, BaseImages, Bench, Workshop


class BuildError(Exception):
    """A build has failed; `failure` says why and at which step."""

    def __init__(self, failure: BuildFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class BuildTools:
    """What every build of a node works with."""

    workshop: Workshop
    images: BaseImages
    cache: StepCache
    files: BuildFiles
    caches: RunCaches
    fetcher: Fetcher
    clock: Clock
    scratch: Path
    deadline_s: float
    ready_deadline_s: float


class BuildWork:
    """One build. Disks that a failure must not lose before the cache names them are held until `release`."""

    def __init__(self, job: BuildJob, plan: BuildPlan, tools: BuildTools, log: BuildLog) -> None:
        self.job, self.plan, self.tools, self.log = job, plan, tools, log
        self.where = BASE_STEP
        self._held = contextlib.ExitStack()
        self._ends_at_ms = tools.clock.monotonic_ms() + 1000 * tools.deadline_s

    def hold(self, snapshot_id: str) -> None:
        """Keep the sweep off a snapshot."""
        self._held.enter_context(self.tools.workshop.using(snapshot_id))

    def release(self) -> None:
        """Let go of all snapshots. Idempotent."""
        self._held.close()

    def machine(self, base: Base) -> Machine:
        """The base's, with the sizes that were asked for. InvalidInput when its disk is larger than that."""
        job, own = self.job, with_disk(base.machine, self.job.disk_mb, base.label)
        return Machine(job.vcpu_count or own.vcpu_count, job.memory_mb or own.memory_mb, own.disk_mb)

    async def cached(self, key: str) -> CachedStep | None:
        """The disk that an earlier build has left under that key, held from here on."""
        found = self.tools.cache.find(key)
        if found is not None:
            self.hold(found.snapshot_id)
            await self.tools.cache.used(found)
        return found

    def step_tools(self, bench: Callable[[], Awaitable[Bench]], content_max_bytes: int = 0) -> steps.StepTools:
        """For the steps that run in the VM that `bench` gives."""
        return steps.StepTools(bench, self.tools.files, self.log, self.tools.scratch, content_max_bytes, self.left_s)

    def left_s(self) -> float:
        """What is left of the build's time, one second at least."""
        return max(1.0, (self._ends_at_ms - self.tools.clock.monotonic_ms()) / 1000)

    @contextlib.contextmanager
    def failing_at(self, where: str, told: Callable[[str], str] = str) -> Iterator[None]:
        """Errors of ours end the build there, in the words that `told` makes of theirs."""
        self.where = where
        try:
            yield
        except AgentEnvError as error:
            raise BuildError(BuildFailure(told(steps.told(error)), where)) from error
