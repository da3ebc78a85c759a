"""The volumes of a node: their names, their tokens and their folders.

Invariants: a name belongs to one volume; a recorded volume has its folder; `open` finishes what a crash broke off.
Folders are `<home>/volumes/<id>`, below a folder that only root may enter. A folder with content that no record explains
is left alone: it may be all that is left of a node whose database was lost.

A volume may be deleted while sandboxes mount it, as on the hosted service: their programs then get "stale file handle".
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from pathlib import Path

from agentenv.core.clock import Clock
from agentenv.core.errors import AgentEnvError, InvalidInput, LimitReached, NotFound, Unauthenticated
from agentenv.core.ids import new_token, new_volume_id, same_secret
from agentenv.core.model import Volume
from agentenv.core.tasks import wait_done
from agentenv.store.shelf import Shelf
from agentenv.volume.tree import DEFAULT_GID, DEFAULT_UID, Attributes, Tree

VOLUMES_MAX = 10_000  # a loop that makes them, not a need
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_ROOT_MODE = 0o777  # whoever a program runs as in its own guest, the volume is its to write
_DOOMED = ".deleted-"


class Volumes:
    """All volumes of one node; `open` it once."""

    def __init__(self, shelf: Shelf[Volume], folder: Path, clock: Clock) -> None:
        self._shelf = shelf
        self._folder = folder
        self._clock = clock
        self._changing = asyncio.Lock()  # names stay unique
        self._removals: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Finish deletions and creations that a crash broke off."""
        for volume_id in await asyncio.to_thread(_doomed, self._folder):
            await self._shelf.remove(volume_id)
            self._remove_soon(volume_id)
        await asyncio.to_thread(_tidy, self._folder, {volume.volume_id for volume in self._shelf.all()})

    async def close(self) -> None:
        """Wait for the removal of deleted trees."""
        while self._removals:
            await asyncio.wait(set(self._removals))

    def all(self) -> list[Volume]:
        """Every volume, oldest first."""
        return self._shelf.all()

    def get(self, volume_id: str) -> Volume:
        """A volume by id. NotFound."""
        volume = self._shelf.get(volume_id)
        if volume is None:
            raise NotFound(f"volume '{volume_id[:80]}' not found", "`aenv volume ls` lists them")
        return volume

    def named(self, name: str) -> Volume | None:
        """A volume by name, or None."""
        return next((volume for volume in self._shelf.all() if volume.name == name), None)

    async def create(self, name: str) -> Volume:
        """A new empty volume. InvalidInput: no such name possible, or taken. LimitReached."""
        if not _NAME.fullmatch(name):
            raise InvalidInput("Invalid volume name", "use 1 to 128 letters, digits, - and _")
        async with self._changing:
            if self.named(name) is not None:
                raise InvalidInput(f"Volume with name '{name}' already exists", "delete it, or choose another name")
            if len(self._shelf.all()) >= VOLUMES_MAX:
                raise LimitReached(f"the node has {VOLUMES_MAX} volumes", "delete some that nobody needs")
            volume = Volume(new_volume_id(), name, new_token(), self._clock.now_ms())
            await asyncio.to_thread(_make_root, self.folder(volume.volume_id))
            await self._shelf.put(volume)
        return volume

    async def delete(self, volume_id: str) -> None:
        """Delete a volume with all it holds, mounted or not. NotFound. The space is freed in the background."""
        deletion = asyncio.ensure_future(self._delete(volume_id))
        cancelled = await wait_done(deletion)
        deletion.result()
        self._remove_soon(volume_id)
        if cancelled is not None:
            raise cancelled

    async def _delete(self, volume_id: str) -> None:
        async with self._changing:
            folder, doomed = self.folder(self.get(volume_id).volume_id), self._doomed_folder(volume_id)
            await asyncio.to_thread(folder.rename, doomed)
            try:
                await self._shelf.remove(volume_id)
            except AgentEnvError:
                await asyncio.to_thread(doomed.rename, folder)
                raise

    def _remove_soon(self, volume_id: str) -> None:
        work = asyncio.to_thread(shutil.rmtree, self._doomed_folder(volume_id), True)
        removal = asyncio.create_task(work, name=f"remove volume {volume_id}")
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    def _doomed_folder(self, volume_id: str) -> Path:
        return self._folder / f"{_DOOMED}{volume_id}"

    def folder(self, volume_id: str) -> Path:
        """The root of a volume's tree."""
        return self._folder / volume_id

    def content(self, volume_id: str, token: str) -> Tree:
        """The tree of a volume, for who holds its token. NotFound, Unauthenticated."""
        volume = self.get(volume_id)
        if not same_secret(volume.token, token):
            raise Unauthenticated("the volume token is not valid", "take it from the volume: Volume.connect, or GET /volumes/{id}")
        return Tree(self.folder(volume_id))


def _make_root(folder: Path) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    Tree(folder).update("/", Attributes(DEFAULT_UID, DEFAULT_GID, _ROOT_MODE))


def _doomed(folder: Path) -> list[str]:
    return [entry.name.removeprefix(_DOOMED) for entry in folder.glob(f"{_DOOMED}*")]


def _tidy(folder: Path, known: set[str]) -> None:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name not in known:
            with contextlib.suppress(OSError):  # only an empty one, of a creation that was broken off
                entry.rmdir()
    for volume_id in known:
        if not (folder / volume_id).is_dir():
            _make_root(folder / volume_id)
