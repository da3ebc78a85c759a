"""What each kind of step does in a build's VM, and what it changes for the commands after it (contract section 2.7).

Relative paths are below the working folder. Commands run in a login shell, as the SDKs run theirs in sandboxes. What
fails is told in the caller's words: the command and how it ended, with the end of its output.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import re
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from agentenv.core.builds import Step
from agentenv.core.errors import AgentEnvError, Internal, InvalidInput
from agentenv.core.model import Context
from agentenv.guest.commands import Command, CommandRefused, Ended, OnStart, Stream
from agentenv.guest.provision import Place
from agentenv.template import copying
from agentenv.template.build_files import BuildFiles
from agentenv.template.build_log import BuildLog, LineCutter
from agentenv.template.expand import expand, names_in
from agentenv.template.workshop import Bench

TAIL_CHARS = 4096  # of a failed command's output, in its error
_HELPER_DEADLINE_S = 120.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MODE = re.compile(r"[0-7]{1,4}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepTools:
    """What steps work with. `bench` starts the VM when the first step needs it; `left_s` is the time the build has left."""

    bench: Callable[[], Awaitable[Bench]]
    files: BuildFiles
    log: BuildLog
    scratch: Path
    content_max_bytes: int
    left_s: Callable[[], float]


class StepFailed(InvalidInput):
    """A step did what it was told and that came to nothing; the message is for the caller as it is."""


async def perform(step: Step, number: str, context: Context, tools: StepTools) -> tuple[Context, bool]:
    """Carry out a step; returns what commands after it start with, and whether it may have changed the disk. StepFailed and others."""
    check(step)
    kinds = {"RUN": _run, "COPY": _copy, "ENV": _env, "WORKDIR": _workdir, "USER": _user}
    return await kinds[step.kind](step, number, context, tools), step.kind != "ENV"


def check(step: Step) -> None:
    """InvalidInput when its arguments can never work."""
    counts = {"RUN": (1, 2), "COPY": (2, 4), "ENV": (2, 2000), "WORKDIR": (1, 1), "USER": (1, 1)}
    least, most = counts[step.kind]
    if not least <= len(step.arguments) <= most or (step.kind == "ENV" and len(step.arguments) % 2):
        raise InvalidInput(f"{step.kind}: {len(step.arguments)} arguments, which is not what it takes")
    if any("\0" in argument for argument in step.arguments):
        raise InvalidInput(f"{step.kind}: an argument holds a NUL")
    if step.kind != "ENV" and not step.arguments[0].strip():
        raise InvalidInput(f"{step.kind}: the argument is empty")


async def shell(
    command: str,
    context: Context,
    number: str,
    tools: StepTools,
    *,
    user: str = "",
    deadline_s: float | None = None,
    on_start: OnStart = lambda: None,
) -> tuple[Ended, str]:
    """Run a command in the login shell as it is run in sandboxes; its output goes to the log. Returns its end and its last output."""
    wanted = Command.in_login_shell(command, user or context.user, context.workdir, context.env_vars)
    return await follow(wanted, number, tools, deadline_s=deadline_s, on_start=on_start)


async def follow(
    command: Command, number: str, tools: StepTools, *, deadline_s: float | None = None, on_start: OnStart = lambda: None
) -> tuple[Ended, str]:
    """Run a program; its output goes to the log. Returns its end and its last output. CommandRefused and others."""
    bench = await tools.bench()
    tail: deque[str] = deque(maxlen=200)
    cutters = {"stdout": LineCutter(), "stderr": LineCutter()}

    def say(stream: Stream, lines: list[str]) -> None:
        for line in lines:
            tail.append(line)
            tools.log.output(f"[{stream}] {line}", number)

    try:
        hear = deadline_s or tools.left_s()
        ended = await bench.run(command, lambda stream, data: say(stream, cutters[stream].lines(data)), hear, on_start)
    finally:
        for stream in ("stdout", "stderr"):
            say(stream, cutters[stream].rest())
    return ended, "\n".join(tail)[-TAIL_CHARS:]


async def _run(step: Step, number: str, context: Context, tools: StepTools) -> Context:
    command, user = step.arguments[0], step.arguments[1] if len(step.arguments) > 1 else ""
    try:
        ended, output = await shell(command, context, number, tools, user=user)
    except CommandRefused as error:
        raise StepFailed(f"failed to run command '{command}': command failed: {error.message}") from error
    if ended.exit_code != 0:
        raise StepFailed(f"failed to run command '{command}': {ended.status}" + (f"\n{output}" if output else ""))
    return context


async def _env(step: Step, number: str, context: Context, tools: StepTools) -> Context:
    names, values = step.arguments[::2], step.arguments[1::2]
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise StepFailed(f"ENV: {name[:80]!r} is not the name of a variable")
    variables = dict(context.env_vars)
    for unknown in sorted(set().union(*map(names_in, values)) - variables.keys()):
        variables[unknown] = await _guest_variable(unknown, context, tools)
    added = {name: expand(value, variables) for name, value in zip(names, values, strict=True)}  # all see the values before this step
    return replace(context, env_vars={**context.env_vars, **added})


async def _guest_variable(name: str, context: Context, tools: StepTools) -> str:
    """What a variable is in a login shell of the guest; empty when it is not set there."""
    found = bytearray()
    bench = await tools.bench()

    def keep(stream: Stream, data: bytes) -> None:
        if stream == "stdout" and len(found) < 128 << 10:
            found.extend(data)

    asking = Command.in_login_shell(f'printf %s "${{{name}}}"', context.user, context.workdir, context.env_vars)
    await bench.run(asking, keep, _HELPER_DEADLINE_S)
    return found.decode(errors="replace")


async def _workdir(step: Step, number: str, context: Context, tools: StepTools) -> Context:
    path = posixpath.normpath(posixpath.join(context.workdir, expand(step.arguments[0], context.env_vars)))
    place = await look(context.user, path, tools)
    if not place.is_folder:
        bench = await tools.bench()
        with told_as(f"WORKDIR: '{path}' could not be made"):
            await bench.make_folder(path, place.uid, place.gid)
    return replace(context, workdir=path)


async def _user(step: Step, number: str, context: Context, tools: StepTools) -> Context:
    user = expand(step.arguments[0], context.env_vars).strip()
    name, _, group = user.partition(":")
    if not _NAME.fullmatch(name) or (group and not _NAME.fullmatch(group)):
        raise StepFailed(f"USER: {user[:80]!r} is not a user's name or number")
    if not name.isdecimal():
        bench = await tools.bench()
        with told_as(f"USER: '{name}' could not be made"):
            await bench.make_user(name)
    return replace(context, user=user)


async def _copy(step: Step, number: str, context: Context, tools: StepTools) -> Context:
    source_text, destination, owner, mode = (*step.arguments, "", "")[:4]
    if mode and not _MODE.fullmatch(mode):
        raise StepFailed(f"COPY: {mode[:20]!r} is not a mode in octal")
    if not step.files_hash:
        raise StepFailed("COPY: the step has no filesHash", "use a client that uploads the files")
    source = copying.Source.parse(source_text)
    wanted = posixpath.join(context.workdir, expand(destination, context.env_vars))
    with tools.files.using(step.files_hash) as archive:
        place = await look(owner or context.user, wanted, tools)
        final_owner = copying.Owner(place.uid, place.gid, int(mode, 8) if mode else None)
        tools.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tools.scratch) as folder:
            prepared = Path(folder) / "copied.tar"
            layout = await to_its_end(_prepare, archive, prepared, source, wanted, place.is_folder, final_owner, tools.content_max_bytes)
            bench = await tools.bench()
            with told_as(f"COPY: '{source_text}' could not be unpacked"):
                await bench.unpack(prepared, layout.folder, place.uid, place.gid, tools.left_s())
    return context


def _prepare(
    archive: Path, output: Path, source: copying.Source, destination: str, is_folder: bool, owner: copying.Owner, most_bytes: int
) -> copying.Layout:
    layout = copying.lay_out(copying.survey(archive, source, most_bytes), source, destination, is_folder)
    copying.rewrite(archive, output, source, layout, owner, most_bytes)
    return layout


async def look(owner: str, path: str, tools: StepTools) -> Place:
    """The numbers of `user[:group]` in the guest, and whether `path` is a folder there."""
    user, _, group = owner.partition(":")
    if not _NAME.fullmatch(user) or (group and not _NAME.fullmatch(group)):
        raise StepFailed(f"{owner[:80]!r} is not user or user:group")
    bench = await tools.bench()
    try:
        return await bench.look(owner, path)
    except InvalidInput as error:
        raise StepFailed(f"'{owner}' is not known in the template") from error


@contextlib.contextmanager
def told_as(failure: str) -> Iterator[None]:
    """What the guest refuses is told as the step's failure."""
    try:
        yield
    except InvalidInput as error:
        raise StepFailed(f"{failure}: {error.message}") from error


async def to_its_end(work: Callable[..., T], *arguments: object) -> T:
    """Blocking work in a thread, to its end even when the build is cancelled: its files are removed afterwards."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
    except OSError as error:
        raise Internal(f"the files could not be prepared: {error}", "see whether the node's disk is full") from error


def told(error: AgentEnvError) -> str:
    """What a caller is told of a failure."""
    return f"{error.message}\n{error.hint}" if error.hint else error.message
