"""A build from a Dockerfile: the stages that its target needs, one after the other, each a disk of its own.

Every action is a step with a cached disk. COPY from a stage starts a VM from that stage's disk and reads the files there, unless
the step is cached: it depends on all that the stage's disk depends on.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from agentenv.core.builds import BASE_STEP, DockerfileSource
from agentenv.core.errors import Unsupported
from agentenv.core.images import ImageConfig
from agentenv.core.model import Context, Machine
from agentenv.template.build_work import BuildWork
from agentenv.template.disk_build import DiskBuild
from agentenv.template.dockerfile.actions import Action, Copy
from agentenv.template.dockerfile.document import parse
from agentenv.template.dockerfile.evaluate import SHELL, Program, State, evaluate
from agentenv.template.dockerfile.needs import needs
from agentenv.template.dockerfile.perform import perform
from agentenv.template.dockerfile.stages import Dockerfile, Stage, read
from agentenv.template.workshop import Base


def checked(source: DockerfileSource) -> Dockerfile:
    """The stages to build, as far as can be said without what they start from. DockerfileError (also of files that are missing)."""
    dockerfile = read(parse(source.text, source.name), source.arguments, source.target)
    for need in needs(dockerfile):
        if not source.files.get(need.line):
            raise dockerfile.document.error(need.line, "`files` does not name an archive for this line", "upload one, and give its hash")
    return dockerfile


class DockerfileBuild:
    """The stages of one build. `run` it once; `close` ends its VMs."""

    def __init__(self, work: BuildWork) -> None:
        self._work = work
        self._disks: dict[int, DiskBuild] = {}
        self._states: dict[int, State] = {}
        self._steps = 0

    async def run(self) -> tuple[DiskBuild, Machine, State]:
        """The target's disk, and what its instructions leave. BuildError."""
        work, source = self._work, self._work.plan.dockerfile
        assert source is not None
        with work.failing_at(BASE_STEP):
            dockerfile = checked(source)
        for warning in dockerfile.warnings:
            work.log.add(warning, level="warn")
        for stage in dockerfile.stages:
            await self._stage(dockerfile, stage, source.files)
        target = dockerfile.target.index
        return self._disks[target], self._machine, self._states[target]

    async def close(self) -> None:
        """End all VMs. Idempotent."""
        for disk in self._disks.values():
            await disk.close()

    async def _stage(self, dockerfile: Dockerfile, stage: Stage, files: dict[int, str]) -> None:
        work = self._work
        with work.failing_at(BASE_STEP, partial(_with_line, dockerfile, stage.line)):
            base, state = await self._base(stage)
            work.hold(base.snapshot_id)
            work.log.add(f"[{stage}] FROM {base.label}", BASE_STEP)
            self._machine = work.machine(base)
            disk = self._disks[stage.index] = DiskBuild(work, base, self._machine)
            await disk.prepare()
        with work.failing_at(BASE_STEP):
            evaluated = evaluate(dockerfile, stage, state, files)
        self._states[stage.index] = evaluated.state
        for note in evaluated.notes:
            work.log.add(note, level="warn")
        is_forced = work.plan.force
        for at, action in enumerate(evaluated.actions, start=1):
            self._steps += 1
            number, title = str(self._steps), f"[{stage} {at}/{len(evaluated.actions)}]"
            with work.failing_at(number, partial(_with_line, dockerfile, action.origin.line)):
                await self._step(disk, action, number, title, is_forced)
        for other in self._disks.values():  # those that were read from, and this one unless the template is made of it
            if other is not disk or stage is not dockerfile.target:
                await other.close()

    async def _step(self, disk: DiskBuild, action: Action, number: str, title: str, is_forced: bool) -> None:
        content = action.content()
        if isinstance(action, Copy) and action.stage is not None:
            content.append(self._disks[action.stage].disk.key)
        key = disk.key(content)
        if not is_forced and await disk.reuse(key):
            self._work.log.add(f"{title} CACHED {action.origin}", number)
            return
        self._work.log.add(f"{title} {action.origin}", number)
        await disk.do(key, partial(perform, action, number, self._pack))

    async def _pack(self, stage: int, sources: tuple[str, ...], output: Path, most_bytes: int) -> None:
        bench = await self._disks[stage].bench()
        await bench.pack(sources, output, most_bytes, self._work.left_s())

    async def _base(self, stage: Stage) -> tuple[Base, State]:
        work, wanted = self._work, stage.base
        if wanted.kind == "stage":
            before, state = self._disks[wanted.stage], self._states[wanted.stage]
            base = replace(before.base, origin=f"stage {before.disk.key}", label=str(wanted.name), snapshot_id=before.disk.snapshot_id)
            return replace(base, context=state.context, preparation=()), state
        if wanted.kind == "template":
            base = work.tools.workshop.base(wanted.name)
            return base, State(base.context)
        if wanted.kind == "scratch":
            base = await work.tools.images.empty()
        else:
            base = await work.tools.images.base(wanted.name, None, lambda text: work.log.add(text, BASE_STEP))
            if stage.line and base.image is not None and base.image.on_build:
                held = "; ".join(base.image.on_build)[:300]
                raise Unsupported(
                    f"the image has ONBUILD instructions, which are not carried out: {held}", "write them into the Dockerfile"
                )
        state = _state_of(base.image or ImageConfig())
        return replace(base, context=state.context, preparation=()), state


def _state_of(image: ImageConfig) -> State:
    """What an image says about running it, as Docker takes it. Its own CMD alone starts nothing."""
    return State(
        Context(image.user or "root", image.working_dir or "/", image.env_vars),
        shell=image.shell or SHELL,
        command=None if image.cmd is None else Program(image.cmd),
        entrypoint=None if image.entrypoint is None else Program(image.entrypoint),
        labels=image.labels,
    )


def _with_line(dockerfile: Dockerfile, line: int, told: str) -> str:
    """An error with the line it is about, unless it names one already."""
    if not line or told.startswith(f"{dockerfile.document.name}:"):
        return told
    first, _, rest = told.partition("\n")
    name, _, shown = dockerfile.document.where(line).partition("\n")
    return "\n".join(filter(None, (f"{name}: {first}", shown, rest)))
