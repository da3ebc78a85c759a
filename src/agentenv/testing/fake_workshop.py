"""A workshop without VMs: a disk is the list of what was done to it, so tests see what a step's disk is made of.

Tests steer commands with `answers_to` and stop them with `hold`; `opened`, `ran` and `open_benches` say what a build did.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import posixpath
import shlex
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.core.builds import Registry, Step
from agentenv.core.errors import AgentEnvError, Internal, InvalidInput, NotFound
from agentenv.core.images import Image, ImageConfig, ImageLayer, Platform
from agentenv.core.model import Context, Machine, Snapshot, Template, VmIdentity
from agentenv.core.references import parse_reference
from agentenv.core.templates import build_of, find
from agentenv.guest.commands import Command, CommandRefused, Ended, OnOutput, OnStart
from agentenv.guest.provision import Place
from agentenv.host.command import Progress, no_progress
from agentenv.template.workshop import Base

HIDDEN = "/.aenv-mounts"
_IDENTITY = VmIdentity("fake", "none", "none", "1", "kernel", "initramfs", 1_000_000)


@dataclass
class FakeDisk:
    """A snapshot: what was done to the disk, and whether there is memory with it."""

    did: tuple[str, ...]
    machine: Machine
    has_memory: bool


class FakeWorkshop:
    """Implements `template.workshop.Workshop` for the templates that `templates` gives."""

    def __init__(self, templates: Callable[[], list[Template]]) -> None:
        self._templates = templates
        self._numbers = itertools.count(1)
        self.disks: dict[str, FakeDisk] = {}
        self.held: dict[str, int] = {}
        self.opened: list[tuple[str, Machine, bool]] = []  # snapshot, machine, cold
        self.open_benches: list[FakeBench] = []
        self.ran: list[Command] = []
        self.uploaded: list[bytes] = []
        self.leaves = b""  # the archive of what programs leave in their caches
        self.stage_files: dict[str, bytes] = {}  # what COPY from any stage finds
        self.mounted: list[tuple[str, str, bool, bytes]] = []  # source, target, whether read-only, the archive of its content
        self.packed: list[tuple[tuple[str, ...], tuple[str, ...]]] = []  # what was done to the disk, sources
        self.answers_to: Callable[[str], tuple[int, str]] = lambda command: (0, "")
        self.users = {"root": 0, "user": 1000}  # of any guest
        self.variables: dict[str, str] = {"PATH": "/usr/bin:/bin"}  # of a login shell in any guest
        self.fails_to_open: Exception | None = None
        self._held_commands: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}

    @contextlib.contextmanager
    def hold(self, command: str) -> Iterator[asyncio.Event]:
        """Whoever runs `command` waits until the block ends. Gives an event that is set when it runs."""
        reached, released = self._held_commands[command] = (asyncio.Event(), asyncio.Event())
        try:
            yield reached
        finally:
            released.set()
            del self._held_commands[command]

    def base(self, reference: str) -> Base:
        """What a template's build starts from."""
        wanted = parse_reference(reference)
        template = find(self._templates(), wanted)
        build = build_of(template, wanted.tag)
        self.disks.setdefault(build.snapshot_id, FakeDisk((), build.machine, has_memory=True))
        return Base(build.build_id, f"template {template.name}", build.snapshot_id, build.machine, build.context)

    @contextlib.contextmanager
    def using(self, snapshot_id: str) -> Iterator[None]:
        """Count who holds a snapshot."""
        self.held[snapshot_id] = self.held.get(snapshot_id, 0) + 1
        try:
            yield
        finally:
            self.held[snapshot_id] -= 1
            if not self.held[snapshot_id]:
                del self.held[snapshot_id]

    def has(self, snapshot_id: str) -> bool:
        """Whether a snapshot still exists."""
        return snapshot_id in self.disks

    def has_memory(self, snapshot_id: str) -> bool:
        """Whether a VM can go on from it."""
        return self.disks[snapshot_id].has_memory

    def release(self) -> None:
        """Nothing is freed by itself."""

    async def open(
        self, title: str, snapshot_id: str, machine: Machine, context: Context, *, cold: bool, life_s: float, clock_behind_ms: int = 0
    ) -> FakeBench:
        """Start a VM."""
        await asyncio.sleep(0)
        if self.fails_to_open is not None:
            raise self.fails_to_open
        if snapshot_id not in self.held:
            raise AssertionError(f"{snapshot_id} is started while nobody keeps the sweep off it")
        if not cold and machine != self.disks[snapshot_id].machine:
            raise AssertionError("a memory was restored on a machine of another size")
        self.opened.append((snapshot_id, machine, cold))
        bench = FakeBench(self, self.disks[snapshot_id].did, machine)
        self.open_benches.append(bench)
        return bench

    def new_disk(self, did: tuple[str, ...], machine: Machine, has_memory: bool) -> str:
        """Record a snapshot."""
        snapshot_id = f"s{next(self._numbers):020}"
        self.disks[snapshot_id] = FakeDisk(did, machine, has_memory)
        return snapshot_id

    async def pass_command(self, command: str) -> None:
        """Wait at a command that a test holds."""
        await asyncio.sleep(0)
        if command in self._held_commands:
            reached, released = self._held_commands[command]
            reached.set()
            await released.wait()


