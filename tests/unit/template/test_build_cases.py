"""Cases F03 and F14 of builds: what a COPY from a real folder puts where, and that a build goes on whoever stops listening."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from build_rig import Rig, run

from agentenv.core.builds import DockerfileSource
from agentenv.core.errors import NotFound
from agentenv.core.model import Context
from agentenv.template.dockerfile.context import BuildContext, hash_of, write_archive
from agentenv.template.dockerfile.document import parse
from agentenv.template.dockerfile.needs import needs
from agentenv.template.dockerfile.stages import read

CASES = {
    # a folder: its content; a file: itself; several: below the destination
    "COPY app /x": ("/x", {".": "d", "link": "-> main.py", "main.py": "main", "sub": "d", "sub/deep": "deep"}),
    "COPY app/ /x/": ("/x", {".": "d", "link": "-> main.py", "main.py": "main", "sub": "d", "sub/deep": "deep"}),
    "COPY app/main.py /x": ("/", {"x": "main"}),
    "COPY app/main.py /x/": ("/x", {"main.py": "main"}),
    "COPY app/main.py /tmp": ("/tmp", {"main.py": "main"}),
    "COPY *.txt /x": ("/x", {"a.txt": "a", "b.txt": "b"}),
    "COPY a.tx? /x": ("/", {"x": "a"}),
    "COPY app/s* /x": ("/x", {".": "d", "deep": "deep"}),
    "COPY a.txt app /x/": ("/x", {"a.txt": "a", ".": "d", "link": "-> main.py", "main.py": "main", "sub": "d", "sub/deep": "deep"}),
    "COPY none* a.txt /x/": ("/x", {"a.txt": "a"}),
    # .dockerignore, also what it takes back
    "COPY logs /x": ("/x", {".": "d", "kept.log": "kept"}),
    "COPY . /x": (
        "/x",
        {
            **{".": "d", "a.txt": "a", "app": "d", "app/link": "-> main.py", "app/main.py": "main", "app/sub": "d", "app/sub/deep": "deep"},
            **{"b.txt": "b", "logs": "d", "logs/kept.log": "kept", "parts.tgz": "archive", "to-app": "-> app", "to-file": "-> a.txt"},
        },
    ),
    # a source that is a link is followed, one inside a folder stays a link
    "COPY to-file /x": ("/", {"x": "a"}),
    "COPY to-app /x": ("/x", {".": "d", "link": "-> main.py", "main.py": "main", "sub": "d", "sub/deep": "deep"}),
    "COPY to-app/sub /x": ("/x", {".": "d", "deep": "deep"}),
    "COPY app/link /x": ("/", {"x": "main"}),
    "COPY ../../a.txt /x": ("/", {"x": "a"}),
    # archives
    "COPY parts.tgz /x/": ("/x", {"parts.tgz": "archive"}),
    "ADD parts.tgz /x": ("/x", {".": "d", "deep": "deep"}),
    "ADD a.txt /x": ("/", {"x": "a"}),
    # words in JSON, heredocs
    'COPY ["a.txt", "b.txt", "/x/"]': ("/x", {"a.txt": "a", "b.txt": "b"}),
    "COPY <<one <<two /x/\n1\none\n2\ntwo": ("/x", {"one": "1\n", "two": "2\n"}),
    # --parents, --exclude, --link
    "COPY --parents app/sub/deep /x": ("/x", {"app": "d", "app/sub": "d", "app/sub/deep": "deep"}),
    "COPY --exclude=sub --exclude=link app /x": ("/x", {".": "d", "main.py": "main"}),
    "COPY --link a.txt /tmp": ("/", {"tmp": "a"}),
}


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    for name, text in {
        **{"a.txt": "a", "b.txt": "b", "app/main.py": "main", "app/sub/deep": "deep"},
        **{"logs/one.log": "never", "logs/kept.log": "kept", "secret": "never"},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "app" / "link").symlink_to("main.py")
    (folder / "to-app").symlink_to("app")
    (folder / "to-file").symlink_to("a.txt")
    shutil.make_archive(str(tmp_path / "parts"), "gztar", folder / "app" / "sub")
    shutil.move(tmp_path / "parts.tar.gz", folder / "parts.tgz")
    (folder / ".dockerignore").write_text("**/*.log\n!logs/kept.log\nsecret\n.dockerignore\n")
    return folder


async def send(rig: Rig, context: Path, text: str) -> dict[int, str]:
    """The archives of a Dockerfile's context on the node, as the client sends them."""
    files = {}
    for need in needs(read(parse(text), {})):
        entries = BuildContext.open(context, None).entries(need)
        archive = io.BytesIO()
        write_archive(entries, archive)
        files[need.line] = name = hash_of(entries)

        async def chunks(content: bytes = archive.getvalue()) -> AsyncIterator[bytes]:
            yield content

        await rig.builds.files.receive(name, rig.builds.files.ticket(name), None, chunks())
    return files


