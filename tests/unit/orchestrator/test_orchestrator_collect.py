"""Collecting: what goes from a full disk and in which order, what never does, and that a kill at any point is harmless."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.config.schema import LimitsConfig, StorageConfig
from agentenv.core import ids
from agentenv.core.builds import CachedStep
from agentenv.core.errors import StorageFull
from agentenv.core.images import Image, ImageConfig, ImageLayer, Platform
from agentenv.core.lifecycle import State
from agentenv.core.model import Context, Machine, Snapshot
from agentenv.core.storage import DiskUse
from agentenv.host.asset_cache import AssetCache, file_lock
from agentenv.host.file_cache import FileCache
from agentenv.orchestrator import collect
from agentenv.orchestrator.collect import everything
from agentenv.template.base import base_layer
from agentenv.template.recipes import RECIPES
from agentenv.testing.fake_node import FakeNode

KIB = 1 << 10
_STEPS_MAX = 80
_OLD_S = time.time() - 1_000_000


class Killed(BaseException):
    """Stands for a SIGKILL: nothing handles it."""


async def add_step(node: FakeNode, key: str, used_at_ms: int, *layers: tuple[str, int]) -> CachedStep:
    """A cached build step whose disk is the template's layer and `layers` (id, KiB), bottom first; those there are kept as they are."""
    parts = node.parts
    snapshot = Snapshot(ids.new_snapshot_id(), Machine(1, 16, 64), parts.identity, (), ("templatedisk", *(name for name, _ in layers)), 1)
    with parts.layers.announced(*snapshot.disk_layers), parts.shared.using(snapshot.snapshot_id):
        for name, size_kib in layers:
            if not parts.layers.path(name).exists():
                parts.layers.path(name).write_bytes(b"x" * size_kib * KIB)
        parts.paths.snapshot(snapshot.snapshot_id).mkdir(parents=True)
        await parts.store.add_snapshot(snapshot)
        step = CachedStep(key, snapshot.snapshot_id, Context(), used_at_ms)
        await parts.store.cached_steps.put(step)
    return step


def add_upload(node: FakeNode, name: str, size_kib: int, age_s: float = 1_000_000) -> Path:
    path = node.paths.build_files / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"u" * size_kib * KIB)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def cached(node: FakeNode) -> set[str]:
    steps = {step.key for step in node.parts.store.cached_steps.all()}
    return steps | {path.name for path in node.paths.build_files.iterdir()}


def fill_to(node: FakeNode, percent: int) -> None:
    """Let what there is be that much of the disk."""
    used = node.disk_use().used_bytes
    node.disk_bytes = used * 100 // percent


async def a_mixed_node(node: FakeNode) -> None:
    """Two chains of steps that share a layer, and two uploads; coldest first: a1, upload-old, a2, b1, upload-new."""
    await add_step(node, "a1", 1_000, ("shared", 400))
    add_upload(node, "upload-old", 300)
    now_ms = round(1000 * time.time())
    await add_step(node, "a2", now_ms - 900_000_000, ("shared", 400), ("only-a2", 100))
    await add_step(node, "b1", now_ms - 800_000_000, ("shared", 400), ("only-b1", 100))
    add_upload(node, "upload-new", 200, 90_000)


async def test_above_the_high_mark_the_coldest_go_until_the_low_one(node: FakeNode) -> None:
    await a_mixed_node(node)
    fill_to(node, 90)
    done = await collect.collect(node.parts)
    assert [item.name for item in done.evicted] == ["a1", "upload-old"], "too much, too little, or not the coldest"
    assert [item.size_bytes for item in done.evicted] == [0, 300 * KIB], "a layer that others have is not freed"
    assert done.freed_bytes == 300 * KIB
    assert cached(node) == {"a2", "b1", "upload-new"}
    assert done.disk == node.disk_use()
    assert node.problems() == []


