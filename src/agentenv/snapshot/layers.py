"""The layer store: files of immutable layers, and which of them something still needs.

Invariants: a file goes only when no snapshot, no live stack and no verb under way names it; whoever makes a layer
announces it first (`new`), so the sweep never takes a file that is about to be recorded. A layer that is written no more has
a note beside it (`notes`), so that a look finds whatever was done to it, without reading it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from agentenv.block.client import Upper
from agentenv.core.ids import new_layer_id
from agentenv.snapshot.digests import Digests
from agentenv.snapshot.notes import Notes

_SUFFIX = ".lsmt"


class LayerStore:
    """Layer files below one folder, named by layer id. `boot_id`: of the machine; its own by default."""

    def __init__(self, folder: Path, boot_id: str = "") -> None:
        self._folder = folder
        self._notes = Notes(folder, boot_id)
        self.digests = Digests(folder)
        self._announced: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, layer_id: str) -> Path:
        """The data file of a layer."""
        return self._folder / f"{layer_id}{_SUFFIX}"

    def paths(self, layer_ids: Iterable[str]) -> list[Path]:
        """The data files of several layers, in order."""
        return [self.path(layer_id) for layer_id in layer_ids]

    def upper(self, layer_id: str) -> Upper:
        """The two files of a writable layer; sealing it leaves the data file as the layer's own."""
        return Upper(self.path(layer_id), self._folder / f"{layer_id}.index")

    def seal(self, layer_ids: Iterable[str]) -> None:
        """Note what the files of these layers are, unless that is noted already: from now on nobody writes them. Blocks."""
        for layer_id in layer_ids:
            self._notes.add(layer_id, self.path(layer_id))

    def damage(self, layer_ids: Iterable[str]) -> str:
        """What is wrong with the file of the first of these layers that is not as it was sealed; empty when all are. Blocks."""
        return next(filter(None, map(self._damage, layer_ids)), "")

    def _damage(self, layer_id: str) -> str:
        noted = self.digests.get(layer_id)
        if noted is not None and noted.is_damaged:
            return f"{self.path(layer_id)} is not what it was: its content has another checksum"
        return self._notes.damage(layer_id, self.path(layer_id))

    def forget(self, layer_id: str) -> None:
        """Take a damaged file away with what is noted of it: the layer is to be made anew. Blocks."""
        self._notes.remove(layer_id)
        self.digests.remove(layer_id)
        self.path(layer_id).unlink(missing_ok=True)

    def write_out(self, age_s: float = 0) -> int:
        """Put layers that were sealed at least `age_s` ago beyond a crash of the machine; how many there were. OSError. Blocks."""
        return self._notes.write_out(age_s, ((self.id_of(path), path) for path in self.files() if path.suffix == _SUFFIX))

    @staticmethod
    def id_of(path: Path) -> str:
        """The layer id of a file of this store."""
        return path.name.split(".", 1)[0]

    @contextlib.contextmanager
    def announced(self, *layer_ids: str) -> Iterator[None]:
        """Keep the sweep off these layers for the length of the body."""
        for layer_id in layer_ids:
            self._announced[layer_id] = self._announced.get(layer_id, 0) + 1
        try:
            yield
        finally:
            for layer_id in layer_ids:
                self._announced[layer_id] -= 1
                if not self._announced[layer_id]:
                    del self._announced[layer_id]

    def is_announced(self, layer_id: str) -> bool:
        """Whether someone keeps the sweep off it."""
        return layer_id in self._announced

    @staticmethod
    def new_id() -> str:
        """An id for a layer about to be made; `announced` it while it is not recorded."""
        return new_layer_id()

    def files(self) -> list[Path]:
        """Every file of the store. Blocks."""
        return list(self._folder.iterdir())

    def unneeded(self, files: Iterable[Path], referenced: set[str]) -> list[Path]:
        """Those whose layer is neither referenced nor announced.

        `files` must have been listed before the references were gathered: a layer is recorded or announced before its
        file is made, so a file in the list that nothing names by now will never be named.
        """
        return [path for path in files if (layer_id := LayerStore.id_of(path)) not in referenced and not self.is_announced(layer_id)]

    @staticmethod
    def delete(files: Iterable[Path]) -> int:
        """Delete files; returns the bytes freed. Blocks."""
        freed = 0
        for path in files:
            with contextlib.suppress(FileNotFoundError):
                freed += path.stat().st_blocks * 512
                path.unlink()
        return freed

    def sizes(self) -> dict[str, int]:
        """What the files of each layer take on disk, bytes. Blocks."""
        found: dict[str, int] = {}
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):
                layer_id = self.id_of(path)
                found[layer_id] = found.get(layer_id, 0) + path.stat().st_blocks * 512
        return found

    def used_bytes(self) -> int:
        """What the store takes on disk."""
        return sum(path.stat().st_blocks * 512 for path in self._folder.iterdir())
