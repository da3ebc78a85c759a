"""One build from its base to the captured machine: steps in a VM, the disk kept after each, a fresh boot, the program started.

A rebuild goes on from the last step whose disk is cached. Steps run on the machine the template will have; what is captured
in the end is a machine that booted from the disk alone, so nothing that a step left running is in a template.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentenv.core.builds import BASE_STEP, FINAL_STEP, BuildFailure, BuildJob, BuildPlan, CachedStep, base_key, step_key
from agentenv.core.clock import Clock
from agentenv.core.errors import AgentEnvError, DeadlineExceeded
from agentenv.core.model import Build, Context, Machine, Service
from agentenv.guest.commands import Command, CommandRefused, Ended
from agentenv.template import steps
from agentenv.template.build_files import BuildFiles
from agentenv.template.build_log import BuildLog
from agentenv.template.login_path import keep_path
from agentenv.template.step_cache import StepCache
from agentenv.template.workshop import CLOCK_BEHIND_MS, SETTLE, Base, BaseImages, Bench, Workshop

READY_INTERVAL_MS = 2_000  # contract section 2.7
READY_BY_DEFAULT_MS = 20_000  # how long a program without a ready command is given
_HELPER_DEADLINE_S = 60.0

#: Before the capture: what every first command needs is in the page cache.
_SETTLE = f"/bin/bash -l -c 'ls / ; env' ; {SETTLE}"


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
    clock: Clock
    scratch: Path
    deadline_s: float
    ready_deadline_s: float


class Builder:
    """Carries out one build. `run` it once."""

    def __init__(self, job: BuildJob, plan: BuildPlan, tools: BuildTools, log: BuildLog) -> None:
        self._job, self._plan, self._tools, self._log = job, plan, tools, log
        self._bench: Bench | None = None
        self._held = contextlib.ExitStack()  # disks that a failure must not lose before the cache names them
        self._where = BASE_STEP
        self._ends_at_ms = tools.clock.monotonic_ms() + 1000 * tools.deadline_s

    async def run(self) -> Build:
        """The finished build, its snapshot held until `close`. BuildError."""
        try:
            async with asyncio.timeout(self._tools.deadline_s):
                with self._failing_at(BASE_STEP):
                    base = await self._base()
                machine = self._machine(base)
                disk = await self._prepared(base, machine, await self._disk_of(base, machine))
                disk = await self._steps(base, machine, disk)
                with self._failing_at(FINAL_STEP):
                    return await self._finish(machine, disk)
        except TimeoutError as error:
            message = f"the build did not end within {self._tools.deadline_s / 60:g} minutes, the node's limit (limits.build_minutes)"
            raise BuildError(BuildFailure(message, self._where)) from error

    async def close(self) -> None:
        """End the VM and let go of all disks. Idempotent."""
        try:
            await self._close_bench()
        finally:
            self._held.close()

    # --- where it starts

    async def _base(self) -> Base:
        plan = self._plan
        if plan.from_template:
            base = self._tools.workshop.base(plan.from_template)
        else:
            base = await self._tools.images.base(plan.from_image, plan.registry, lambda text: self._log.add(text, BASE_STEP))
        self._held.enter_context(self._tools.workshop.using(base.snapshot_id))
        self._log.add(f"FROM {base.label}", BASE_STEP)
        return base

    def _machine(self, base: Base) -> Machine:
        job = self._job
        return replace(
            base.machine,
            vcpu_count=job.vcpu_count or base.machine.vcpu_count,
            memory_mb=job.memory_mb or base.machine.memory_mb,
        )

    async def _disk_of(self, base: Base, machine: Machine) -> CachedStep:
        """The base as a disk alone. One that was captured with its memory has files that are not written out: it runs once more."""
        key = base_key(base.origin)
        with self._failing_at(BASE_STEP):
            if not self._tools.workshop.has_memory(base.snapshot_id):
                return CachedStep(key, base.snapshot_id, base.context, 0)
            if found := await self._cached(key):
                return replace(found, context=base.context)
            await self._open(base.snapshot_id, base.machine, base.context, cold=False)
            disk = await self._keep(key, base.context)
            if machine != base.machine:
                await self._close_bench()
            return disk

    async def _prepared(self, base: Base, machine: Machine, disk: CachedStep) -> CachedStep:
        """The base with what it asks for done to it; the caller's steps come after that."""
        if not base.preparation:
            return disk
        key, context = disk.key, disk.context
        for step in base.preparation:
            key = step_key(key, step, context, machine.vcpu_count, machine.memory_mb)
        with self._failing_at(BASE_STEP):
            if found := await self._cached(key):
                return found

            async def bench() -> Bench:
                return self._bench or await self._open(disk.snapshot_id, machine, context, cold=True)

            for step in base.preparation:
                context, _ = await steps.perform(step, BASE_STEP, context, self._step_tools(bench))
            return await self._keep(key, context)

    async def _cached(self, key: str) -> CachedStep | None:
        found = self._tools.cache.find(key)
        if found is not None:
            self._held.enter_context(self._tools.workshop.using(found.snapshot_id))
            await self._tools.cache.used(found)
        return found

    # --- its steps

    async def _steps(self, base: Base, machine: Machine, disk: CachedStep) -> CachedStep:
        count, is_forced, first = len(self._plan.steps), self._plan.force, disk.snapshot_id
        for at, step in enumerate(self._plan.steps, start=1):
            is_forced = is_forced or step.force
            key = step_key(disk.key, step, disk.context, machine.vcpu_count, machine.memory_mb)
            with self._failing_at(str(at)):
                if not is_forced and (found := await self._cached(key)):
                    await self._close_bench()  # its disk is another one
                    self._log.add(f"[{at}/{count}] CACHED {step}", str(at))
                    disk = found
                    continue
                self._log.add(f"[{at}/{count}] {step}", str(at))

                async def bench(now: CachedStep = disk) -> Bench:
                    if self._bench is not None:
                        return self._bench
                    if now.snapshot_id == first and machine == base.machine and self._tools.workshop.has_memory(base.snapshot_id):
                        return await self._open(base.snapshot_id, machine, now.context, cold=False)
                    return await self._open(now.snapshot_id, machine, now.context, cold=True)

                tools = self._step_tools(bench, machine.disk_mb << 20)
                context, changes_disk = await steps.perform(step, str(at), disk.context, tools)
                if changes_disk:
                    disk = await self._keep(key, context)
                else:
                    await self._tools.cache.add(key, disk.snapshot_id, context)
                    disk = CachedStep(key, disk.snapshot_id, context, 0)
        return disk

    async def _open(self, snapshot_id: str, machine: Machine, context: Context, *, cold: bool, clock_behind_ms: int = 0) -> Bench:
        title = f"build {self._job.build_id} of {self._job.name}"
        life_s = self._tools.deadline_s + 60  # it is ended with the build, long before
        self._bench = await self._tools.workshop.open(
            title, snapshot_id, machine, context, cold=cold, life_s=life_s, clock_behind_ms=clock_behind_ms
        )
        return self._bench

    async def _keep(self, key: str, context: Context) -> CachedStep:
        assert self._bench is not None
        snapshot_id = await self._bench.keep()
        self._held.enter_context(self._tools.workshop.using(snapshot_id))
        await self._tools.cache.add(key, snapshot_id, context)
        return CachedStep(key, snapshot_id, context, 0)

    async def _close_bench(self) -> None:
        if self._bench is not None:
            bench, self._bench = self._bench, None
            await bench.close()

    # --- its end

    async def _finish(self, machine: Machine, disk: CachedStep) -> Build:
        await self._close_bench()
        context = disk.context
        service = self._service(context)
        self._log.add("boot the finished disk", FINAL_STEP)
        bench = await self._open(disk.snapshot_id, machine, context, cold=True, clock_behind_ms=CLOCK_BEHIND_MS)
        await keep_path(bench, context)
        if service is not None:
            await self._run_service(service, FINAL_STEP)
        elif self._plan.ready_command:
            await self._wait_ready(context, self._plan.ready_command, None)
        with contextlib.suppress(CommandRefused):  # an image without a shell has nothing to warm
            await bench.run(Command(("/bin/sh", "-c", _SETTLE), workdir="/"), lambda *_: None, _HELPER_DEADLINE_S)
        self._log.add("capture the template", FINAL_STEP)
        snapshot = await bench.capture()
        self._held.enter_context(self._tools.workshop.using(snapshot.snapshot_id))
        return Build(
            build_id=self._job.build_id,
            snapshot_id=snapshot.snapshot_id,
            machine=machine,
            envd_version=bench.envd_version,
            created_at_ms=self._tools.clock.now_ms(),
            env_vars=dict(context.env_vars),
            user=context.user,
            workdir=context.workdir,
            service=service,
        )

    def _service(self, context: Context) -> Service | None:
        """What is to run: what the plan says, else what it is made from has."""
        plan = self._plan
        if plan.start_command:
            return Service(plan.start_command, plan.ready_command, context.user, context.workdir, dict(context.env_vars), stays=True)
        if context.service is not None and plan.ready_command:
            return replace(context.service, ready=plan.ready_command)
        return context.service

    async def _run_service(self, service: Service, number: str) -> None:
        """Start the service, which goes on when its connection is closed, and wait until it is ready. StepFailed."""
        context = Context(service.user, service.workdir, service.env_vars)
        self._log.add(f"start: {service.start}", number)
        started = asyncio.Event()
        program = asyncio.ensure_future(
            steps.shell(service.start, context, number, self._step_tools(self._open_bench), on_start=started.set)
        )
        program.add_done_callback(lambda _: started.set())
        try:
            await started.wait()
            await self._wait_ready(context, service.ready, program)
        finally:
            program.cancel()
            await asyncio.wait({program})

    async def _wait_ready(self, context: Context, command: str, program: asyncio.Future[tuple[Ended, str]] | None) -> None:
        clock = self._tools.clock
        if not command:
            await self._sleep_or_end(READY_BY_DEFAULT_MS, program)
            _refuse_failed(program)
            return
        self._log.add(f"ready: {command}", FINAL_STEP)
        ends_at_ms = clock.monotonic_ms() + 1000 * self._tools.ready_deadline_s
        while True:
            left_s = (ends_at_ms - clock.monotonic_ms()) / 1000
            try:
                ended, output = await steps.shell(
                    command, context, FINAL_STEP, self._step_tools(self._open_bench), deadline_s=max(left_s, 1.0)
                )
            except DeadlineExceeded:
                ended, output = Ended(-1, "it did not end"), ""
            except CommandRefused as error:
                raise steps.StepFailed(f"failed to run ready command '{command}': command failed: {error.message}") from error
            _refuse_failed(program)
            if ended.exit_code == 0:
                return
            if clock.monotonic_ms() + READY_INTERVAL_MS >= ends_at_ms:
                late = f"the template was not ready within {self._tools.ready_deadline_s:g} s"
                raise steps.StepFailed(f"{late}: ready command '{command}': {ended.status}\n{output}".rstrip())
            await self._sleep_or_end(READY_INTERVAL_MS, program)

    async def _sleep_or_end(self, duration_ms: int, program: asyncio.Future[tuple[Ended, str]] | None) -> None:
        """Sleep; a program that fails meanwhile ends it."""
        sleep = asyncio.ensure_future(self._tools.clock.sleep_ms(duration_ms))
        try:
            if program is None or program.done():
                await sleep
                return
            waiting: set[asyncio.Future[Any]] = {sleep, program}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            _refuse_failed(program)
            await sleep
        finally:
            sleep.cancel()

    # --- common

    def _step_tools(self, bench: Callable[[], Awaitable[Bench]], content_max_bytes: int = 0) -> steps.StepTools:
        return steps.StepTools(bench, self._tools.files, self._log, self._tools.scratch, content_max_bytes, self._left_s)

    async def _open_bench(self) -> Bench:
        assert self._bench is not None
        return self._bench

    def _left_s(self) -> float:
        return max(1.0, (self._ends_at_ms - self._tools.clock.monotonic_ms()) / 1000)

    @contextlib.contextmanager
    def _failing_at(self, where: str) -> Iterator[None]:
        self._where = where
        try:
            yield
        except AgentEnvError as error:
            raise BuildError(BuildFailure(steps.told(error), where)) from error


def _refuse_failed(program: asyncio.Future[tuple[Ended, str]] | None) -> None:
    """StepFailed when the started program has ended otherwise than well."""
    if program is None or not program.done() or program.cancelled():
        return
    if isinstance(error := program.exception(), CommandRefused):
        raise steps.StepFailed(f"failed to run the start command: command failed: {error.message}") from error
    ended, output = program.result()
    if ended.exit_code != 0:
        raise steps.StepFailed(f"the start command failed: {ended.status}\n{output}".rstrip())