async def test_a_shared_layer_counts_for_the_last_that_has_it(node: FakeNode) -> None:
    await a_mixed_node(node)
    done = await collect.collect(node.parts, everything)
    sizes = {item.name: item.size_bytes // KIB for item in done.evicted}
    assert sizes == {"a1": 0, "upload-old": 300, "a2": 100, "b1": 500, "upload-new": 200}
    assert done.freed_bytes == 1100 * KIB
    assert cached(node) == set()
    assert node.problems() == []


@pytest.mark.parametrize("goal", [None, everything])
async def test_a_dry_run_tells_the_same_and_changes_nothing(node: FakeNode, goal: collect.Goal | None) -> None:
    await a_mixed_node(node)
    node.parts.layers.path("nobodys").write_bytes(b"x" * 40 * KIB)
    fill_to(node, 95)
    before = sorted((path, path.stat().st_mtime_ns) for path in node.paths.home.rglob("*") if path.is_file() and "node.db" not in path.name)
    told = await collect.collect(node.parts, goal, dry_run=True)
    after = sorted((path, path.stat().st_mtime_ns) for path in node.paths.home.rglob("*") if path.is_file() and "node.db" not in path.name)
    assert after == before
    done = await collect.collect(node.parts, goal)
    assert (told.evicted, told.freed_bytes) == (done.evicted, done.freed_bytes)
    assert done.freed_bytes >= 40 * KIB


async def test_blobs_of_images_go_too_and_what_a_killed_server_left_of_pulls_goes_at_the_start(node: FakeNode) -> None:
    blobs = node.parts.image_registry.blobs
    kept, gone = (blobs.path(f"sha256:{digit * 64}") for digit in "ab")
    remains = [node.paths.cache / "images" / name for name in (".pull-x/oci-put-blob1", ".auth-x", ".import-x/blobs/sha256/1")]
    for path in (kept, gone, *remains):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100 * KIB)
        os.utime(path, (_OLD_S, _OLD_S))
    with blobs.using([f"sha256:{'a' * 64}"]):
        done = await collect.collect(node.parts, everything)
    assert [(item.kind, item.name, item.size_bytes) for item in done.evicted] == [("image blob", f"sha256/{'b' * 64}", 100 * KIB)]
    node.kill_server()
    await node.start_server()
    assert [path for path in (node.paths.cache / "images").rglob("*") if path.is_file()] == [kept]


async def test_blocks_of_layers_in_registries_make_up_what_is_still_wanted(node: FakeNode) -> None:
    for wanted_kib, left_kib in ((50, 1000), (100, 1000), (400, 700), (5000, 0)):
        node.devices.cached_bytes = 1000 * KIB
        add_upload(node, "upload", 100)
        told = await collect.collect(node.parts, lambda _disk, wanted=wanted_kib: wanted * KIB, dry_run=True)
        assert node.devices.cached_bytes == 1000 * KIB
        done = await collect.collect(node.parts, lambda _disk, wanted=wanted_kib: wanted * KIB)
        expected = (100 + 1000 - left_kib) * KIB
        assert (done.freed_bytes, told.freed_bytes, node.devices.cached_bytes) == (expected, expected, left_kib * KIB)


async def test_what_is_in_use_or_young_never_goes(node: FakeNode) -> None:
    step = await add_step(node, "held", 1, ("held-layer", 100))
    from_it = await add_step(node, "started-from", 2, ("started-layer", 100))
    upload, young = add_upload(node, "in-use", 100), add_upload(node, "young", 100, age_s=60)
    sandbox_id = await node.create()
    await node.orchestrator.pause(sandbox_id)
    await node.parts.store.change(sandbox_id, snapshot_id=from_it.snapshot_id)
    files = next(cache for cache in node.parts.shared.file_caches if cache.folder == node.paths.build_files)
    with node.parts.shared.using(step.snapshot_id), files.using(upload):
        done = await collect.collect(node.parts, everything)
        assert done.evicted == ()
        assert cached(node) == {"held", "started-from", "in-use", "young"}
    assert all(path.is_file() for path in (upload, young, *node.parts.layers.paths(["held-layer", "started-layer"])))
    done = await collect.collect(node.parts, everything)
    assert [item.name for item in done.evicted] == ["held", "in-use"]
    assert node.parts.layers.path("started-layer").is_file(), "a sandbox's layer went"


