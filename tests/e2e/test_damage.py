"""Files of a paused sandbox that are damaged or gone are found and named, and nothing is started from them (cases C31, D13)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2b import SandboxException

_BLOCK = 4096  # header and trailer of a layer, which have the index before the trailer


def _cut(path: Path, size_bytes: int) -> None:
    os.truncate(path, size_bytes)


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x40]))


#: By name: what is done to a file of that size.
DAMAGES: dict[str, Callable[[Path, int], None]] = {
    "gone": lambda path, _: path.unlink(),
    "empty": lambda path, _: _cut(path, 0),
    "cut in half": lambda path, size: _cut(path, size // 2),
    "without its last byte": lambda path, size: _cut(path, size - 1),
    "longer": lambda path, size: _cut(path, size + 1),
    "header": lambda path, _: _flip(path, 20),
    "data": lambda path, size: _flip(path, size // 2),
    "index": lambda path, size: _flip(path, max(0, size - _BLOCK - 8)),
    "trailer": lambda path, size: _flip(path, max(0, size - _BLOCK + 40)),
    "last byte": lambda path, size: _flip(path, size - 1),
}


def _files(node: Any, sandbox_id: str) -> dict[str, Path]:
    """The newest layers and the device state of a paused sandbox: those that nobody else has."""
    layers = json.loads(node.aenv("layers", "--json").stdout)
    own = [layer["layerID"] for layer in layers if layer["users"] == [f"sandbox {sandbox_id}"]]
    paths = sorted((node.home / "layers" / f"{layer_id}.lsmt" for layer_id in own), key=lambda path: path.stat().st_size)
    states = sorted((node.home / "snapshots").glob("*/vm.state"), key=lambda path: path.stat().st_mtime_ns)
    assert len(paths) == 2, "a memory layer and a disk layer"
    return {"disk": paths[0], "memory": paths[1], "device state": states[-1]}


def test_every_kind_of_damage_is_named_and_repaired_files_are_used_again(node, sandbox, tmp_path):
    sandbox.files.write("/home/user/kept", "x" * 200_000)
    sandbox.commands.run("sync")
    sandbox.pause()
    for kind, path in _files(node, sandbox.sandbox_id).items():
        copy = tmp_path / path.name
        shutil.copy2(path, copy)
        for name, damage in DAMAGES.items():
            damage(path, path.stat().st_size)
            with pytest.raises(SandboxException) as caught:
                sandbox.connect(timeout=600)
            assert path.name in str(caught.value), f"{kind}, {name}: {caught.value}"
            shutil.copy2(copy, path)
    assert sandbox.get_info().state.value == "paused"
    sandbox.connect(timeout=600)
    assert sandbox.files.read("/home/user/kept") == "x" * 200_000


@pytest.mark.parametrize("what", ["layers", "device state"])
def test_a_sandbox_without_its_files_can_be_killed(node, sandbox, what):
    sandbox.pause()
    files = _files(node, sandbox.sandbox_id)
    for path in (files["device state"],) if what == "device state" else (files["disk"], files["memory"]):
        path.unlink()
    with pytest.raises(SandboxException):
        sandbox.connect(timeout=600)
    assert sandbox.kill() is True
    assert sandbox.kill() is False
