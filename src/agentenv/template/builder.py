"""One build from its base to the captured machine: steps in a VM, the disk kept after each, a fresh boot, the program started.

A rebuild goes on from the last step whose disk is cached. Steps run on the machine the template will have; what is captured
in the end is a machine that booted from the disk alone, so nothing that a step left running is in a template.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial

from agentenv.core.builds import BASE_STEP, FINAL_STEP, BuildFailure, BuildJob, BuildPlan
from agentenv.core.model import Build, Context, Machine, Service
from agentenv.template import steps
from agentenv.template.build_log import BuildLog
from agentenv.template.build_work import BuildError, BuildTools, BuildWork
from agentenv.template.disk_build import DiskBuild
from agentenv.template.dockerfile_build import DockerfileBuild
from agentenv.template.finish import Finish
from agentenv.template.workshop import Base

__all__ = ["BuildError", "BuildTools", "Builder"]


@dataclass(frozen=True, slots=True)
class _Made:
    """A disk after all steps, and what belongs to a template beside it."""

    disk: DiskBuild
    machine: Machine
    start_command: str
    ready_command: str
    labels: dict[str, str] = field(default_factory=dict)


class Builder:
    """Carries out one build. `run` it once."""

    def __init__(self, job: BuildJob, plan: BuildPlan, tools: BuildTools, log: BuildLog) -> None:
        self._work = BuildWork(job, plan, tools, log)
        self._disk: DiskBuild | None = None
        self._dockerfile = DockerfileBuild(self._work)

    async def run(self) -> Build:
        """The finished build, its snapshot held until `close`. BuildError."""
        work, deadline_s = self._work, self._work.tools.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                made = await (self._from_dockerfile() if work.plan.dockerfile is not None else self._from_steps())
                with work.failing_at(FINAL_STEP):
                    service = self._service(made)
                    ready = made.ready_command if service is None else ""
                    return await Finish(work, made.disk).run(made.machine, service, ready, made.labels)
        except TimeoutError as error:
            message = f"the build did not end within {deadline_s / 60:g} minutes, the node's limit (limits.build_minutes)"
            raise BuildError(BuildFailure(message, work.where)) from error

    async def close(self) -> None:
        """End all VMs and let go of all disks. Idempotent."""
        try:
            if self._disk is not None:
                await self._disk.close()
            await self._dockerfile.close()
        finally:
            self._work.release()

    async def _from_dockerfile(self) -> _Made:
        plan = self._work.plan
        disk, machine, state = await self._dockerfile.run()
        start = plan.start_command or (state.start() if plan.dockerfile is not None and plan.dockerfile.starts else "")
        return _Made(disk, machine, start, plan.ready_command or (state.ready if start else ""), dict(state.labels))

    async def _from_steps(self) -> _Made:
        work, plan = self._work, self._work.plan
        with work.failing_at(BASE_STEP):
            base = await self._base()
            machine = work.machine(base)
            self._disk = DiskBuild(work, base, machine)
            await self._disk.prepare()
        is_forced = plan.force
        for at, step in enumerate(plan.steps, start=1):
            is_forced = is_forced or step.force
            number, count = str(at), len(plan.steps)
            with work.failing_at(number):
                key = self._disk.key(step.content())
                if not is_forced and await self._disk.reuse(key):
                    work.log.add(f"[{at}/{count}] CACHED {step}", number)
                    continue
                work.log.add(f"[{at}/{count}] {step}", number)
                await self._disk.do(key, partial(steps.perform, step, number))
        return _Made(self._disk, machine, plan.start_command, plan.ready_command)

    async def _base(self) -> Base:
        work, plan = self._work, self._work.plan
        if plan.from_template:
            base = work.tools.workshop.base(plan.from_template)
        else:
            base = await work.tools.images.base(plan.from_image, plan.registry, lambda text: work.log.add(text, BASE_STEP))
        work.hold(base.snapshot_id)
        work.log.add(f"FROM {base.label}", BASE_STEP)
        return base

    def _service(self, made: _Made) -> Service | None:
        """What is to run: what the plan says, else what it is made from has."""
        context: Context = made.disk.disk.context
        if made.start_command:
            return Service(made.start_command, made.ready_command, context.user, context.workdir, dict(context.env_vars), stays=True)
        if context.service is not None and made.ready_command:
            return replace(context.service, ready=made.ready_command)
        return context.service