def tree(archive: bytes) -> dict[str, str]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as made:
        for member in made.getmembers():
            if member.isreg():
                content = made.extractfile(member).read()
                found[member.name] = "archive" if content[:2] == b"\x1f\x8b" else content.decode()
            else:
                found[member.name] = "d" if member.isdir() else f"-> {member.linkname}"
    return found


@pytest.mark.parametrize("line", CASES)
async def test_f03_where_files_of_a_folder_go(rig: Rig, context: Path, line: str):
    """F03: dir, file and glob, slashes at the end, ignore files, links in sources, archives. (Over a linked folder: `unpack.rs`.)"""
    rig.images.contexts = {"debian": Context()}
    text = f"FROM debian\n{line}\n"
    job = await rig.build(dockerfile=DockerfileSource(text, files=await send(rig, context, text)))
    assert job.status == "ready", job.failure
    destination, expected = CASES[line]
    assert tree(rig.workshop.uploaded[0]) == expected
    (placed,) = (what for what in rig.disk() if what.startswith("files"))
    assert placed.split()[1] == destination


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("COPY --chown=nobody-here a.txt /x", "'nobody-here' is not known in the template"),
        ("COPY --chown=nobody-here:1 a.txt /x", "'nobody-here:1' is not known in the template"),
    ],
)
async def test_f03_owners_that_the_image_has_not(rig: Rig, context: Path, line: str, told: str):
    """F03: a name that is missing in passwd is refused with the line that asks for it."""
    rig.images.contexts = {"debian": Context()}
    text = f"FROM debian\n{line}\n"
    job = await rig.build(dockerfile=DockerfileSource(text, files=await send(rig, context, text)))
    assert job.failure.message.startswith("Dockerfile:2: ")
    assert told in job.failure.message
    assert f"  2 | {line}" in job.failure.message


@pytest.mark.parametrize("line", ["COPY secret /x", "COPY logs/one.log /x", "COPY nothing /x", "COPY app/main.py/x /y"])
async def test_f03_sources_that_are_not_there(rig: Rig, context: Path, line: str):
    """F03: what is ignored or missing is told before anything is sent."""
    with pytest.raises(NotFound):
        await send(rig, context, f"FROM debian\n{line}\n")


POINTS = ("at once", "one", "two", "three", "the end")


@pytest.mark.parametrize("point", POINTS)
async def test_f14_a_build_goes_on_when_its_follower_leaves(rig: Rig, point: str):
    """F14: whoever follows the log is gone at five points of the build, and the build ends as it would have."""
    holds = {"one": "one", "two": "two", "three": "three"}

    async def follow() -> None:
        offset = 0
        while True:
            report = await rig.builds.report(job.template_id, job.build_id, offset, 100, "debug")
            offset += len(report.entries)
            await asyncio.sleep(0.001)

    held = rig.workshop.hold(holds[point]) if point in holds else contextlib.nullcontext(None)
    with held as reached:
        job = await rig.begin(run("one"), run("two"), run("three"))
        follower = asyncio.create_task(follow())
        if reached is not None:
            async with asyncio.timeout(20):
                while not reached.is_set():
                    rig.clock.advance_ms(1000)
                    await asyncio.sleep(0.002)
        elif point == "the end":
            await rig.finish()
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower
    await rig.finish()
    job = rig.builds.job(job.template_id, job.build_id)
    assert (job.status, job.failure) == ("ready", None)
    assert [what for what in rig.disk() if what in POINTS] == ["one", "two", "three"]
    rig.assert_rests()
