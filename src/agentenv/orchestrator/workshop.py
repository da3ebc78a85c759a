"""The workshop: VMs for template builds. Each is a sandbox that no caller can see, started and captured as any other.

A VM ends with its build; what is left of one by a crash is ended by `reconcile`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from agentenv.core.errors import Conflict, Internal, NotFound
from agentenv.core.ids import new_sandbox_id
from agentenv.core.lifecycle import State
from agentenv.core.model import Context, Machine, Sandbox, Snapshot
from agentenv.core.tasks import wait_done
from agentenv.guest.commands import Command, Ended, OnOutput, OnStart
from agentenv.guest.provision import Place
from agentenv.orchestrator import delete
from agentenv.orchestrator.admission import admit
from agentenv.orchestrator.collect import make_room
from agentenv.orchestrator.create import launch
from agentenv.orchestrator.instant import instant
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.sweep import sweep_soon
from agentenv.orchestrator.templates import resolve
from agentenv.template.workshop import Base, Bench

T = TypeVar("T")
_LOOK_MS = 1_000  # between looks whether the VM of a running command is still there


class VmWorkshop:
    """Implements `template.workshop.Workshop` with the node's VMs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def base(self, reference: str) -> Base:
        """What a template's build starts from."""
        template, build = resolve(self._parts.store, reference)
        return Base(build.build_id, f"template {template.name}", build.snapshot_id, build.machine, build.context)

    def using(self, snapshot_id: str) -> AbstractContextManager[None]:
        """Keep the sweep off a snapshot."""
        return self._parts.shared.using(snapshot_id)

    def has(self, snapshot_id: str) -> bool:
        """Whether a snapshot still exists."""
        try:
            self._parts.store.snapshot(snapshot_id)
        except NotFound:
            return False
        return True

    def has_memory(self, snapshot_id: str) -> bool:
        """Whether a VM can go on from it."""
        return self._parts.store.snapshot(snapshot_id).has_memory

    def release(self) -> None:
        """Free soon what nothing names any more."""
        sweep_soon(self._parts)

    async def open(
        self, title: str, snapshot_id: str, machine: Machine, context: Context, *, cold: bool, life_s: float, clock_behind_ms: int = 0
    ) -> Bench:
        """Start a VM from a snapshot."""
        parts = self._parts
        await make_room(parts)
        admit(parts, machine)
        now_ms = parts.clock.now_ms()
        sandbox = Sandbox(
            sandbox_id=new_sandbox_id(),
            template_id="build",
            template_name=title,
            state=State.CREATING,
            machine=machine,
            envd_version="",
            started_at_ms=now_ms,
            end_at_ms=now_ms + round(1000 * life_s),
            timeout_s=round(life_s),
            env_vars=dict(context.env_vars),
            snapshot_id=snapshot_id,
            updated_at_ms=now_ms,
            purpose="build",
            default_user=context.user,
            default_workdir=context.workdir,
        )
        bench = VmBench(parts, sandbox.sandbox_id)
        try:
            await bench.whole(launch(parts, sandbox, cold=cold, clock_behind_ms=clock_behind_ms), "start of a build's VM")
        except BaseException:
            await bench.close()
            raise
        return bench


