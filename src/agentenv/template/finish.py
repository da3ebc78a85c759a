"""The end of a build: the finished disk boots afresh, its program is started and awaited, and memory and disk are captured."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from agentenv.core.builds import FINAL_STEP
from agentenv.core.errors import DeadlineExceeded
from agentenv.core.model import Build, Context, Machine, Service
from agentenv.guest.commands import Command, CommandRefused, Ended
from agentenv.template import steps
from agentenv.template.build_work import BuildWork
from agentenv.template.disk_build import DiskBuild
from agentenv.template.login_path import keep_path
from agentenv.template.workshop import CLOCK_BEHIND_MS, SETTLE

READY_INTERVAL_MS = 2_000  # contract section 2.7
READY_BY_DEFAULT_MS = 20_000  # how long a program without a ready command is given
_HELPER_DEADLINE_S = 60.0

#: Before the capture: what every first command needs is in the page cache.
_SETTLE = f"/bin/bash -l -c 'ls / ; env' ; {SETTLE}"


class Finish:
    """Ends one build on the disk that its steps have made."""

    def __init__(self, work: BuildWork, disk: DiskBuild) -> None:
        self._work, self._disk, self._tools, self._log = work, disk, work.tools, work.log

    async def run(self, machine: Machine, service: Service | None, ready_command: str, labels: dict[str, str]) -> Build:
        """The captured machine, its snapshot held by the build. `ready_command` is for a build without a service."""
        context = self._disk.disk.context
        self._log.add("boot the finished disk", FINAL_STEP)
        bench = await self._disk.open_afresh(CLOCK_BEHIND_MS)
        await keep_path(bench, context)
        if service is not None:
            await self._run_service(service, FINAL_STEP)
        elif ready_command:
            await self._wait_ready(context, ready_command, None)
        with contextlib.suppress(CommandRefused):  # an image without a shell has nothing to warm
            await bench.run(Command(("/bin/sh", "-c", _SETTLE), workdir="/"), lambda *_: None, _HELPER_DEADLINE_S)
        self._log.add("capture the template", FINAL_STEP)
        snapshot = await bench.capture()
        self._work.hold(snapshot.snapshot_id)
        return Build(
            build_id=self._work.job.build_id,
            snapshot_id=snapshot.snapshot_id,
            machine=machine,
            envd_version=bench.envd_version,
            created_at_ms=self._tools.clock.now_ms(),
            env_vars=dict(context.env_vars),
            user=context.user,
            workdir=context.workdir,
            service=service,
            labels=labels,
        )

    async def _run_service(self, service: Service, number: str) -> None:
        """Start the service, which goes on when its connection is closed, and wait until it is ready. StepFailed."""
        context = Context(service.user, service.workdir, service.env_vars)
        self._log.add(f"start: {service.start}", number)
        started = asyncio.Event()
        program = asyncio.ensure_future(
            steps.shell(service.start, context, number, self._work.step_tools(self._disk.bench), on_start=started.set)
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
                    command, context, FINAL_STEP, self._work.step_tools(self._disk.bench), deadline_s=max(left_s, 1.0)
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


def _refuse_failed(program: asyncio.Future[tuple[Ended, str]] | None) -> None:
    """StepFailed when the started program has ended otherwise than well."""
    if program is None or not program.done() or program.cancelled():
        return
    if isinstance(error := program.exception(), CommandRefused):
        raise steps.StepFailed(f"failed to run the start command: command failed: {error.message}") from error
    ended, output = program.result()
    if ended.exit_code != 0:
        raise steps.StepFailed(f"the start command failed: {ended.status}\n{output}".rstrip())