class FakeBench:
    """Implements `template.workshop.Bench`."""

    envd_version = "0.6.13"

    def __init__(self, workshop: FakeWorkshop, did: tuple[str, ...], machine: Machine) -> None:
        self._workshop, self.did, self._machine = workshop, did, machine
        self._held = contextlib.ExitStack()
        self.mounts: dict[str, str] = {}
        self.hidden: dict[str, bytes] = {}  # archives of what is mounted, by folder
        self.is_open = True

    async def run(self, command: Command, on_output: OnOutput, deadline_s: float, on_start: OnStart = lambda: None) -> Ended:
        """Every command works and says nothing, unless `answers_to` says otherwise; scripts of the builder get what they ask for."""
        self._require_open()
        self._workshop.ran.append(command)
        user = command.user.partition(":")[0]
        if user not in self._workshop.users and not user.isdecimal():
            raise CommandRefused(f"unauthenticated: invalid username: '{user}'")
        text = _text(command)
        await asyncio.sleep(0)
        on_start()
        await self._workshop.pass_command(text)
        self._require_open()
        code, output = self._answer(command, text)
        if output:
            on_output("stdout", output.encode())
        return Ended(code, f"exit status {code}")

    def _answer(self, command: Command, text: str) -> tuple[int, str]:
        if text.startswith('printf %s "${'):
            return 0, self._workshop.variables.get(text[13:-2], "")
        code, output = self._workshop.answers_to(text)
        if code == 0 and "compact_memory" not in text:
            self.did = (*self.did, text)
        return code, output

    async def look(self, owner: str, path: str) -> Place:
        """Users of the workshop and numbers are known; a few folders are there."""
        self._require_open()
        user = owner.partition(":")[0]
        number = self._workshop.users.get(user, int(user) if user.isdecimal() else -1)
        if number < 0:
            raise InvalidInput(f"'{owner}' is not a user of this image")
        group = owner.partition(":")[2]
        return Place(number, int(group) if group.isdecimal() else number, path in ("/", "/tmp", "/home/user"))

    async def make_user(self, name: str) -> None:
        """Remember the name."""
        await self._do(f"user {name}")
        self._workshop.users.setdefault(name, 1000 + len(self._workshop.users))

    async def make_folder(self, path: str, uid: int, gid: int) -> None:
        """Remember the path and whose it is."""
        await self._do(f"folder {path} {uid}:{gid}")

    async def unpack(self, archive: Path, folder: str, uid: int, gid: int, deadline_s: float, *, is_apart: bool = False) -> None:
        """Remember the bytes; what is below the folder of mounts is not part of the disk."""
        if folder.startswith(HIDDEN):
            self._require_open()
            self.hidden[folder] = archive.read_bytes()
            return
        await self._do(f"files {folder} {uid}:{gid}" + (" apart" if is_apart else ""))
        self._workshop.uploaded.append(archive.read_bytes())

    async def mount(self, source: str, target: str, *, is_read_only: bool = False, size_bytes: int = 0, mode: int = 0o755) -> str:
        """Remember it."""
        self._require_open()
        code, output = self._workshop.answers_to(f"mount {target}")
        if code != 0:
            raise InvalidInput(output)
        how = " ro" if is_read_only else ""
        self.mounts[target] = f"{source or 'memory'}{how}"
        self._workshop.mounted.append(
            (source, target, is_read_only, self.hidden.get(source) or self.hidden.get(posixpath.dirname(source), b""))
        )
        return target

    async def unmount(self, target: str, made: str, folder: str) -> None:
        """Forget it, and what was in it."""
        self._require_open()
        self.mounts.pop(target, None)
        self.hidden = {place: content for place, content in self.hidden.items() if not folder or not place.startswith(folder)}

    async def _do(self, what: str) -> None:
        await asyncio.sleep(0)
        await self._workshop.pass_command(what)
        self._require_open()
        code, output = self._workshop.answers_to(what)
        if code != 0:
            raise InvalidInput(output)
        self.did = (*self.did, what)

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
        """An archive of the files that `stage_files` has, whatever the disk; those that were asked for are remembered.

        Of a folder of mounts it is what was unpacked there, or what `leaves` says a program left in it.
        """
        self._require_open()
        if root.startswith(HIDDEN):
            output.write_bytes(self._workshop.leaves or self.hidden[root])
            return
        self._workshop.packed.append((self.did, sources))
        with tarfile.open(output, "w") as archive:
            for name, content in self._workshop.stage_files.items():
                info = tarfile.TarInfo(name)
                info.size, info.uid, info.gid, info.mode = len(content), 7, 8, 0o640
                archive.addfile(info, io.BytesIO(content))

    async def keep(self) -> str:
        """Seal the disk."""
        return self._snapshot(has_memory=False)

    async def capture(self) -> Snapshot:
        """Keep memory and disk."""
        snapshot_id = self._snapshot(has_memory=True)
        return Snapshot(snapshot_id, self._machine, _IDENTITY, ("memory",), ("disk",), 1)

    async def close(self) -> None:
        """End it."""
        await asyncio.sleep(0)
        self.is_open = False
        self._held.close()
        if self in self._workshop.open_benches:
            self._workshop.open_benches.remove(self)

    def _snapshot(self, has_memory: bool) -> str:
        self._require_open()
        if self.mounts or self.hidden:
            raise AssertionError(f"the disk is kept with what is mounted: {self.mounts}")
        snapshot_id = self._workshop.new_disk(self.did, self._machine, has_memory)
        self._held.enter_context(self._workshop.using(snapshot_id))
        return snapshot_id

    def _require_open(self) -> None:
        if not self.is_open:
            raise Internal("the build's VM has ended")


