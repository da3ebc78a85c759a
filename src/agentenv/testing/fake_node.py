"""A whole node over fakes: the real orchestrator, store, capturer and layer store; VMs, disks, networks and guests in memory.

The machine outlives its servers: `kill_server` drops one at whatever its tasks wait for, as `kill -9` does, and
`start_server` starts the next over the same database and machine. `problems` says everything that a node at rest must not
show; an empty list is the invariant of every test here.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, cast

from agentenv.config.limits import LimitsConfig
from agentenv.config.schema import Config, WarmConfig
from agentenv.core import ids, templates
from agentenv.core.lifecycle import State
from agentenv.core.model import Build, CreateRequest, Machine, RunningVm, Sandbox, Snapshot
from agentenv.core.paths import NodePaths
from agentenv.core.references import DEFAULT_TAG
from agentenv.core.storage import DiskUse
from agentenv.host import native
from agentenv.host.cgroup import Share
from agentenv.image.convert import Converter
from agentenv.image.helper_logins import HelperLogins
from agentenv.image.native import NativeImages
from agentenv.image.push import Publisher
from agentenv.image.registry import Registry
from agentenv.network.layout import Layout
from agentenv.orchestrator import reconcile, sweep
from agentenv.orchestrator.parts import Parts, Shared
from agentenv.orchestrator.serve_volumes import life
from agentenv.orchestrator.service import Orchestrator
from agentenv.orchestrator.start import memory_stack_id
from agentenv.orchestrator.templates import all_builds, hot_snapshot_ids
from agentenv.secret.vault import Vault
from agentenv.snapshot.capture import Capturer, state_file
from agentenv.snapshot.layers import LayerStore
from agentenv.testing.failpoints import Failpoints, InlineExecutor
from agentenv.testing.fake_block_server import FakeBlockServer
from agentenv.testing.fake_blocks import Content, FakeBlocks, FakeDevices, read_layer
from agentenv.testing.fake_cgroups import FakeCgroups
from agentenv.testing.fake_guest import ENVD_VERSION, FakeGuest
from agentenv.testing.fake_memory import FakeHostMemory
from agentenv.testing.fake_orchestrator import ManualClock
from agentenv.testing.fake_slots import FakeNetwork, FakeSlots
from agentenv.testing.fake_store import FailingStore
from agentenv.testing.fake_vmm import FakeProcess, FakeProcesses, FakeVmm
from agentenv.testing.fake_volume_servers import FakeVolumeMachine, FakeVolumeServers
from agentenv.vmm.driver import BootSpec
from agentenv.volume.registry import Volumes

TEMPLATE = "base"
_MACHINE = Machine(vcpu_count=1, memory_mb=16, disk_mb=64)
_RESTING = (State.RUNNING, State.PAUSED, State.KILLED)
_TURNS = 40  # of the loop in which some task must have moved, else all wait for the clock
_QUIET_ROUNDS_MAX = 400
_CLOSE_DEADLINE_S = 5.0


class FakeNode:
    """`await start_server()` first, `await close()` in the end."""

    def __init__(
        self,
        folder: Path,
        seed: int | None = None,
        pool_cidr: str = "10.119.0.0/24",
        limits: LimitsConfig | None = None,
        warm: int = 0,
        writes_memory: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self.paths = NodePaths(folder / "home", folder / "run")
        self.disk_bytes = 1 << 40
        self.boot_id = "first"
        self.config = Config(limits=limits or LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=0), warm=WarmConfig(sandboxes=warm))
        self.layout = Layout(pool_cidr, self.paths.tag)
        self.processes = FakeProcesses((1000, 1000) if writes_memory else None)
        self.devices = self.processes.devices = FakeDevices(self.paths.run / "stacks", self.processes.find)
        self.network = FakeNetwork(lambda namespace: self.processes.in_namespace(namespace) is not None)
        self.volume_machine = FakeVolumeMachine()
        self.memory = FakeHostMemory()
        self.groups: dict[str, tuple[int, Share]] = {}
        self.cgroups = FakeCgroups(self.groups)
        self._seed = seed
        self._servers: list[tuple[Parts, Orchestrator]] = []
        self.points = Failpoints(seed)
        self._all_points: list[Failpoints] = []
        for path in (self.paths.home, self.paths.vms, self.paths.layers):
            path.mkdir(parents=True)

    # -- servers

    async def start_server(self) -> None:
        """A server over this machine, reconciled and acting on timeouts. Until then `parts` are the former server's."""
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        points = Failpoints(None if self._seed is None else self._seed + len(self._servers))
        self._all_points.append(points)
        parts = self._parts(points)
        await parts.store.open()
        if not parts.store.templates():
            await self._add_template(parts)
        await reconcile.reconcile(parts, self.processes.end_strays)
        orchestrator = Orchestrator(parts)
        await orchestrator.open()
        self._servers.append((parts, orchestrator))
        self.points = points

    def crash_machine(self) -> None:
        """The machine goes down at this moment, and comes up again; `start_server` starts what runs on it."""
        self.kill_server()
        for process in self.processes.alive():
            self.processes.end(process, "the machine went down")
        self.devices.lose()
        self.network.present.clear()
        self.volume_machine.serving.clear()
        self.groups.clear()
        self.boot_id += "'"

    def kill_server(self) -> None:
        """Kill it at whatever its tasks wait for."""
        self.points.kill()

    async def stop_server(self, step_ms: int) -> None:
        """End the newest server in order, while time goes on in steps of `step_ms`."""
        closing = asyncio.create_task(self.orchestrator.close())
        while not closing.done():
            self.clock.advance_ms(step_ms)
            await self.turn()
        await closing
        await self.parts.store.close()

    async def close(self) -> None:
        """Let go of everything; the tasks of killed servers end too."""
        for points in self._all_points:
            points.bury()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # those that end may begin others
            for task in tasks:
                task.cancel()
            _, stuck = await asyncio.wait(tasks, timeout=_CLOSE_DEADLINE_S)
            if stuck:
                raise AssertionError(f"tasks do not end: {stuck}")
        for parts, _ in self._servers:
            await parts.store.close()

    @property
    def parts(self) -> Parts:
        """Of the newest server."""
        return self._servers[-1][0]

    @property
    def orchestrator(self) -> Orchestrator:
        """The newest server's."""
        return self._servers[-1][1]

    @property
    def guest(self) -> FakeGuest:
        """The newest server's client of its guests."""
        return cast(FakeGuest, self.parts.guest)

    def disk_use(self, _folder: Path | None = None) -> DiskUse:
        """The node's files on a disk of `disk_bytes`, which holds nothing else."""
        used = sum(path.stat().st_blocks * 512 for path in self.paths.home.rglob("*") if path.is_file())
        return DiskUse(used, max(0, self.disk_bytes - used))

    def _parts(self, points: Failpoints) -> Parts:
        layers = LayerStore(self.paths.layers, self.boot_id)
        blocks = FakeBlocks(self.devices, points)
        vmm = FakeVmm(self.processes, points)
        store = FailingStore(self.paths.database, self.clock, points)
        registry = Registry(self.paths.cache, self.config.images)
        return Parts(
            config=self.config,
            paths=self.paths,
            clock=self.clock,
            store=store,
            blocks=blocks,  # type: ignore[arg-type]
            block_server=FakeBlockServer(self.devices, blocks, self.processes.ticks, points),  # type: ignore[arg-type]
            slots=FakeSlots(self.layout, self.network, points),  # type: ignore[arg-type]
            vmm=vmm,
            guest=FakeGuest(self.processes, self.network, self.clock, points),  # type: ignore[arg-type]
            layers=layers,
            capturer=Capturer(blocks, layers, self.paths, self.clock),  # type: ignore[arg-type]
            identity=vmm.identity("kernel", "initramfs"),
            volumes=Volumes(store.volumes, self.paths.volumes, self.clock),
            volume_servers=FakeVolumeServers(self.volume_machine, points),  # type: ignore[arg-type]
            secrets=Vault(store.secrets, self.paths.secret_key, self.clock),
            boot=BootSpec(Path("kernel"), Path("initramfs"), ""),
            shared=Shared(self.config.limits.starts_at_once),
            image_registry=registry,
            image_converter=Converter(layers, native.FOLDER / "imagefs", self.config.images, self.config.guest.disk_mb),
            native_images=NativeImages(
                layers, blocks, self.config.images, HelperLogins(self.paths.helper_logins, Path(self.config.images.docker_config))
            ),
            image_publisher=Publisher(self.paths.cache, registry, layers, blocks),
            cgroups=self.cgroups,  # type: ignore[arg-type]
            disk_use=self.disk_use,
            host_memory=self.memory,  # type: ignore[arg-type]
        )

    async def _add_template(self, parts: Parts) -> None:
        snapshot = Snapshot(ids.new_snapshot_id(), _MACHINE, parts.identity, ("templatememory",), ("templatedisk",), 1)
        for layer in (*snapshot.memory_layers, *snapshot.disk_layers):
            parts.layers.path(layer).write_text(json.dumps({"booted": "yes"}))
            os.utime(parts.layers.path(layer), (1, 1))  # the template is not of today
        state = state_file(self.paths, snapshot.snapshot_id)
        state.parent.mkdir(parents=True)
        state.write_text(json.dumps({"device": "state"}))
        await parts.store.add_snapshot(snapshot)
        build = Build(ids.new_build_id(), snapshot.snapshot_id, _MACHINE, ENVD_VERSION, 1)
        await parts.store.change_templates(lambda _: templates.first(build, (TEMPLATE,), "builtin", (DEFAULT_TAG,), 1))

    # -- what tests do

    async def create(self, timeout_s: int = 3600, template: str = TEMPLATE, **fields: object) -> str:
        """A sandbox from the template; returns its id."""
        request = CreateRequest(template, timeout_s, **fields)  # type: ignore[arg-type]
        return (await self.orchestrator.create(request)).sandbox_id

    def row(self, sandbox_id: str) -> Sandbox:
        """The record of a sandbox in any state."""
        sandbox = self.parts.store.sandbox(sandbox_id)
        assert sandbox is not None, f"{sandbox_id} has no row"
        return sandbox

    def process(self, sandbox_id: str) -> FakeProcess:
        """The living VMM of a sandbox. A rollback may have left another one, which is about to end."""
        alive = [process for process in self.processes.alive() if process.spec.name == f"aenv-{sandbox_id}"]
        vm = self.row(sandbox_id).vm
        return next((process for process in alive if vm is not None and process.process.pid == vm.pid), alive[0])

    def content(self, sandbox_id: str) -> Content:
        """What a running or paused sandbox holds, by its memory; `problems` checks that its disk says the same."""
        row = self.row(sandbox_id)
        if row.state is State.PAUSED:
            return self.snapshot_content(row.snapshot_id or "")
        return self.process(sandbox_id).memory

    def snapshot_content(self, snapshot_id: str) -> Content:
        """What a snapshot holds, by its memory if it has any."""
        snapshot = self.parts.store.snapshot(snapshot_id)
        return self._layers_content(snapshot.memory_layers or snapshot.disk_layers)

    def _layers_content(self, layers: tuple[str, ...]) -> Content:
        merged: Content = {}
        for path in self.parts.layers.paths(layers):
            merged.update(read_layer(path))
        return merged

    async def turn(self) -> None:
        """Let every task that can move do so."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    async def quiesce(self) -> None:
        """Wait until no verb is under way and everything left over is settled; the clock moves on a little."""
        parts = self.parts
        await self._calm()
        await parts.slots.settle()
        await sweep.sweep(parts)
        await self._calm()  # a VM that is to stand ready may have been begun meanwhile
        await parts.slots.settle()  # what stands ready may have been freed meanwhile

    async def _calm(self) -> None:
        parts = self.parts
        for _ in range(_QUIET_ROUNDS_MAX):
            await self.turn()
            resting = all(s.state in _RESTING for s in parts.store.sandboxes())
            shared = parts.shared
            busy = shared._tasks or shared.unfreed or shared._locks or "blockd" in shared.troubles
            if resting and not (busy or self._watching_the_dead() or self._overdue()):
                break
            self.clock.advance_ms(250)
            parts.shared.expiry_changed.set()

    def _watching_the_dead(self) -> bool:
        return any(s.vm and self.processes.find(s.vm.pid) is None for s in self.parts.store.sandboxes())

    def _overdue(self) -> bool:
        """Whether someone's time is up and the server has not come to it yet."""
        now_ms, retried = self.clock.now_ms(), self.parts.shared.expiry_retry_at_ms
        rows = [s for s in self.parts.store.sandboxes() if s.state is State.RUNNING and s.sandbox_id not in retried]
        return any(row.end_at_ms <= now_ms for row in rows)

    # -- invariants of a node at rest

    def problems(self) -> list[str]:
        """What is wrong, a phrase each."""
        found = [*self.devices.violations, *self.network.violations, *self.processes.violations]
        for row in self.parts.store.sandboxes():
            found += [f"{row.sandbox_id} ({row.state}): {problem}" for problem in self._row_problems(row)]
        for kept in self.parts.store.checkpoints.all():
            found += [f"checkpoint {kept.checkpoint_id}: {problem}" for problem in self._snapshot_problems(kept.snapshot_id)]
        for build in all_builds(self.parts.store):
            found += [f"build {build.build_id}: {problem}" for problem in self._snapshot_problems(build.snapshot_id)]
        for step in self.parts.store.cached_steps.all():
            found += [f"cached step {step.key}: {problem}" for problem in self._snapshot_problems(step.snapshot_id)]
        return found + self._leaks()

    def _row_problems(self, row: Sandbox) -> list[str]:
        if row.state is State.RUNNING:
            return self._running_problems(row, row.vm) if row.vm else ["it has no VM"]
        if row.vm is not None:
            return ["it still names a VM"]
        if row.state is State.PAUSED:
            return self._mode_problems(row) or self._snapshot_problems(row.snapshot_id)
        if row.state is State.KILLED:
            return ["it still names a snapshot"] if row.snapshot_id else [] if row.reason else ["it gives no reason"]
        return ["it does not rest"]

    def _running_problems(self, row: Sandbox, vm: RunningVm) -> list[str]:
        process = self.processes.find(vm.pid)
        if process is None:
            return [f"its VMM {vm.pid} does not live"]
        named = [process.spec.memory.name, process.spec.disk.name]
        identity = process.identity
        checks = {
            "its guest stands still": process.running and not process.frozen,
            "it still names a snapshot": row.snapshot_id is None,
            "its VMM's start time is wrong": vm.pid_start_ticks == process.process.start_ticks,
            "its stacks are not the recorded ones": named == [vm.memory_stack, vm.disk_stack],
            "its stacks are not open": set(named) <= self.devices.stack_ids,
            "its slot is not there": vm.slot in self.network.present,
            "it is in another slot": process.spec.namespace == self.layout.slot(vm.slot).namespace,
            "its guest is someone else": identity is not None
            and (identity.sandbox_id, identity.access_token) == (row.sandbox_id, row.access_token),
            "the server has no handle of it": row.sandbox_id in self.parts.shared.vms,
            "its work folder is missing": process.spec.work == self.paths.vm(row.sandbox_id, vm.run_id) and process.spec.work.is_dir(),
        }
        wrong = [problem for problem, is_right in checks.items() if not is_right]
        kept = self._layers_content(vm.memory_layers) | process.unsaved
        if self.processes.writer and not vm.needs_whole_memory and kept != process.memory:
            wrong.append(f"its next snapshot would have {kept} instead of its memory {process.memory}")
        if not wrong and process.memory != (disk := self.devices.read(process.spec.disk)):
            wrong.append(f"memory {process.memory} and disk {disk} differ")
        return wrong

    def _mode_problems(self, row: Sandbox) -> list[str]:
        kept = any(s.has_memory for s in self.parts.store.snapshots() if s.snapshot_id == row.snapshot_id)
        return [] if kept == (row.pause_mode == "full") else [f"its pause was {row.pause_mode}, its snapshot is not"]

    def _snapshot_problems(self, snapshot_id: str | None) -> list[str]:
        snapshot = next((s for s in self.parts.store.snapshots() if s.snapshot_id == snapshot_id), None)
        if snapshot is None:
            return [f"its snapshot {snapshot_id} is not recorded"]
        if snapshot.has_memory != state_file(self.paths, snapshot.snapshot_id).is_file():
            return ["its state file is missing, or of no use"]
        paths = self.parts.layers.paths((*snapshot.memory_layers, *snapshot.disk_layers))
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            return [f"layers {missing} are missing"]
        if not snapshot.has_memory:
            return []
        memory, disk = self._layers_content(snapshot.memory_layers), self._layers_content(snapshot.disk_layers)
        return [] if memory == disk else [f"memory {memory} and disk {disk} of its snapshot differ"]

    def _leaks(self) -> list[str]:
        """What exists but no record explains."""
        store, shared = self.parts.store, self.parts.shared
        rows = [row for row in store.sandboxes() if row.state is State.RUNNING and row.vm is not None]
        ready = shared.warm.ready.values()
        vms = [*(row.vm for row in rows if row.vm is not None), *(warm.record for warm in ready)]
        hot = {memory_stack_id(store.snapshot(snapshot_id).memory_layers) for snapshot_id in hot_snapshot_ids(store)}
        wanted = {r.snapshot_id for r in store.sandboxes() if r.snapshot_id} | {build.snapshot_id for build in all_builds(store)}
        wanted |= {step.snapshot_id for step in store.cached_steps.all()} | {image.snapshot_id for image in store.images.all()}
        wanted |= {kept.snapshot_id for kept in store.checkpoints.all()}
        disks = {layer for s in store.snapshots() for layer in (*s.memory_layers, *s.disk_layers)}
        disks |= {layer for image in store.images.all() for layer in image.layer_ids}
        disks |= {path.name.split(".")[0] for vm in vms for path in self._files(vm)}
        stacks = {stack for vm in vms for stack in (vm.memory_stack, vm.disk_stack)}
        lives = {life(row.sandbox_id, row.vm.run_id) for row in rows if row.vm is not None}
        lives |= {life(warm.sandbox_id, warm.record.run_id) for warm in ready}
        served = {life(row.sandbox_id, row.vm.run_id) for row in rows if row.vm is not None and row.volume_mounts}
        pairs: dict[str, tuple[set[Any], set[Any]]] = {
            "VMMs": ({p.process.pid for p in self.processes.alive()}, {vm.pid for vm in vms}),
            "slots": (self.network.present, {vm.slot for vm in vms}),
            "stacks": (self.devices.stack_ids - hot, stacks - hot),
            "work folders": (
                set(self.paths.vms.iterdir()),
                {
                    *(self.paths.vm(r.sandbox_id, r.vm.run_id) for r in rows if r.vm),
                    *(self.paths.vm(w.sandbox_id, w.record.run_id) for w in ready),
                },
            ),
            "snapshots": ({s.snapshot_id for s in store.snapshots()}, wanted),
            "snapshot folders": ({folder.name for folder in self.paths.snapshots.iterdir()}, wanted),
            "layer files": ({path.name.split(".")[0] for path in self.parts.layers.files()}, disks),
            "control groups": (set(self.groups), lives),
            "volume servers": (set(self.volume_machine.serving), served),
            "live handles": (set(shared.vms), {row.sandbox_id for row in rows}),
        }
        found = [f"{what}: {sorted(map(str, have ^ want))}" for what, (have, want) in pairs.items() if have != want]
        kept = {
            "locks": shared._locks,
            "snapshots in use": shared.snapshots_in_use,
            "announced layers": self.parts.layers._announced,
            "unfreed": shared.unfreed,
            "expiring": shared.expiring,
            "VMs that a rollback has stopped": shared.formers,
            "warm VMs that nobody has": [*shared.warm.making, *shared.warm.taken],
            "warm VMs that run": [p for p in self.processes.alive() for w in ready if p.spec.name == f"aenv-{w.sandbox_id}" and p.running],
            "checkpoints of sandboxes that have ended": [
                c for c in store.checkpoints.all() if self.row(c.sandbox_id).state is State.KILLED
            ],
            "connections to guests that are gone": [reader for reader in self.guest.connected if reader.is_orphan()],
        }
        return found + [f"{what} left: {left}" for what, left in kept.items() if left]

    def _files(self, vm: RunningVm) -> list[Path]:
        """What a running VM needs: what its record names, and what its disk really has open."""
        stack = self.devices.by_id(vm.disk_stack) if vm.disk_stack in self.devices.stack_ids else None
        return [*self.parts.layers.paths(vm.layer_ids), *(self.devices.files(stack) if stack else ())]
