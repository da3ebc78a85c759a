"""Scenarios about what stands beside sandboxes: templates, snapshots, volumes, secrets."""

from __future__ import annotations

import uuid

import e2b
from sdk import Absent, need, raises, takes, value


async def snapshot(sdk):
    async with sdk.sandbox() as sandbox:
        if not takes(need(sandbox, "create_snapshot"), "name"):
            raise Absent("snapshots have no names")
        await value(sandbox.files.write("/home/user/mark", "in the snapshot"))
        name = f"conformance-{uuid.uuid4().hex[:12]}"
        taken = await value(sandbox.create_snapshot(name=name))
        assert await value(sandbox.is_running()) is True
        try:
            async with sdk.sandbox(taken.snapshot_id) as child:
                assert await value(child.files.read("/home/user/mark")) == "in the snapshot"
            listed = await sdk.pages(call=sandbox.list_snapshots)
            assert taken.snapshot_id in [found.snapshot_id for page in listed for found in page]
            by_name = await sdk.pages(call=sdk.Sandbox.list_snapshots, name=name)
            assert len([found for page in by_name for found in page]) == 1
        finally:
            assert await value(sdk.Sandbox.delete_snapshot(taken.snapshot_id)) is True
        assert await value(sdk.Sandbox.delete_snapshot(taken.snapshot_id)) is False
        await raises(e2b.SandboxException, lambda: sdk.create(taken.snapshot_id))
        unnamed = await value(sdk.Sandbox.create_snapshot(sandbox.sandbox_id))
        assert await value(sdk.Sandbox.delete_snapshot(unnamed.snapshot_id)) is True


async def templates(sdk):
    if sdk.Template is None or not hasattr(sdk.Template, "exists"):
        raise Absent("no Template.exists")
    assert await value(sdk.Template.exists("base")) is True
    assert await value(sdk.Template.exists("no-such-template")) is False
    need(sdk.Template, "get_tags")
    if not takes(need(sdk.Sandbox, "create_snapshot"), "name"):
        return
    async with sdk.sandbox() as sandbox:
        name = f"conformance-{uuid.uuid4().hex[:12]}"
        await value(sandbox.create_snapshot(name=name))
        try:
            assert "default" in [tag.tag for tag in await value(sdk.Template.get_tags(name))]
            assigned = await value(sdk.Template.assign_tags(name, ["v1", "stable"]))
            assert {"v1", "stable"} <= {tag.split(":")[-1] for tag in assigned.tags}
            async with sdk.sandbox(f"{name}:v1") as child:
                assert await value(child.is_running()) is True
            await value(sdk.Template.remove_tags(name, "v1"))
            assert "v1" not in [tag.tag for tag in await value(sdk.Template.get_tags(name))]
        finally:
            await value(sdk.Sandbox.delete_snapshot(name))  # with all its tags


async def volumes(sdk):
    if sdk.Volume is None:
        raise Absent("no Volume")
    volume = await value(sdk.Volume.create(f"conformance-{uuid.uuid4().hex[:12]}"))
    try:
        await value(volume.make_dir("/folder"))
        await value(volume.write_file("/folder/a.txt", "from outside"))
        assert await value(volume.read_file("/folder/a.txt")) == "from outside"
        assert await value(volume.exists("/folder/none")) is False
        async with sdk.sandbox(volume_mounts={"/mnt/shared": volume}) as one:
            assert await value(one.files.read("/mnt/shared/folder/a.txt", user="root")) == "from outside"
            async with sdk.sandbox(volume_mounts={"/mnt/shared": volume}) as two:
                await sdk.run(one, "echo from one > /mnt/shared/one", user="root")
                assert (await sdk.run(two, "cat /mnt/shared/one", user="root")).stdout == "from one\n"
        assert await value(volume.read_file("/one")) == "from one\n"
        assert sorted(entry.name for entry in await value(volume.list("/"))) == ["folder", "one"]
        await value(volume.remove("/one"))
        listed = await value(sdk.Volume.list())
        assert volume.volume_id in [info.volume_id for info in listed]
    finally:
        assert await value(sdk.Volume.destroy(volume.volume_id)) is True
    assert await value(sdk.Volume.destroy(volume.volume_id)) is False


async def secrets(sdk):
    if sdk.Secret is None:
        raise Absent("no Secret")
    name = f"conformance_{uuid.uuid4().hex[:12]}"
    made = await value(sdk.Secret.create(name, "first value", metadata={"for": "a test"}))
    try:
        assert "first value" not in repr(made)
        assert await value(sdk.Secret.exists(name)) is True
        changed = await value(sdk.Secret.update(name, "second value"))
        assert changed.secret_id == made.secret_id
        read = await value(sdk.Secret.get_info(made.secret_id))
        assert (read.name, "second value" in repr(read)) == (name, False)
        listed = await sdk.pages(call=sdk.Secret.list)
        assert made.secret_id in [info.secret_id for page in listed for info in page]
    finally:
        assert await value(sdk.Secret.destroy(made.secret_id)) is True
    assert await value(sdk.Secret.destroy(made.secret_id)) is False
    assert await value(sdk.Secret.exists(name)) is False


SCENARIOS = (snapshot, templates, volumes, secrets)