def _text(command: Command) -> str:
    """What callers call a command: the line of a shell, or its words. Of scripts of the builder it is the script."""
    argv = command.argv
    if argv[:2] != ("/bin/sh", "-c"):
        return shlex.join(argv)
    return argv[-1] if "exec /bin/sh -l -c" in argv[2] else argv[2]


def make_image(name: str, digest_digit: str = "a", layers: tuple[str, ...] = ("image-base", "image-top"), **more: Any) -> Image:
    """An image that a test can list."""
    made_of = tuple(ImageLayer(layer, "", 1000) for layer in layers)
    return Image(f"sha256:{digest_digit * 64}", (name,), Platform(), made_of, ImageConfig(**more), "s" + "0" * 20, 1, 1)


@dataclass
class FakeImages:
    """Implements `template.workshop.BaseImages`: the images it is given, by reference."""

    workshop: FakeWorkshop
    contexts: dict[str, Context] = field(default_factory=dict)
    preparation: tuple[Step, ...] = ()
    configs: dict[str, ImageConfig] = field(default_factory=dict)  # what they say about running them
    asked: list[tuple[str, Registry | None]] = field(default_factory=list)
    library: dict[str, Image] = field(default_factory=dict)  # what is on the node, by name
    registry: dict[str, Image | AgentEnvError] = field(default_factory=dict)  # what a pull brings, by name
    pulled_with: list[Registry | None] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)

    async def base(self, reference: str, registry: Registry | None, on_progress: Callable[[str], object]) -> Base:
        """A disk alone."""
        self.asked.append((reference, registry))
        if reference not in self.contexts:
            raise NotFound(f"image '{reference}' not found")
        on_progress(f"pulled {reference}")
        machine = Machine(1, 512, 8192)
        snapshot_id = self.workshop.new_disk((f"image {reference}",), machine, has_memory=False)
        context, config = self.contexts[reference], self.configs.get(reference, ImageConfig())
        return Base(f"image:{reference}", f"image {reference}", snapshot_id, machine, context, self.preparation, config)

    def account(self, reference: str, accounts: Mapping[str, Registry]) -> Registry | None:
        """That of the first part of a name that has several."""
        return accounts.get(reference.partition("/")[0] if "/" in reference else "docker.io")

    async def empty(self) -> Base:
        """A disk with nothing on it."""
        machine = Machine(1, 512, 8192)
        return Base("empty", "scratch", self.workshop.new_disk((), machine, has_memory=False), machine, Context("root", "/"))

    def all(self) -> list[Image]:
        """Every image."""
        return list(self.library.values())

    def find(self, text: str) -> Image:
        """By name or digest."""
        found = [image for name, image in self.library.items() if text in (name, image.digest)]
        if not found:
            raise NotFound(f"image '{text}' is not on this node", "`aenv images` lists those there are")
        return found[0]

    async def remove(self, text: str) -> Image:
        """Forget it."""
        return self.library.pop(self.find(text).names[0])

    async def pull(self, text: str, account: Registry | None = None, progress: Progress = no_progress) -> Image:
        """In two steps that can be watched; what the registry has is an image or an error, the latter after the first step."""
        self.pulled_with.append(account)
        if text not in self.registry:
            raise NotFound(f"image '{text}': manifest unknown", "see that name and tag are right")
        progress(f"pull {text} (bytes)", 0, 2000)
        await asyncio.sleep(0)
        found = self.registry[text]
        if isinstance(found, AgentEnvError):
            raise found
        progress(f"pull {text} (bytes)", 2000, 2000)
        self.library[text] = found
        return found

    async def receive(self, name: str, chunks: AsyncIterator[bytes], progress: Progress = no_progress) -> Image:
        """Keep the bytes."""
        self.received.append(b"".join([chunk async for chunk in chunks]))
        progress("read the archive", None, None)
        self.library[name] = make_image(name)
        return self.library[name]
