"""A build from a Dockerfile: the stages that its target needs, one after the other, each a disk of its own.

Every action is a step with a cached disk. COPY from a stage starts a VM from that stage's disk and reads the files there, unless
the step is cached: it depends on all that the stage's disk depends on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentenv.core.builds import BASE_STEP, BuildFailure, DockerfileSource
from agentenv.core.images import ImageConfig
from agentenv.core.model import Context, Machine
from agentenv.template.build_work import BuildError, BuildWork
from agentenv.template.disk_build import DiskBuild
from agentenv.template.dockerfile.actions import Action, Copy, Remote, stages_of
from agentenv.template.dockerfile.document import parse
from agentenv.template.dockerfile.evaluate import SHELL, Program, State, evaluate
from agentenv.template.dockerfile.needs import needs
from agentenv.template.dockerfile.perform import perform
from agentenv.template.dockerfile.stages import Dockerfile, Stage, read, with_triggers
from agentenv.template.dockerfile.supply import CacheFile, Fetched
from agentenv.template.workshop import Base


def checked(source: DockerfileSource) -> Dockerfile:
    """The stages to build, as far as can be said without what they start from. DockerfileError (also of files that are missing)."""
    dockerfile = read(parse(source.text, source.name), source.arguments, source.target)
    for need in needs(dockerfile):
        if not source.files.get(need.line):
            raise dockerfile.document.error(need.line, "`files` does not name an archive for this line", "upload one, and give its hash")
    return dockerfile


class DockerfileBuild:
    """The stages of one build; implements `dockerfile.supply.Supply` for them. `run` it once; `close` ends its VMs."""

    def __init__(self, work: BuildWork) -> None:
        self._work = work
        self._fetched: dict[Remote, Fetched] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of what is fetched
        self._disks: dict[int, DiskBuild] = {}
        self._states: dict[int, State] = {}
        self._steps = 0

    async def run(self) -> tuple[DiskBuild, Machine, State]:
        """The target's disk, and what its instructions leave. BuildError."""
        work, source = self._work, self._source
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
        if self._folder is not None:
            self._folder.cleanup()
        for disk in self._disks.values():
            await disk.close()

    # --- for the actions

    @property
    def secrets(self) -> Mapping[str, bytes]:
        """What the caller gives."""
        return self._source.secrets

    async def pack(self, stage: int, sources: tuple[str, ...], output: Path, most_bytes: int, *, parents: bool = False) -> None:
        """Read files of another stage, in a VM of its own."""
        bench = await self._disks[stage].bench()
        await bench.pack(sources, output, most_bytes, self._work.left_s(), parents=parents)

    def fetched(self, remote: Remote) -> Fetched:
        """What `_fetch` has brought."""
        return self._fetched[remote]

    def cache(self, name: str, sharing: str) -> AbstractAsyncContextManager[CacheFile]:
        """A cache of the node."""
        return self._work.tools.caches.using(name, sharing)

    # --- the stages

    @property
    def _source(self) -> DockerfileSource:
        assert self._work.plan.dockerfile is not None
        return self._work.plan.dockerfile

    async def _stage(self, dockerfile: Dockerfile, stage: Stage, files: dict[int, str]) -> None:
        work = self._work
        with work.failing_at(BASE_STEP, partial(_with_line, dockerfile, stage.line)):
            base, state, on_build = await self._base(stage)
            work.hold(base.snapshot_id)
            work.log.add(f"[{stage}] FROM {base.label}", BASE_STEP)
            self._machine = work.machine(base)
            disk = self._disks[stage.index] = DiskBuild(work, base, self._machine)
            await disk.prepare()
        with work.failing_at(BASE_STEP):
            if on_build:
                work.log.add(f"[{stage}] ONBUILD of the image: {'; '.join(on_build)}", BASE_STEP)
                stage = with_triggers(dockerfile, stage, on_build)
            evaluated = evaluate(dockerfile, stage, state, files)
        if on_build and not files.get(stage.line) and any(_is_of_context(action, stage.line) for action in evaluated.actions):
            where = dockerfile.document.where(stage.line).partition("\n")[0]
            message = f"{where}: ONBUILD of the image copies files of the context, which were not sent: {'; '.join(on_build)[:300]}"
            raise BuildError(BuildFailure(message, BASE_STEP, {str(stage.line): list(on_build)}))
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
            if other is not disk or stage.index != dockerfile.target.index:
                await other.close()

    async def _step(self, disk: DiskBuild, action: Action, number: str, title: str, is_forced: bool) -> None:
        content = action.content() + [self._disks[stage].disk.key for stage in stages_of(action)]
        if isinstance(action, Copy):
            content += [await self._fetch(remote, number) for remote in action.remotes]
        key = disk.key(content)
        if not is_forced and await disk.reuse(key):
            self._work.log.add(f"{title} CACHED {action.origin}", number)
            return
        self._work.log.add(f"{title} {action.origin}", number)
        await disk.do(key, partial(perform, action, number, self))

    async def _fetch(self, remote: Remote, number: str) -> str:
        """Fetch what ADD names; returns what exactly it is."""
        work = self._work
        if self._folder is None:
            work.tools.scratch.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(dir=work.tools.scratch, prefix="fetched-")
        if remote not in self._fetched:
            say = partial(work.log.add, step=number)
            self._fetched[remote] = await work.tools.fetcher.fetch(remote, Path(self._folder.name), say)
        return self._fetched[remote].content

    async def _base(self, stage: Stage) -> tuple[Base, State, tuple[str, ...]]:
        """What a stage starts from, and the instructions that its image has kept for it."""
        work, wanted = self._work, stage.base
        if wanted.kind == "stage":
            before, state = self._disks[wanted.stage], self._states[wanted.stage]
            base = replace(before.base, origin=f"stage {before.disk.key}", label=str(wanted.name), snapshot_id=before.disk.snapshot_id)
            return replace(base, context=state.context, preparation=()), state, ()
        if wanted.kind == "template":
            base = work.tools.workshop.base(wanted.name)
            return base, State(base.context), ()
        if wanted.kind == "scratch":
            base = await work.tools.images.empty()
        else:
            account = work.tools.images.account(wanted.name, self._source.accounts)
            base = await work.tools.images.base(wanted.name, account, lambda text: work.log.add(text, BASE_STEP))
        image = base.image or ImageConfig()
        state = _state_of(image)
        return replace(base, context=state.context, preparation=()), state, image.on_build if stage.line else ()


def _is_of_context(action: Action, line: int) -> bool:
    """Whether an action of that line needs files of the context."""
    return action.origin.line == line and isinstance(action, Copy) and action.stage is None and bool(action.sources)


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
