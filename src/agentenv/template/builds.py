"""Builds of templates: what is asked for, which go on, what they said, and how they ended (contract section 2.7).

A build belongs to the node, not to a request: it goes on when its caller leaves. A few run at once, the others wait their
turn. What a build makes appears under its name and tags when all of it is there; until then, and after a failure, the
former build stands. A build that the server did not live to finish has failed, and says so.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from agentenv.config.limits import LimitsConfig
from agentenv.core import templates
from agentenv.core.builds import (
    AS_BASE,
    FINAL_STEP,
    STEP_KINDS,
    BuildFailure,
    BuildJob,
    BuildPlan,
    CachedStep,
    DockerfileSource,
    MachineSize,
)
from agentenv.core.clock import Clock
from agentenv.core.errors import AgentEnvError, Conflict, InvalidInput, LimitReached, NotFound
from agentenv.core.ids import new_build_id, new_template_id
from agentenv.core.model import Build, LogLevel, Template
from agentenv.core.paths import NodePaths
from agentenv.core.references import DEFAULT_TAG, Reference, check_tag, parse_new_name
from agentenv.core.tasks import wait_done
from agentenv.store.shelf import Shelf
from agentenv.template import build_log, steps
from agentenv.template.build_files import BuildFiles
from agentenv.template.build_log import BuildEntry, BuildLog
from agentenv.template.build_size import check_size
from agentenv.template.builder import Builder, BuildError, BuildTools
from agentenv.template.dockerfile_build import checked
from agentenv.template.fetching import Fetcher, FetchRules
from agentenv.template.run_caches import RunCaches
from agentenv.template.step_cache import StepCache
from agentenv.template.workshop import BaseImages, Workshop

STEPS_MAX = 1000  # each may be a layer, and a request names them all
UNFINISHED_MAX = 100  # requested and not over
KEPT_MAX = 1000  # builds that are over whose status and log can still be asked for
_START_WITHIN_MS = 24 * 3_600_000  # uploads may take hours; what is not started by then is over
_log = logging.getLogger(__name__)


class BuildStore(Protocol):
    """What this module needs of `store.sqlite.Store`."""

    @property
    def builds(self) -> Shelf[BuildJob]:
        """Builds by id, also such as are over."""
        ...

    @property
    def cached_steps(self) -> Shelf[CachedStep]:
        """Disks of steps by key."""
        ...

    def templates(self) -> list[Template]:
        """All templates."""
        ...

    async def change_templates(self, change: Callable[[list[Template]], Template]) -> Template:
        """Record the template that `change` makes of those there are."""
        ...


@dataclass(frozen=True, slots=True)
class BuildReport:
    """How far a build is, and the part of its log that was asked for."""

    job: BuildJob
    entries: list[BuildEntry]


class Builds:
    """All builds of a node. `open` it once, `close` it before the node's parts."""

    def __init__(
        self,
        store: BuildStore,
        workshop: Workshop,
        paths: NodePaths,
        clock: Clock,
        limits: LimitsConfig,
        images: BaseImages,
        ready_deadline_s: float,
        denied_cidrs: Sequence[str] = (),
    ) -> None:
        self._store, self._workshop, self._paths, self._clock, self._limits = store, workshop, paths, clock, limits
        reserve_bytes = limits.disk_reserve_mb << 20
        self.files = BuildFiles(paths.build_files, clock, limits.build_file_mb << 20, limits.build_files_mb << 20, reserve_bytes)
        self.caches = RunCaches(paths.build_caches, limits.build_caches_mb << 20)
        rules = FetchRules(
            denied=tuple(map(ipaddress.ip_network, denied_cidrs)),
            private=frozenset(limits.build_fetch_private),
            file_max_bytes=limits.build_file_mb << 20,
            all_max_bytes=limits.build_downloads_mb << 20,
            reserve_bytes=reserve_bytes,
            deadline_s=limits.build_fetch_s,
        )
        self.fetcher = Fetcher(paths.build_downloads, rules)
        self._cache = StepCache(store.cached_steps, workshop, clock, limits.build_steps_cached)
        self._images = images
        self._ready_deadline_s = ready_deadline_s
        self._turn = asyncio.Semaphore(limits.builds_at_once)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[str, BuildLog] = {}
        self._reasons: dict[str, str] = {}  # why a build that is being broken off is

    async def open(self) -> None:
        """Settle what an earlier server has left."""
        await asyncio.to_thread(self.files.open)
        await asyncio.to_thread(self._remove_strays)
        await asyncio.to_thread(shutil.rmtree, self._paths.build_scratch, True)
        for job in self._store.builds.all():
            if job.status == "building":
                await self._fail(job, BuildFailure("the server stopped while the build was under way; start it again"))

    async def close(self) -> None:
        """Break off the builds that go on; each says so."""
        for build_id in list(self._running):
            await self._break_off(build_id, "the server was stopped while the build was under way; start it again")

    # --- what callers ask for

    async def request(self, name: str, tags: Sequence[str], size: MachineSize = AS_BASE) -> BuildJob:
        """A new build of the template called `name`, which need not exist yet. InvalidInput, LimitReached."""
        wanted = parse_new_name(name)
        given = tuple(dict.fromkeys((*((wanted.tag,) if wanted.tag else ()), *(_plain_tag(tag, wanted) for tag in tags)))) or (DEFAULT_TAG,)
        if len(given) > templates.TAGS_MAX:
            raise InvalidInput(f"tags: {len(given)} tags, more than {templates.TAGS_MAX}")
        check_size(size, self._limits)
        home = templates.snapshot_home(self._store.templates(), wanted)
        await self._give_up_old()
        if sum(1 for job in self._store.builds.all() if not job.is_over) >= UNFINISHED_MAX:
            raise LimitReached(f"{UNFINISHED_MAX} builds are not finished", "wait for some to end")
        if home is None and len(self._store.templates()) >= self._limits.templates:
            raise LimitReached(f"the node has {self._limits.templates} templates, its limit", "delete some, or raise limits.templates")
        now_ms = self._clock.now_ms()
        template_id = home.template_id if home is not None else self._promised_id(wanted.name) or new_template_id()
        job = BuildJob(
            new_build_id(), template_id, wanted.name, given, size.vcpu_count, size.memory_mb, now_ms, now_ms, disk_mb=size.disk_mb
        )
        await self._store.builds.put(job)
        return job

    async def start(self, reference: str, build_id: str, plan: BuildPlan) -> BuildJob:
        """Let a requested build begin. Others of the same template and tag end. NotFound, Conflict, InvalidInput."""
        job = self.job(reference, build_id)
        if job.status != "waiting" or build_id in self._logs:
            raise Conflict(f"build {build_id} is {job.status}, not waiting", "request another build")
        self._check_plan(plan)
        log = self._logs[build_id] = BuildLog(self._log_path(build_id), self._clock)  # from here on no other call can start it
        log.conceal(plan.dockerfile.secrets.values() if plan.dockerfile is not None else ())
        try:
            job = await self._put(job, status="building")
        except BaseException:
            self._logs.pop(build_id).close()
            raise
        self._running[build_id] = asyncio.create_task(self._carry_out(job, plan), name=f"build {build_id}")
        for other in self._store.builds.all():
            is_same = other.template_id == job.template_id and set(other.tags) & set(job.tags)
            if is_same and other.build_id != build_id and other.status == "building":
                await self._break_off(other.build_id, f"build {build_id} of the same template and tag has taken its place")
        return job

    def recent(self, limit: int) -> list[BuildJob]:
        """The builds requested last, the newest first."""
        return sorted(self._store.builds.all(), key=lambda job: (job.created_at_ms, job.build_id), reverse=True)[:limit]

    def job(self, reference: str, build_id: str) -> BuildJob:
        """A build by its id and its template's id or name. NotFound."""
        job = self._store.builds.get(build_id)
        wanted = reference.partition(":")[0]
        if job is not None and wanted in {job.template_id, job.name} | self._aliases(job.template_id):
            return job
        raise NotFound(f"template '{wanted}' has no build {build_id[:80]!r}", "builds that ended long ago are forgotten")

    async def report(self, reference: str, build_id: str, offset: int, limit: int, level: LogLevel) -> BuildReport:
        """How far it is, and the entries of at least `level` that come after the first `offset` of them. NotFound."""
        job = self.job(reference, build_id)  # before the log: what is read with a final status is then all there is
        entries = build_log.at_least(await self.entries(job), level)
        return BuildReport(job, entries[offset : offset + limit])

    async def entries(self, job: BuildJob) -> list[BuildEntry]:
        """All that a build has said so far."""
        live = self._logs.get(job.build_id)
        if live is not None:
            return list(live.entries)
        return [] if job.status == "waiting" else await asyncio.to_thread(build_log.read, self._log_path(job.build_id))

    def unfinished(self, reference: str) -> list[BuildJob]:
        """The builds of a template, by its id or name, that are not over."""
        jobs = (job for job in self._store.builds.all() if not job.is_over)
        return [job for job in jobs if reference in {job.template_id, job.name} | self._aliases(job.template_id)]

    async def give_up(self, jobs: Iterable[BuildJob], reason: str) -> None:
        """End builds that are not over."""
        for job in jobs:
            if job.build_id in self._running:
                await self._break_off(job.build_id, reason)
            elif not self._now(job).is_over:
                await self._fail(job, BuildFailure(reason))

    async def settle(self) -> None:
        """Wait until no build goes on."""
        while self._running:
            await asyncio.wait(set(self._running.values()))

    # --- the life of one

    async def _carry_out(self, job: BuildJob, plan: BuildPlan) -> None:
        log = self._logs[job.build_id]
        tools = BuildTools(
            workshop=self._workshop,
            images=self._images,
            cache=self._cache,
            files=self.files,
            caches=self.caches,
            fetcher=self.fetcher,
            clock=self._clock,
            scratch=self._paths.build_scratch,
            deadline_s=self._limits.build_minutes * 60,
            ready_deadline_s=self._ready_deadline_s,
        )
        try:
            if self._turn.locked():
                log.add("wait for other builds to end")
            async with self._turn:
                builder = Builder(job, plan, tools, log)
                try:
                    published = asyncio.ensure_future(self._publish(job, await builder.run(), log))
                    await wait_done(published)  # whoever breaks it off now is too late
                    published.result()
                finally:
                    await builder.close()
        except BuildError as error:
            await self._fail(job, error.failure)
        except AgentEnvError as error:
            await self._fail(job, BuildFailure(steps.told(error), FINAL_STEP))
        except asyncio.CancelledError:
            await self._fail(job, BuildFailure(self._reasons.pop(job.build_id, "the build was broken off")))
        except Exception as error:  # noqa: BLE001 - a fault of ours must end this build with a word, and no other
            _log.exception("build %s", job.build_id)
            await self._fail(job, BuildFailure(f"a fault of the node ended the build ({type(error).__name__}); see the server's log"))
        finally:
            self._running.pop(job.build_id, None)
            self._reasons.pop(job.build_id, None)
            log.close()
            self._logs.pop(job.build_id, None)
            self._workshop.release()

    async def _publish(self, job: BuildJob, build: Build, log: BuildLog) -> None:
        now_ms = self._clock.now_ms()

        def with_build(present: list[Template]) -> Template:
            home = next((template for template in present if template.template_id == job.template_id), None)
            home = home or templates.snapshot_home(present, Reference(job.name))
            if home is None:
                empty = Template(job.template_id, (job.name,), "built", (), (), now_ms, now_ms, build_count=0)
                return templates.with_build(empty, build, job.tags, now_ms)
            return templates.with_build(replace(home, kind="built"), build, job.tags, now_ms)

        await self._store.change_templates(with_build)
        log.add(f"the template {job.name} is ready as {', '.join(job.tags)}")
        await self._put(job, status="ready")

    async def _fail(self, job: BuildJob, failure: BuildFailure) -> None:
        log = self._logs.get(job.build_id)
        if log is not None:
            failure = replace(failure, message=log.concealed(failure.message))
            log.add(failure.message, failure.step, "error")
        try:
            await self._put(job, status="error", failure=failure)
        except AgentEnvError as error:  # the next start of the server finds it unfinished, and says so
            _log.error("the end of build %s could not be recorded: %s", job.build_id, error)

    async def _break_off(self, build_id: str, reason: str) -> None:
        task, job = self._running.get(build_id), self._store.builds.get(build_id)
        if task is None or job is None:
            return
        self._reasons.setdefault(build_id, reason)
        task.cancel()
        await asyncio.wait({task})
        if self._running.pop(build_id, None) is not None:  # it was cancelled before it had begun
            await self._fail(job, BuildFailure(self._reasons.pop(build_id, reason)))
            self._logs.pop(build_id).close()

    async def _put(self, job: BuildJob, **changes: object) -> BuildJob:
        changed = replace(self._now(job), updated_at_ms=self._clock.now_ms(), **changes)  # type: ignore[arg-type]
        await self._store.builds.put(changed)
        await self._forget_old()
        return changed

    def _now(self, job: BuildJob) -> BuildJob:
        return self._store.builds.get(job.build_id) or job

    # --- what is kept

    def _remove_strays(self) -> None:
        """Logs of builds that were forgotten just before a crash."""
        for path in self._paths.build_logs.glob("*"):
            if self._store.builds.get(path.stem) is None:
                path.unlink(missing_ok=True)

    async def _forget_old(self) -> None:
        over = sorted((job for job in self._store.builds.all() if job.is_over), key=lambda job: job.updated_at_ms, reverse=True)
        for job in over[KEPT_MAX:]:
            await self._store.builds.remove(job.build_id)
            await asyncio.to_thread(self._log_path(job.build_id).unlink, True)

    async def _give_up_old(self) -> None:
        """Builds that were requested and never started must not fill the node."""
        oldest_ms = self._clock.now_ms() - _START_WITHIN_MS
        for job in self._store.builds.all():
            if job.status == "waiting" and job.created_at_ms < oldest_ms:
                await self._fail(job, BuildFailure("the build was not started within a day of its request"))

    def _promised_id(self, name: str) -> str | None:
        """The id that unfinished or failed builds of a template that does not exist yet have been given."""
        jobs = [job for job in self._store.builds.all() if job.name == name and job.status != "ready"]
        return max(jobs, key=lambda job: job.created_at_ms).template_id if jobs else None

    def _aliases(self, template_id: str) -> set[str]:
        return {alias for template in self._store.templates() if template.template_id == template_id for alias in template.aliases}

    def _log_path(self, build_id: str) -> Path:
        return self._paths.build_logs / f"{build_id}.jsonl"

    def _check_plan(self, plan: BuildPlan) -> None:
        if plan.dockerfile is not None:
            _check_dockerfile(plan, plan.dockerfile)
            return
        if bool(plan.from_image) == bool(plan.from_template):
            raise InvalidInput("exactly one of fromImage and fromTemplate must be given, and not empty")
        if len(plan.steps) > STEPS_MAX:
            raise InvalidInput(f"steps: {len(plan.steps)} steps, more than {STEPS_MAX}", "put several commands into one RUN")
        for number, step in enumerate(plan.steps, start=1):
            if step.kind not in STEP_KINDS:
                raise InvalidInput(f"steps: step {number} is a {step.kind[:20]!r}, not one of {', '.join(STEP_KINDS)}")
        if plan.from_template:
            self._workshop.base(plan.from_template)


def _check_dockerfile(plan: BuildPlan, source: DockerfileSource) -> None:
    if plan.from_image or plan.from_template or plan.steps:
        raise InvalidInput("dockerfile: fromImage, fromTemplate and steps do not go with it", "its FROM says what it starts from")
    if plan.registry is not None:
        raise InvalidInput("dockerfile: fromImageRegistry does not go with it", "pull private images before, with `aenv image pull`")
    if sum(len(stage.instructions) for stage in checked(source).stages) > STEPS_MAX:
        raise InvalidInput(f"dockerfile: more than {STEPS_MAX} instructions", "put several commands into one RUN")


def _plain_tag(text: str, name: Reference) -> str:
    """A tag alone, or as `name:tag` of the template that is built."""
    if ":" not in text:
        return check_tag(text)
    full = parse_new_name(text, "tags")
    if full.tag is None or full.name != name.name:
        raise InvalidInput(f"tags: {text[:80]!r} is not a tag of template '{name.name}'", "give the tag alone, without a name before it")
    return full.tag