async def test_a_use_between_plan_and_eviction_saves_it(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    await a_mixed_node(node)
    plan = collect._plan

    async def plan_then_use(parts, goal_bytes):
        found = await plan(parts, goal_bytes)
        step = parts.store.cached_steps.get("a2")
        await parts.store.cached_steps.put(CachedStep(step.key, step.snapshot_id, step.context, step.used_at_ms + 1))
        (node.paths.build_files / "upload-old").touch()
        return found

    monkeypatch.setattr(collect, "_plan", plan_then_use)
    await collect.collect(node.parts, everything)
    assert cached(node) == {"a2", "upload-old"}
    assert node.problems() == []


async def test_the_keeper_acts_above_the_high_mark_only(ram_path: Path) -> None:
    node = FakeNode(ram_path / "node")
    node.config = node.config.model_copy(update={"storage": StorageConfig(high_percent=80, low_percent=40)})
    await node.start_server()
    await a_mixed_node(node)
    fill_to(node, 79)
    for _ in range(5):
        node.clock.advance_ms(30_000)
        await node.turn()
    assert len(cached(node)) == 5
    fill_to(node, 82)
    for _ in range(5):
        node.clock.advance_ms(30_000)
        await node.turn()
    assert node.disk_use().percent <= 40
    assert "upload-new" in cached(node)
    await node.close()


async def test_a_disk_with_less_than_the_reserve_makes_caches_give_way_before_a_verb_fails(ram_path: Path) -> None:
    node = FakeNode(ram_path / "node", limits=LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=1))
    await node.start_server()
    first = await node.create()
    for verb in (node.create, lambda: node.orchestrator.pause(first), lambda: node.orchestrator.resume(first, 600)):
        await add_step(node, "step", 1, ("step-layer", 2000))
        node.disk_bytes = node.disk_use().used_bytes + 100 * KIB
        await verb()
        assert cached(node) == set()
    await node.quiesce()
    assert node.problems() == []
    await node.close()


async def test_a_build_that_could_not_leave_the_reserve_is_refused(ram_path: Path) -> None:
    """The fake disk has room; the real one has not as much as this reserve."""
    node = FakeNode(ram_path / "node", limits=LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=1 << 40))
    await node.start_server()
    with pytest.raises(StorageFull, match="MiB needed"):
        await node.orchestrator.builds._workshop.open("a build", "any", Machine(1, 16, 64), Context(), cold=True, life_s=60)
    assert node.problems() == []
    await node.close()


async def test_a_database_that_a_full_disk_refuses_is_tried_again_after_files_went(node: FakeNode) -> None:
    await a_mixed_node(node)
    node.points.fail("store.commit", 1, StorageFull("no room for the node's database"))
    done = await collect.collect(node.parts, everything)
    assert {item.name for item in done.evicted} == {"a1", "a2", "b1", "upload-old", "upload-new"}
    assert [item.name for item in done.evicted][-1] == "a1"
    assert cached(node) == set()
    assert node.problems() == []


def _kill_at_the_nth(monkeypatch: pytest.MonkeyPatch, node: FakeNode, nth: int) -> list[str]:
    """Count every removal of a file or folder; at the nth nothing more happens in that server."""
    passed: list[str] = []

    def counted(name, real):
        def call(path, *arguments, **more):
            if str(path).startswith(str(node.paths.home)) and "node.db" not in str(path):
                passed.append(f"{name} {Path(path).name}")
                if len(passed) == nth:
                    node.kill_server()
                    raise Killed
            return real(path, *arguments, **more)

        return call

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
        monkeypatch.setattr(Path, name, counted(name, getattr(Path, name)))
    return passed


async def test_killed_at_any_step_it_leaves_a_node_that_the_next_server_finds_whole(ram_path: Path) -> None:
    """Each commit, call of blockd and removal of a file in turn: nothing that is reached is lost, nothing stays that is not."""
    for step in range(1, _STEPS_MAX):
        node = FakeNode(ram_path / str(step))
        await node.start_server()
        paused = await node.create()
        await node.orchestrator.pause(paused)
        await node.quiesce()
        await a_mixed_node(node)
        node.parts.layers.path("nobodys").write_bytes(b"x" * 40 * KIB)
        content = node.content(paused)
        with pytest.MonkeyPatch.context() as patch:
            removed = _kill_at_the_nth(patch, node, step)
            node.points.passed.clear()
            task = asyncio.create_task(collect.collect(node.parts, everything))
            for _ in range(400):
                if task.done() or len(node.points.passed) + len(removed) >= step:
                    break
                await asyncio.sleep(0)
            over = task.done() and not task.cancelled() and task.exception() is None
            node.kill_server()
        where = f"killed after {node.points.passed} and {removed}"
        await node.start_server()
        await node.quiesce()
        assert node.problems() == [], where
        assert node.content(paused) == content, where
        assert (node.row(paused).state, node.parts.layers.path("nobodys").exists()) == (State.PAUSED, False), where
        await collect.collect(node.parts, everything)
        assert cached(node) == set(), where
        assert node.problems() == [], where
        task.cancel()
        await node.close()
        if over:
            assert step > 15
            return
    pytest.fail(f"a collection has {_STEPS_MAX} steps or more: raise the limit of this test")


