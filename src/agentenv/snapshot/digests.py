"""Checksums of layers that nobody writes any more: how bit rot is found, by reading all of a file.

Beside a layer lies `<id>.sha256`: the checksum in hex, and behind it `damaged` while the file has another one. The note's time is
that of the last look. A layer whose name has its checksum (a blob of an overlaybd-native image) is compared with that; of any other
the first look notes what later ones compare with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentenv.snapshot.notes import replace_note

_SUFFIX = ".sha256"
_DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Digest:
    """What is noted of a layer."""

    sha256: str
    is_damaged: bool
    looked_at_s: float


class Digests:
    """The notes in the folder of a layer store. Blocks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, layer_id: str) -> Digest | None:
        """None when nothing was noted, or a crash has torn the note."""
        note = self._note(layer_id)
        try:
            words, looked_at_s = note.read_text(errors="replace").split(), note.stat().st_mtime
        except OSError:
            return None
        if not words or len(words[0]) != 64:
            return None
        return Digest(words[0], words[1:] == [_DAMAGED], looked_at_s)

    def put(self, layer_id: str, sha256: str, *, is_damaged: bool = False) -> None:
        """Note the outcome of a look. OSError."""
        replace_note(self._note(layer_id), f"{sha256} {_DAMAGED}\n" if is_damaged else f"{sha256}\n")

    def remove(self, layer_id: str) -> None:
        """The layer is made anew."""
        self._note(layer_id).unlink(missing_ok=True)

    def _note(self, layer_id: str) -> Path:
        return self._folder / f"{layer_id}{_SUFFIX}"