class VmBench:
    """Implements `template.workshop.Bench`."""

    def __init__(self, parts: Parts, sandbox_id: str) -> None:
        self._parts = parts
        self.sandbox_id = sandbox_id
        self._held = contextlib.ExitStack()

    @property
    def envd_version(self) -> str:
        """What its agent says it is."""
        return self._row().envd_version

    async def run(self, command: Command, on_output: OnOutput, deadline_s: float, on_start: OnStart = lambda: None) -> Ended:
        """Run a command to its end."""
        work = self._parts.guest.execute(self._namespace(), command, on_output, deadline_s, on_start)
        running, lost = asyncio.ensure_future(work), asyncio.ensure_future(self._until_lost())
        try:  # a VM that is ended takes nobody's connection down: its network is gone before it
            await asyncio.wait({running, lost}, return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not (self._is_lost() and isinstance(running.exception(), Internal)):
                return running.result()
            raise self._lost()
        finally:
            for task in (running, lost):
                task.cancel()
            await asyncio.wait({running, lost})

    async def look(self, owner: str, path: str) -> Place:
        """Numbers of an owner, and what a path is."""
        return await self._parts.guest.provision.look(self._namespace(), owner, path)

    async def make_user(self, name: str) -> None:
        """Make a user."""
        await self._parts.guest.provision.make_user(self._namespace(), name)

    async def make_folder(self, path: str, uid: int, gid: int) -> None:
        """Make a folder."""
        await self._parts.guest.provision.make_folder(self._namespace(), path, uid, gid)

    async def unpack(self, archive: Path, folder: str, uid: int, gid: int, deadline_s: float, *, is_apart: bool = False) -> None:
        """Unpack an archive."""
        await self._parts.guest.provision.unpack(self._namespace(), archive, folder, uid, gid, deadline_s, is_apart=is_apart)

    async def mount(self, source: str, target: str, *, is_read_only: bool = False, size_bytes: int = 0, mode: int = 0o755) -> str:
        """Mount something over the disk."""
        provision = self._parts.guest.provision
        return await provision.mount(self._namespace(), source, target, is_read_only=is_read_only, size_bytes=size_bytes, mode=mode)

    async def unmount(self, target: str, made: str, folder: str) -> None:
        """Take it away."""
        await self._parts.guest.provision.unmount(self._namespace(), target, made, folder)

    async def pack(
        self,
        sources: tuple[str, ...],
        output: Path,
        most_bytes: int,
        deadline_s: float,
        *,
        root: str = "/",
        parents: bool = False,
    ) -> None:
        """Read files of the guest's disk."""
        await self._parts.guest.pack(self._namespace(), sources, output, most_bytes, deadline_s, root=root, parents=parents)

    async def keep(self) -> str:
        """Seal the disk."""
        return await self._instant(memory=False)

    async def capture(self) -> Snapshot:
        """Keep memory and disk."""
        return self._parts.store.snapshot(await self._instant(memory=True))

    async def close(self) -> None:
        """End the VM."""
        try:
            await self.whole(self._end(), "end of a build's VM")
        finally:
            self._held.close()
            sweep_soon(self._parts)

    async def whole(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run work to its end; a cancellation of the caller comes after it."""
        task = self._parts.shared.background(work, name)
        cancelled = await wait_done(task)
        if cancelled is not None:
            raise cancelled
        return task.result()

    async def _instant(self, memory: bool) -> str:
        parts = self._parts
        most_layers = max(2, parts.config.limits.layers_in_chain // 2)  # sandboxes made from it go on with its chain
        self._namespace()
        work = instant(parts, self.sandbox_id, State.SNAPSHOTTING, lambda _: None, self._held, most_layers, memory)
        try:
            _, snapshot_id = await self.whole(work, "capture of a build's VM")
        except (NotFound, Conflict) as error:
            raise self._lost() from error
        return snapshot_id

    async def _end(self) -> None:
        async with self._parts.shared.locked(self.sandbox_id):
            sandbox = self._parts.store.sandbox(self.sandbox_id)
            if sandbox is not None and sandbox.state is not State.KILLED:
                await delete.end(self._parts, sandbox, "the build needs it no longer")

    async def _until_lost(self) -> None:
        while not self._is_lost():
            await self._parts.clock.sleep_ms(_LOOK_MS)

    def _is_lost(self) -> bool:
        sandbox = self._parts.store.sandbox(self.sandbox_id)
        return sandbox is None or sandbox.vm is None

    def _row(self) -> Sandbox:
        sandbox = self._parts.store.sandbox(self.sandbox_id)
        if sandbox is None:
            raise self._lost()
        return sandbox

    def _namespace(self) -> str:
        record = self._row().vm
        if record is None:
            raise self._lost()
        return self._parts.slots.slot(record.slot).namespace

    def _lost(self) -> Internal:
        sandbox = self._parts.store.sandbox(self.sandbox_id)
        reason = sandbox.reason if sandbox is not None else ""
        return Internal(f"the build's VM has ended: {reason or 'nothing says why'}", "build again; if it repeats, give it more memory")