@pytest.mark.parametrize(("used", "free", "percent", "over"), [(50, 50, 75, 0), (90, 10, 75, 15), (100, 0, 0, 100), (0, 0, 75, 0)])
def test_how_much_is_over(used: int, free: int, percent: int, over: int) -> None:
    assert DiskUse(used, free).over_bytes(percent) == over


def test_a_low_mark_must_be_lower() -> None:
    with pytest.raises(ValueError, match="low_percent"):
        StorageConfig(high_percent=50, low_percent=50)


def test_what_is_being_written_is_nobodys(tmp_path: Path) -> None:
    cache = FileCache("build upload", tmp_path, 60)
    for name in (".partial-x", "old", "in-use"):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (_OLD_S, _OLD_S))
    with cache.using(tmp_path / "in-use"):
        assert [item.name for item in cache.cold()] == ["old"]
        assert cache.trim(0) == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-x", "in-use"]


# --- images and assets


async def add_image(node: FakeNode, name: str, age_days: float, *layers: tuple[str, int], imported: bool = False) -> Image:
    """An image on record, last used so long ago, of layers (id, KiB)."""
    parts = node.parts
    now_ms = parts.clock.now_ms()
    snapshot = Snapshot(ids.new_snapshot_id(), Machine(1, 16, 64), parts.identity, (), tuple(layer for layer, _ in layers), 1)
    made_of = tuple(ImageLayer(layer, "", size_kib * KIB) for layer, size_kib in layers)
    digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    used_at_ms = now_ms - round(age_days * 86_400_000)
    image = Image(digest, (name,), Platform(), made_of, ImageConfig(), snapshot.snapshot_id, 1, used_at_ms, imported)
    with parts.layers.announced(*image.layer_ids), parts.shared.using(snapshot.snapshot_id):
        for layer, size_kib in layers:
            parts.layers.path(layer).write_bytes(b"x" * size_kib * KIB)
        parts.paths.snapshot(snapshot.snapshot_id).mkdir(parents=True)
        await parts.store.add_snapshot(snapshot)
        await parts.store.images.put(image)
    return image


async def some_images(node: FakeNode) -> None:
    await add_image(node, "r.test/old", 40, ("common", 100), ("of-old", 200))
    await add_image(node, "r.test/older", 50, ("common", 100), ("of-older", 300))
    await add_image(node, "r.test/young", 5, ("of-young", 100))
    await add_image(node, "r.test/file", 90, ("of-file", 100), imported=True)
    built_on = await add_image(node, "r.test/built-on", 90, ("of-built-on", 100))
    await add_step(node, "step", node.parts.clock.now_ms(), *((layer, 1) for layer in built_on.layer_ids))


def images(node: FakeNode) -> set[str]:
    return {image.names[0].partition("/")[2] for image in node.parts.store.images.all()}


async def test_images_go_only_if_a_setting_says_so_and_nothing_uses_them(node: FakeNode) -> None:
    await some_images(node)
    assert images(node) == {"old", "older", "young", "file", "built-on"}
    await collect.collect(node.parts, lambda _: 50 * KIB)
    await add_step(node, "step", node.parts.clock.now_ms(), ("of-built-on", 100))
    assert images(node) == {"old", "older", "young", "file", "built-on"}, "without the setting none goes"
    node.parts.config = node.parts.config.model_copy(update={"storage": StorageConfig(images_unused_days=30)})
    told = await collect.collect(node.parts, lambda _: 450 * KIB, dry_run=True)
    done = await collect.collect(node.parts, lambda _: 450 * KIB)
    assert [(item.kind, item.name) for item in done.evicted if item.kind == "image"] == [("image", "r.test/older"), ("image", "r.test/old")]
    assert [item.name for item in told.evicted] == [item.name for item in done.evicted]
    assert images(node) == {"young", "file", "built-on"}
    assert not node.parts.layers.path("common").exists()
    assert node.problems() == []


