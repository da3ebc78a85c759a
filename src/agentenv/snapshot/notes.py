"""Notes about layers that nobody writes any more: how a look finds that a file is not what it was.

Beside a layer lies `<id>.sealed`: `SIZE_BYTES CHANGED_NS WRITTEN`. The last word is `-` once the layer is known to be on the disk. Until
then it is the id of the machine's boot in which it was made: after a crash of the machine such a file may hold anything, whatever its size.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

_log = logging.getLogger(__name__)
_SUFFIX = ".sealed"
_ON_DISK = "-"
_OLD_S = 60.0  # the kernel has written such a file by itself, as a rule: to make sure takes no time


class Notes:
    """The notes in the folder of a layer store. `data` names the file of a layer."""

    def __init__(self, folder: Path, boot_id: str = "") -> None:
        self._folder = folder
        self._boot_id = boot_id or Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._unwritten: dict[str, float] | None = None  # layers sealed in this boot, and when by the monotonic clock; None: not looked yet

    def add(self, layer_id: str, data: Path) -> None:
        """Note what a file is from now on, unless that is noted. One that cannot be noted is checked less. Blocks."""
        try:
            if self._note(layer_id).exists():
                return
            is_old = time.time() - data.stat().st_mtime > _OLD_S
            replace_note(self._note(layer_id), f"{_stamp(data)} {self._boot_id}")
            if is_old:
                self._put_on_disk(layer_id, data)
        except OSError as error:
            _log.warning("the state of layer %s could not be noted: %s", layer_id, error)
            return
        if self._unwritten is not None and not is_old:
            self._unwritten[layer_id] = time.monotonic()

    def damage(self, layer_id: str, data: Path) -> str:
        """What is wrong with a file; empty when it is as noted. Blocks."""
        try:
            found = _stamp(data)
        except FileNotFoundError:
            return f"{data} is missing"
        if (noted := self._read(layer_id)) is None:
            return ""
        size, changed, written = noted
        if not size:
            return f"the machine went down before {data} was written out: what is noted of it is not whole"
        if found != f"{size} {changed}":
            found_size, found_changed = found.split()
            if found_size != size:
                return f"{data} has {found_size} bytes instead of {size}"
            return f"{data} was changed at {found_changed} ns, it was sealed at {changed} ns"
        if written not in (_ON_DISK, self._boot_id):
            note = self._note(layer_id)
            return f"the machine went down before {data} was written out (if it did so in good order, remove {note})"
        return ""

    def remove(self, layer_id: str) -> None:
        """The file is to be another one."""
        self._note(layer_id).unlink(missing_ok=True)

    def write_out(self, age_s: float, data: Iterable[tuple[str, Path]]) -> int:
        """Put layers that were sealed at least `age_s` ago on the disk, and note that; how many. `data` are all there are. Blocks.

        The kernel has written most of them by itself when they have some age; those that are gone by then cost nothing.
        """
        files, now_s = dict(data), time.monotonic()
        if self._unwritten is None:  # of earlier servers, too
            noted = {layer_id: self._read(layer_id) for layer_id in files}
            self._unwritten = {layer_id: 0.0 for layer_id, words in noted.items() if words is not None and words[2] == self._boot_id}
        due = [layer_id for layer_id, sealed_s in self._unwritten.items() if sealed_s + age_s <= now_s]
        for layer_id in due:
            if layer_id in files:
                self._put_on_disk(layer_id, files[layer_id])
            self._unwritten.pop(layer_id, None)
        return len(due)

    def _put_on_disk(self, layer_id: str, data: Path) -> None:
        noted = self._read(layer_id)
        if noted is None:
            return
        with contextlib.suppress(FileNotFoundError):
            file = os.open(data, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
            replace_note(self._note(layer_id), f"{noted[0]} {noted[1]} {_ON_DISK}")

    def _read(self, layer_id: str) -> tuple[str, str, str] | None:
        """Size, time and last word; None when there is no note, empty words when it is not whole."""
        try:
            words = self._note(layer_id).read_bytes().decode(errors="replace").split()
        except OSError:
            return None
        if len(words) == 2:  # of a version that did not tell
            words.append(_ON_DISK)
        return (words[0], words[1], words[2]) if len(words) == 3 else ("", "", "")

    def _note(self, layer_id: str) -> Path:
        return self._folder / f"{layer_id}{_SUFFIX}"


def replace_note(note: Path, text: str) -> None:
    """Write what lies beside a layer: a server that is killed leaves a whole note, the former one or none. Not on the disk yet. OSError."""
    fresh = note.with_name(f"{note.name}.new")  # goes with its layer, should it stay behind
    fresh.write_text(text)
    fresh.replace(note)


def _stamp(data: Path) -> str:
    facts = data.stat()
    return f"{facts.st_size} {facts.st_mtime_ns}"
