"""What the actions of a stage do in its VM, and what they change for those after them.

Unlike the steps of the SDKs nothing is assumed of the image: a program runs as it stands, without a login shell.
"""

from __future__ import annotations

import io
import posixpath
import shlex
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path

from agentenv.core.model import Context
from agentenv.guest.commands import Command, CommandRefused, Stream
from agentenv.template import steps
from agentenv.template.copying import Layout, Owner
from agentenv.template.dockerfile.actions import Action, Become, Copy, MakeFolder, Mount, Run
from agentenv.template.dockerfile.arrange import Arrangement, Piece
from agentenv.template.dockerfile.copy_words import ROOT

Pack = Callable[[int, tuple[str, ...], Path, int], Awaitable[None]]
"""Writes what a stage has of some sources into an archive, of so many bytes at most."""
_SHOWN_CHARS = 1000  # of a command, in the error that it failed
_HELPER_DEADLINE_S = 120.0

#: Puts an empty folder of the disk, or of memory, over `$2`; says what it had to make, and what is to be removed after it.
_MOUNT = """
set -e
made= at=$2
while [ ! -d "$at" ]; do made=$at; at=$(dirname "$at"); done
mkdir -p -- "$2"
if [ "$1" = memory ]; then
  mount -t tmpfs -o "mode=$3" tmpfs "$2"; folder=
else
  folder=$(mktemp -d /.aenv-mount-XXXXXX); chmod "$3" "$folder"; mount --bind "$folder" "$2"
fi
chown "$4" "$2"
printf '%s\\n%s\\n' "$made" "$folder"
"""
_UNMOUNT = """
umount -l -- "$1"
[ -z "$3" ] || rm -rf -- "$3"
[ -z "$2" ] || rmdir -p --ignore-fail-on-non-empty -- "$1" 2>/dev/null || rmdir -- "$1" 2>/dev/null || :
"""


async def perform(action: Action, number: str, pack: Pack, context: Context, tools: steps.StepTools) -> tuple[Context, bool]:
    """Carry out an action; returns what those after it start with, and whether it may have changed the disk. AgentEnvError."""
    if isinstance(action, Become):
        return action.applied(context), False
    if isinstance(action, MakeFolder):
        bench = await tools.bench()
        with steps.told_as(f"'{action.path}' could not be made"):
            await bench.make_folder(action.path, 0, 0)
        return replace(context, workdir=action.path), True
    if isinstance(action, Run):
        await _run(action, number, context, tools)
    else:
        await _copy(action, pack, tools)
    return context, True


async def _run(action: Run, number: str, context: Context, tools: steps.StepTools) -> None:
    line = shlex.join(action.argv) if len(action.argv) != 3 else action.argv[2]
    shown = "its script" if "\n" in line else f"'{line[:_SHOWN_CHARS]}'"
    variables = {**context.env_vars, **dict(action.unkeyed), **dict(action.variables)}
    async with AsyncExitStack() as undone:
        for mount in action.mounts:
            undone.push_async_callback(_unmount, mount, await _mount(mount, tools), tools)
        if action.script is not None:
            await _put_script(*action.script, tools)
        try:
            ended, output = await steps.follow(Command(action.argv, context.user, context.workdir, variables), number, tools)
        except CommandRefused as error:
            raise steps.StepFailed(f"failed to run {shown}: {error.message}") from error
        if ended.exit_code != 0:
            raise steps.StepFailed(f"failed to run {shown}: {ended.status}" + (f"\n{output}" if output else ""))


async def _mount(mount: Mount, tools: steps.StepTools) -> list[str]:
    arguments = (mount.kind, mount.target, f"{mount.mode:o}", mount.owner)
    said = await _helper(_MOUNT, arguments, f"--mount: '{mount.target}' could not be mounted", tools)
    return [*said.split("\n"), "", ""][:2]


async def _unmount(mount: Mount, made: list[str], tools: steps.StepTools) -> None:
    await _helper(_UNMOUNT, (mount.target, *made), f"--mount: '{mount.target}' could not be taken away", tools)


async def _put_script(path: str, content: str, tools: steps.StepTools) -> None:
    """It lies in memory, and the VM ends with the build."""
    bench, (folder, name) = await tools.bench(), posixpath.split(path)
    with tempfile.NamedTemporaryFile(dir=_scratch(tools)) as file:
        _write_files(Path(file.name), ((name, content),), 0o755)
        with steps.told_as(f"'{path}' could not be written"):
            await bench.unpack(Path(file.name), folder, 0, 0, tools.left_s())


async def _helper(script: str, arguments: tuple[str, ...], failure: str, tools: steps.StepTools) -> str:
    """Run a script of ours as root; returns what it said. StepFailed with `failure` and its output."""
    said = bytearray()

    def keep(_stream: Stream, data: bytes) -> None:
        said.extend(data[: steps.TAIL_CHARS - len(said)])

    bench = await tools.bench()
    try:
        ended = await bench.run(Command(("/bin/sh", "-c", script, "sh", *arguments), workdir="/"), keep, _HELPER_DEADLINE_S)
    except CommandRefused as error:
        raise steps.StepFailed(f"{failure}: {error.message}", "RUN --mount needs /bin/sh, mount and mktemp in the image") from error
    output = said.decode(errors="replace").strip("\n")
    if ended.exit_code != 0:
        raise steps.StepFailed(f"{failure}: {output or ended.status}")
    return output


async def _copy(action: Copy, pack: Pack, tools: steps.StepTools) -> None:
    place = await steps.look(action.owner or ROOT, action.destination, tools)
    owner = Owner(place.uid, place.gid) if action.owner else None
    with tempfile.TemporaryDirectory(dir=_scratch(tools)) as name, ExitStack() as used:
        folder = Path(name)
        pieces = []
        if action.stage is not None:
            await pack(action.stage, action.sources, folder / "stage.tar", tools.content_max_bytes)
            pieces.append(Piece.of(folder / "stage.tar", action.sources))
        elif action.sources:
            pieces.append(Piece.of(used.enter_context(tools.files.using(action.files_hash)), action.sources))
        arrangement = Arrangement(action, pieces, tools.content_max_bytes, folder)
        layout = await steps.to_its_end(_prepare, arrangement, action, pieces, folder, place.is_folder, owner)
        if layout is not None:
            bench = await tools.bench()
            with steps.told_as(f"'{action.destination}' could not be written"):
                await bench.unpack(folder / "arranged.tar", layout.folder, place.uid, place.gid, tools.left_s())


def _prepare(
    arrangement: Arrangement, action: Copy, pieces: list[Piece], folder: Path, is_folder: bool, owner: Owner | None
) -> Layout | None:
    """The archive for the guest; None when there is nothing to copy."""
    if action.inline:
        _write_files(folder / "inline.tar", action.inline, 0o644)
        pieces.append(Piece.literal(folder / "inline.tar", tuple(name for name, _ in action.inline)))
    if not arrangement.survey():
        return None
    layout = arrangement.layout(is_folder)
    arrangement.write(folder / "arranged.tar", layout, owner)
    return layout


def _write_files(output: Path, files: tuple[tuple[str, str], ...], mode: int) -> None:
    with tarfile.open(output, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, text in files:
            info, content = tarfile.TarInfo(name), text.encode()
            info.size, info.mode = len(content), mode
            archive.addfile(info, io.BytesIO(content))


def _scratch(tools: steps.StepTools) -> Path:
    tools.scratch.mkdir(parents=True, exist_ok=True)
    return tools.scratch