async def test_an_image_that_is_used_now_stays(node: FakeNode) -> None:
    await some_images(node)
    node.parts.config = node.parts.config.model_copy(update={"storage": StorageConfig(images_unused_days=30)})
    old = next(image for image in node.parts.store.images.all() if image.names == ("r.test/old",))
    with node.parts.shared.using(old.snapshot_id):
        await collect.collect(node.parts, everything)
        assert "old" in images(node)
    await collect.collect(node.parts, everything)
    assert "old" not in images(node)


def add_asset(node: FakeNode, name: str, age_s: float = 10_000, content: bytes = b"x", **facts: str) -> Path:
    def build(folder: Path) -> dict[str, str]:
        (folder / "file").write_bytes(content)
        return facts

    path = AssetCache(node.paths.cache).ensure(name, build).path
    os.utime(path / "manifest.json", (time.time() - age_s,) * 2)
    return path


async def test_assets_of_earlier_versions_go(node: FakeNode) -> None:
    parts = node.parts
    identity = parts.identity
    reached = hashlib.sha256(b"of a snapshot").hexdigest()
    snapshot = Snapshot(ids.new_snapshot_id(), Machine(1, 16, 64), replace(identity, kernel_sha256=reached, vmm_version="7.7.7"), (), (), 1)
    layer = base_layer(RECIPES["base"], "1" * 16)
    await add_step(node, "step", 1, (layer, 1))
    parts.paths.snapshot(snapshot.snapshot_id).mkdir(parents=True)
    kept = {
        "kernel-of-a-snapshot": add_asset(node, "kernel-of-a-snapshot", content=b"of a snapshot"),
        "qemu-of-a-snapshot": add_asset(node, "qemu-of-a-snapshot", version="7.7.7"),
        "qemu-current": add_asset(node, "qemu-current", version=identity.vmm_version),
        f"rootfs-{'1' * 16}": add_asset(node, f"rootfs-{'1' * 16}"),
        "initramfs-new": add_asset(node, "initramfs-new", age_s=10),
        "initramfs-booted": add_asset(node, "initramfs-booted"),
        "unknown-kind": add_asset(node, "unknown-kind"),
        "qemu-running": add_asset(node, "qemu-running", version="0"),
    }
    parts.boot = replace(parts.boot, initramfs=kept["initramfs-booted"] / "file")
    gone = {
        "initramfs-old": add_asset(node, "initramfs-old", age_s=30_000),
        "kernel-old": add_asset(node, "kernel-old", age_s=20_000),
        "qemu-old": add_asset(node, "qemu-old", version="0"),
        f"rootfs-{'2' * 16}": add_asset(node, f"rootfs-{'2' * 16}", age_s=11_000),
    }
    user = await asyncio.create_subprocess_exec("sh", "-c", "read line", f"{kept['qemu-running']}/file", stdin=asyncio.subprocess.PIPE)
    try:
        with parts.shared.using(snapshot.snapshot_id):
            await parts.store.add_snapshot(snapshot)
            told = await collect.collect(parts, lambda _: 0, dry_run=True)
            assert all(path.exists() for path in gone.values())
            done = await collect.collect(parts, lambda _: 0)
    finally:
        user.kill()
        await user.wait()
    assert [item.name for item in done.evicted] == ["initramfs-old", "kernel-old", f"rootfs-{'2' * 16}", "qemu-old"]
    assert told.evicted == done.evicted
    assert {path.name for path in AssetCache(node.paths.cache).folder.glob("[!.]*")} == set(kept)
    assert done.freed_bytes >= sum(item.size_bytes for item in done.evicted) > 0
    await parts.store.remove_snapshot(snapshot.snapshot_id)
    await collect.collect(parts, lambda _: 0)
    assert not kept["kernel-of-a-snapshot"].exists()
    assert not kept["qemu-running"].exists()


async def test_an_asset_that_is_being_made_stays(node: FakeNode) -> None:
    old = add_asset(node, "initramfs-old", age_s=20_000)
    with file_lock(old.parent / ".initramfs-old.lock"):
        done = await collect.collect(node.parts, lambda _: 0)
    assert (done.evicted, old.exists()) == ((), True)
