"""What the actions of a stage do in its VM, and what they change for those after them.

Unlike the steps of the SDKs nothing is assumed of the image: a program runs as it stands, without a login shell.
"""

from __future__ import annotations

import io
import posixpath
import shlex
import tarfile
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from agentenv.core.model import Context
from agentenv.guest.commands import Command, CommandRefused
from agentenv.template import steps
from agentenv.template.copying import Layout, Owner
from agentenv.template.dockerfile.actions import Action, Become, Copy, MakeFolder, Run
from agentenv.template.dockerfile.arrange import Arrangement, Piece
from agentenv.template.dockerfile.copy_words import ROOT
from agentenv.template.dockerfile.mounting import mounted, scratch
from agentenv.template.dockerfile.supply import Supply

_SHOWN_CHARS = 1000  # of a command, in the error that it failed


async def perform(action: Action, number: str, supply: Supply, context: Context, tools: steps.StepTools) -> tuple[Context, bool]:
    """Carry out an action; returns what those after it start with, and whether it may have changed the disk. AgentEnvError."""
    if isinstance(action, Become):
        return action.applied(context), False
    if isinstance(action, MakeFolder):
        bench = await tools.bench()
        with steps.told_as(f"'{action.path}' could not be made"):
            await bench.make_folder(action.path, 0, 0)
        return replace(context, workdir=action.path), True
    if isinstance(action, Run):
        await _run(action, number, supply, context, tools)
    else:
        await _copy(action, supply, tools)
    return context, True


async def _run(action: Run, number: str, supply: Supply, context: Context, tools: steps.StepTools) -> None:
    line = shlex.join(action.argv) if len(action.argv) != 3 else action.argv[2]
    shown = "its script" if "\n" in line else f"'{line[:_SHOWN_CHARS]}'"
    async with mounted(action.mounts, action.origin, supply, tools) as secret:
        variables = {**context.env_vars, **dict(action.unkeyed), **dict(action.variables), **secret}
        if action.script is not None:
            await _put_script(*action.script, tools)
        try:
            ended, output = await steps.follow(Command(action.argv, context.user, context.workdir, variables), number, tools)
        except CommandRefused as error:
            raise steps.StepFailed(f"failed to run {shown}: {error.message}") from error
        if ended.exit_code != 0:
            raise steps.StepFailed(f"failed to run {shown}: {ended.status}" + (f"\n{output}" if output else ""))


async def _put_script(path: str, content: str, tools: steps.StepTools) -> None:
    """It lies in memory, and the VM ends with the build."""
    bench, (folder, name) = await tools.bench(), posixpath.split(path)
    with tempfile.NamedTemporaryFile(dir=scratch(tools)) as file:
        _write_files(Path(file.name), ((name, content),), 0o755)
        with steps.told_as(f"'{path}' could not be written"):
            await bench.unpack(Path(file.name), folder, 0, 0, tools.left_s())


async def _copy(action: Copy, supply: Supply, tools: steps.StepTools) -> None:
    place = await steps.look(action.owner or ROOT, action.destination, tools)
    owner = Owner(place.uid, place.gid) if action.owner else None
    with tempfile.TemporaryDirectory(dir=scratch(tools)) as name, ExitStack() as used:
        folder = Path(name)
        pieces = []
        if action.stage is not None:
            sources = tuple(source.above() for source in Piece.of(folder, action).sources) if action.parents else action.sources
            await supply.pack(action.stage, sources, folder / "stage.tar", tools.content_max_bytes, parents=action.parents)
            pieces.append(Piece.of(folder / "stage.tar", action))
        elif action.sources:
            pieces.append(Piece.of(used.enter_context(tools.files.using(action.files_hash)), action))
        for fetched in map(supply.fetched, action.remotes):
            pieces.append(Piece.literal(fetched.archive, (fetched.name or ".",), action.unpacks_remotes and bool(fetched.name)))
        arrangement = Arrangement(action, pieces, tools.content_max_bytes, folder)
        layout = await steps.to_its_end(_prepare, arrangement, action, pieces, folder, place.is_folder, owner)
        if layout is not None:
            bench = await tools.bench()
            with steps.told_as(f"'{action.destination}' could not be written"):
                await bench.unpack(folder / "arranged.tar", layout.folder, place.uid, place.gid, tools.left_s(), is_apart=action.is_apart)


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
