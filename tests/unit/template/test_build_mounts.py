"""RUN --mount over a workshop without VMs: what is mounted where, what is kept, and what depends on it."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from pathlib import Path

import pytest
from build_rig import HASH, Rig, upload

from agentenv.core.builds import DockerfileSource
from agentenv.core.model import Context
from agentenv.template.run_caches import RunCaches


@pytest.fixture(autouse=True)
def images(rig: Rig) -> None:
    rig.images.contexts = {"debian": Context(), "golang": Context()}


async def build(rig: Rig, text: str, files: dict[int, str] | None = None, secrets: dict[str, bytes] | None = None):
    return await rig.build(dockerfile=DockerfileSource(text, files=files or {}, secrets=secrets or {}))


def content(archive: bytes) -> dict[str, tuple[str, int, int]]:
    """Of an archive: content, mode and owner by name."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as made:
        return {m.name: (made.extractfile(m).read().decode() if m.isreg() else "", m.mode, m.uid) for m in made.getmembers()}


def archive(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            made.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def test_what_is_mounted_and_taken_away(rig: Rig):
    await upload(rig, "src/a", "b")
    rig.workshop.stage_files = {"go/tool": b"tool"}
    text = """FROM golang AS tools
RUN make tools
FROM debian
RUN --mount=src=src,target=/in --mount=from=tools,source=/go,target=/opt/go,rw --mount=type=tmpfs,target=/mem --mount=src=b,target=/etc/b x
RUN y
"""
    job = await build(rig, text, {4: HASH})
    assert job.status == "ready", job.failure
    assert [(target, ro) for _, target, ro, _ in rig.workshop.mounted] == [
        ("/in", True),
        ("/opt/go", False),
        ("/mem", False),
        ("/etc/b", True),
    ]
    assert [source for source, *_ in rig.workshop.mounted] == [
        "/.aenv-mounts/0/content",
        "/.aenv-mounts/1/content",
        "",
        "/.aenv-mounts/3/content",
    ]
    assert content(rig.workshop.mounted[0][3]) == {"a": ("x", 0o644, 0)}
    assert content(rig.workshop.mounted[1][3]) == {"tool": ("tool", 0o640, 7)}
    assert rig.workshop.packed[0][1] == ("go",)
    assert [what for what in rig.disk() if what in ("x", "y")] == ["x", "y"]
    again = await build(rig, text, {4: HASH})
    assert sum("CACHED" in line for line in await rig.said(again)) == 3
    changed = await build(rig, text.replace("make tools", "make others"), {4: HASH})
    ran = [line for line in await rig.said(changed) if "] RUN" in line and "CACHED" not in line]
    assert len(ran) == 3, "a RUN depends on the stage that it mounts"


async def test_a_program_that_fails_leaves_no_mount(rig: Rig):
    rig.workshop.answers_to = lambda command: (3, "") if command == "fails" else (0, "")
    job = await build(rig, "FROM debian\nRUN --mount=type=cache,target=/c --mount=type=tmpfs,target=/t fails\n")
    assert job.failure.message.startswith("Dockerfile:2: failed to run 'fails'")
    rig.workshop.answers_to = lambda command: (3, "no such thing") if command == "mount /t" else (0, "")
    job = await build(rig, "FROM debian\nRUN --mount=type=cache,target=/c --mount=type=tmpfs,target=/t works\n")
    assert "--mount: '/t' could not be mounted: no such thing" in job.failure.message
    rig.assert_rests()


# --- secrets

SECRET = b"s3cret-of-mine\nsecond line"
WITH_SECRETS = """FROM debian
RUN --mount=type=secret,id=token,mode=0440,uid=9 --mount=type=secret,id=token,env=TOKEN --mount=type=secret,id=none one
RUN two
"""


async def test_secrets_are_files_and_variables_and_nothing_else(rig: Rig, tmp_path: Path):
    rig.workshop.answers_to = lambda command: (0, f"it is {SECRET.decode()} !") if command == "one" else (0, "")
    job = await build(rig, WITH_SECRETS, secrets={"token": SECRET})
    assert job.status == "ready", job.failure
    (one,) = (command for command in rig.workshop.ran if command.argv[-1] == "one")
    (two,) = (command for command in rig.workshop.ran if command.argv[-1] == "two")
    assert one.env_vars["TOKEN"] == SECRET.decode()
    assert "TOKEN" not in two.env_vars
    assert [target for _, target, *_ in rig.workshop.mounted] == ["/.aenv-mounts/0", "/run/secrets/token"]
    assert content(rig.workshop.mounted[1][3]) == {"content": (SECRET.decode(), 0o440, 9)}
    said = await rig.said(job)
    assert "[stdout] it is ***" in said
    assert "[stdout] *** !" in said
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert b"s3cret-of-mine" not in path.read_bytes(), path
    assert "s3cret" not in repr(rig.workshop.disks) + repr(rig.book.templates()) + repr([*rig.book.cached_steps.all()])


async def test_another_content_of_a_secret_runs_nothing_again(rig: Rig):
    await build(rig, WITH_SECRETS, secrets={"token": SECRET})
    rig.workshop.ran.clear()
    assert (await build(rig, WITH_SECRETS, secrets={"token": b"other"})).status == "ready"
    assert not {"one", "two"} & {command.argv[-1] for command in rig.workshop.ran}


async def test_a_secret_in_an_error_is_concealed(rig: Rig):
    rig.workshop.answers_to = lambda command: (1, f"bad {SECRET.decode()}") if command == "one" else (0, "")
    job = await build(rig, WITH_SECRETS, secrets={"token": SECRET})
    assert "bad ***" in job.failure.message
    assert "s3cret" not in json.dumps([job.failure.message, *await rig.said(job)])


async def test_a_secret_that_is_required(rig: Rig):
    job = await build(rig, "FROM debian\nRUN --mount=type=secret,id=a,required x")
    assert job.failure.message.startswith("Dockerfile:2: --mount: '/run/secrets/a' could not be mounted: the secret 'a' is required")
    assert "--secret id=a" in job.failure.message


# --- caches


async def test_a_cache_outlives_builds(rig: Rig):
    text = "FROM debian\nRUN --mount=type=cache,target=/c,mode=0700,uid=5 {}\n"
    rig.workshop.leaves = archive(left="by one")
    assert (await build(rig, text.format("one"))).status == "ready"
    assert content(rig.workshop.mounted[-1][3]) == {".": ("", 0o700, 5)}, "empty at first"
    rig.workshop.leaves = archive(left="by two")
    rig.workshop.answers_to = lambda command: (1, "") if command == "two" else (0, "")
    assert (await build(rig, text.format("two"))).status == "error"
    assert content(rig.workshop.mounted[-1][3])["left"][0] == "by one"
    assert (await build(rig, text.format("three"))).status == "ready"
    assert content(rig.workshop.mounted[-1][3])["left"][0] == "by two", "also what a program leaves that fails"
    await rig.restart()
    assert (await build(rig, text.format("four"))).status == "ready"
    assert content(rig.workshop.mounted[-1][3])["left"][0] == "by two"


async def test_caches_go_by_id_and_a_read_only_one_stays_as_it_is(rig: Rig):
    rig.workshop.leaves = archive(left="by one")
    await build(rig, "FROM debian\nRUN --mount=type=cache,target=/c,id=mine one\n")
    rig.workshop.leaves = archive(left="by two")
    for how, found in (("target=/c", False), ("target=/other,id=mine,ro", True), ("target=/third,id=mine", True)):
        await build(rig, f"FROM debian\nRUN --mount=type=cache,{how} x {how}\n")
        assert ("left" in content(rig.workshop.mounted[-1][3])) is found, how
    assert content(rig.workshop.mounted[-1][3])["left"][0] == "by one"


async def test_a_cache_begins_with_a_folder_of_a_stage(rig: Rig):
    rig.workshop.stage_files = {"seed/x": b"seeded"}
    text = "FROM golang AS s\nFROM debian\nRUN --mount=type=cache,target=/c,from=s,source=/seed one\n"
    assert (await build(rig, text)).status == "ready"
    assert content(rig.workshop.mounted[-1][3]) == {"x": ("seeded", 0o640, 7)}


async def test_sharing(tmp_path: Path):
    caches, order = RunCaches(tmp_path / "caches", 1 << 20), list[str]()
    (tmp_path / "work").mkdir()

    async def use(sharing: str, name: str, entered: asyncio.Event, leave: asyncio.Event) -> bytes:
        async with caches.using("id", sharing) as cache:
            order.append(name)
            entered.set()
            begun = cache.archive.read_bytes() if cache.archive else b""
            await leave.wait()
            path = tmp_path / "work" / name
            path.write_bytes(name.encode())
            await cache.keep(path)
            return begun

    async def two(sharing: str) -> tuple[bytes, bytes]:
        events = [asyncio.Event() for _ in range(4)]
        first = asyncio.create_task(use(sharing, "first", events[0], events[1]))
        await events[0].wait()
        second = asyncio.create_task(use(sharing, "second", events[2], events[3]))
        await asyncio.sleep(0.05)
        events[1].set()
        begun = await first
        events[3].set()
        return begun, await second

    async def now() -> bytes:
        async with caches.using("id", "shared") as cache:
            return cache.archive.read_bytes() if cache.archive else b""

    assert await two("locked") == (b"", b"first"), "the second waits, and finds what the first has left"
    assert await two("shared") == (b"second", b"second"), "both begin with what was there"
    assert await now() == b"second"
    assert await two("private") == (b"second", b""), "the second has one of its own"
    assert await now() == b"first"


async def test_caches_are_bounded(tmp_path: Path):
    caches = RunCaches(tmp_path / "caches", 1000)
    (tmp_path / "work").mkdir()
    for name, size in (("a", 400), ("b", 400), ("c", 400), ("d", 5000)):
        async with caches.using(name, "shared") as cache:
            path = tmp_path / "work" / name
            path.write_bytes(bytes(size))
            await cache.keep(path)
    kept = []
    for name in "abcd":
        async with caches.using(name, "shared") as cache:
            kept.append(cache.archive is not None)
    assert kept == [False, True, True, False]
    assert not list((tmp_path / "caches").glob(".*"))
