"""Built-in templates: a recipe's Debian file system, booted once, its service started, warmed, captured. Needs no image registry.

What follows the boot is there for every sandbox: the guest is left with the programs every first command needs in its page
cache, with the recipe's service running, and with nothing that belongs to one sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv.block.client import BlockClient
from agentenv.config.schema import GuestConfig
from agentenv.core import templates
from agentenv.core.cleanup import Cleanup
from agentenv.core.clock import Clock
from agentenv.core.errors import AgentEnvError, Internal
from agentenv.core.ids import new_build_id, new_run_id, new_snapshot_id
from agentenv.core.model import Build, Machine, RunningVm, Snapshot, Template, VmIdentity
from agentenv.core.paths import NodePaths
from agentenv.core.references import DEFAULT_TAG
from agentenv.core.tasks import unless
from agentenv.guest.client import GuestClient, GuestIdentity
from agentenv.network import layout
from agentenv.network.slots import SlotPool
from agentenv.snapshot.capture import Captured, CapturePlan, Capturer
from agentenv.snapshot.layers import LayerStore
from agentenv.store.sqlite import Store
from agentenv.template.recipes import Recipe
from agentenv.template.workshop import CLOCK_BEHIND_MS, SETTLE
from agentenv.vmm.driver import BootSpec, Vm, Vmm, VmSpec
from agentenv.vmm.identity import differences

Progress = Callable[[str, int | None, int | None], None]
_COMMAND_DEADLINE_S = 900.0  # a warm-up imports what sessions use most; under emulation on a busy host that is minutes of work
_START_DEADLINE_S = 30.0
_READY_INTERVAL_S = 1.0
_CONSOLE_TAIL_CHARS = 2000


@dataclass(frozen=True, slots=True)
class BaseInputs:
    """What a built-in template is made from."""

    rootfs: Path
    rootfs_digest: str
    boot: BootSpec


def base_layer(recipe: Recipe, rootfs_digest: str) -> str:
    """The layer id of a root file system for a recipe: another start or warm-up makes another template of it."""
    made_from = f"{rootfs_digest} {recipe.guest_digest}"
    return f"rootfs-{hashlib.sha256(made_from.encode()).hexdigest()[:32]}"


class BaseBuilder:
    """Builds one built-in template of a node."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        store: Store,
        blocks: BlockClient,
        slots: SlotPool,
        vmm: Vmm,
        guest: GuestClient,
        layers: LayerStore,
        capturer: Capturer,
        paths: NodePaths,
        clock: Clock,
        identity: VmIdentity,
        config: GuestConfig,
        using: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """`using` keeps the sweep off a snapshot, by its id, for the length of its body."""
        self._recipe, self._using = recipe, using
        self._store, self._blocks, self._slots, self._vmm, self._guest = store, blocks, slots, vmm, guest
        self._layers, self._capturer, self._paths, self._clock = layers, capturer, paths, clock
        self._identity, self._config = identity, config

    def up_to_date(self, rootfs_digest: str) -> bool:
        """Whether the template exists, was made from these inputs and can run on this host."""
        template = self._former(self._store.templates())
        if template is None or DEFAULT_TAG not in [tag.tag for tag in template.tags]:
            return False
        build = templates.build_of(template, None)
        if build.machine != self._machine() or build.service != self._recipe.service:
            return False
        snapshot = self._store.snapshot(build.snapshot_id)
        made_here = (snapshot.identity.kernel_sha256, snapshot.identity.initramfs_sha256) == (
            self._identity.kernel_sha256,
            self._identity.initramfs_sha256,
        )
        same_inputs = snapshot.disk_layers[0] == base_layer(self._recipe, rootfs_digest)
        return made_here and same_inputs and not differences(snapshot.identity, self._identity)

    async def build(self, inputs: BaseInputs, progress: Progress) -> Template:
        """Make or replace the template. Sandboxes of a former one are not touched."""
        plan = CapturePlan(new_snapshot_id(), self._layers.new_id(), self._layers.new_id())
        upper, base = self._layers.new_id(), base_layer(self._recipe, inputs.rootfs_digest)
        with self._layers.announced(plan.memory_layer, plan.fresh_upper, upper, base), self._using(plan.snapshot_id):
            if not self._layers.path(base).exists():
                progress("put the root file system into the layer store", None, None)
                await self._blocks.import_raw(inputs.rootfs, self._layers.path(base))
            captured, envd_version = await self._boot_and_capture(inputs, plan, base, upper, progress)
            return await self._record(captured.snapshot, envd_version)

    def _machine(self) -> Machine:
        memory_mb = max(self._config.memory_mb, self._recipe.min_memory_mb)
        return Machine(self._config.vcpu_count, memory_mb, self._config.disk_mb)

    async def _boot_and_capture(
        self, inputs: BaseInputs, plan: CapturePlan, base: str, upper: str, progress: Progress
    ) -> tuple[Captured, str]:
        run_id = new_run_id()
        async with Cleanup() as cleanup:
            progress(f"boot the template {self._recipe.name}", None, None)
            slot = await self._slots.acquire()
            cleanup.push("network slot", lambda: self._slots.release(slot.number))
            record = RunningVm(run_id, slot.number, f"boot-{run_id}", f"disk-{run_id}", (), (base,), upper)
            spec = await self._spec(record, slot, cleanup)
            vm = await self._vmm.boot(spec, inputs.boot)
            cleanup.push("VMM", vm.kill)
            envd_version = await self._wait_and_warm(vm, spec, slot, progress)
            progress(f"capture the template {self._recipe.name}", None, None)
            record = replace(record, pid=vm.process.pid, pid_start_ticks=vm.process.start_ticks)
            captured = await self._capturer.capture(plan, vm, record, self._machine(), self._identity)
        return captured, envd_version

    async def _spec(self, record: RunningVm, slot: layout.Slot, cleanup: Cleanup) -> VmSpec:
        size_bytes = self._machine().memory_mb << 20
        cleanup.push("memory", lambda: self._blocks.close_stack(record.memory_stack, force=True))
        export = self._vmm.memory
        memory = await self._blocks.open(record.memory_stack, (), None, size_bytes, "page", export.export, export.owner)
        cleanup.push("disk", lambda: self._blocks.close_stack(record.disk_stack, force=True))
        lowers, upper = self._layers.paths(record.disk_layers), self._layers.upper(record.upper_layer)
        owner = self._vmm.user(slot.namespace)
        disk = await self._blocks.open(record.disk_stack, lowers, upper, None, "direct", owner=owner)
        work = self._paths.vm("template", record.run_id)
        cleanup.push("work folder", lambda: asyncio.to_thread(shutil.rmtree, work, True))
        return VmSpec("aenv-template", work, self._machine(), memory.path, disk.path, slot.namespace, layout.TAP, layout.GUEST_MAC)

    async def _wait_and_warm(self, vm: Vm, spec: VmSpec, slot: layout.Slot, progress: Progress) -> str:
        nobody = GuestIdentity("template", self._recipe.name, "", {}, self._config.dns_servers)  # no token: every restore sets its own
        hello = self._guest.initialise(slot.namespace, nobody, self._config.boot_deadline_s, boots=True, clock_behind_ms=CLOCK_BEHIND_MS)
        try:
            version = await unless(vm.ended(), hello, lambda why: Internal(why, "see the console's last lines above"))
        except AgentEnvError as error:
            raise Internal(f"the guest did not boot: {error.message}{_console(spec)}", error.hint) from error
        await self._start(slot.namespace, progress)
        progress(f"warm the template {self._recipe.name}", None, None)
        for command in filter(None, (self._recipe.warm_up, SETTLE)):
            await self._run(slot.namespace, command, _COMMAND_DEADLINE_S, "warm-up")
        return version

    async def _start(self, namespace: str, progress: Progress) -> None:
        """Start the recipe's service, if it has one, and wait until it is ready."""
        if not self._recipe.start:
            return
        progress(f"start the service of the template {self._recipe.name}", None, None)
        await self._run(namespace, self._recipe.start, _START_DEADLINE_S, "start command")
        loop = asyncio.get_running_loop()
        deadline_s = self._config.service_deadline_s
        end = loop.time() + deadline_s
        while True:
            code, output = await self._guest.run(namespace, self._recipe.ready, _START_DEADLINE_S)
            if code == 0:
                return
            if loop.time() >= end:
                raise Internal(f"the service of template {self._recipe.name} was not ready within {deadline_s} s: {output[-500:]}")
            await asyncio.sleep(_READY_INTERVAL_S)

    async def _run(self, namespace: str, command: str, deadline_s: float, what: str) -> None:
        code, output = await self._guest.run(namespace, command, deadline_s)
        if code != 0:
            raise Internal(f"the {what} of template {self._recipe.name} failed with status {code}: {output[-500:]}")

    async def _record(self, snapshot: Snapshot, envd_version: str) -> Template:
        now_ms = self._clock.now_ms()
        service = self._recipe.service
        build = Build(new_build_id(), snapshot.snapshot_id, snapshot.machine, envd_version, now_ms, service=service)

        def with_build(present: list[Template]) -> Template:
            former = self._former(present)
            if former is None:
                return templates.first(build, (self._recipe.name,), "builtin", (DEFAULT_TAG,), now_ms)
            return templates.with_build(replace(former, kind="builtin"), build, (DEFAULT_TAG,), now_ms)

        await self._store.add_snapshot(snapshot)
        return await self._store.change_templates(with_build)

    def _former(self, present: list[Template]) -> Template | None:
        return next((template for template in present if self._recipe.name in template.aliases), None)


def _console(spec: VmSpec) -> str:
    text = ""
    with contextlib.suppress(OSError):
        text = (spec.work / "vmm.log").read_text(errors="replace").strip()
    return f"\n--- console ---\n{text[-_CONSOLE_TAIL_CHARS:]}\n---" if text else ""
