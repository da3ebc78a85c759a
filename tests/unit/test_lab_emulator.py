"""What is mended in the source of the lab's QEMU, and what is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "lab"))
    yield importlib.import_module("emulator")
    for name in {"emulator", "payload"} - before:
        sys.modules.pop(name, None)


def test_each_place_is_changed_once(emulator: Any, tmp_path: Path) -> None:
    file = tmp_path / "svm_helper.c"
    file.write_text("\n".join(f"  {old}" for old, _ in emulator._MENDED))
    emulator._mend(file)
    assert file.read_text() == "\n".join(f"  {new}" for _, new in emulator._MENDED)


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("place", range(3))
def test_a_source_it_was_not_written_for_is_refused_and_left_alone(emulator: Any, tmp_path: Path, place: int, times: int) -> None:
    lines = [old for number, (old, _) in enumerate(emulator._MENDED) for _ in range(times if number == place else 1)]
    file = tmp_path / "svm_helper.c"
    file.write_text("\n".join(lines))
    with pytest.raises(SystemExit, match=f"is {times} times in svm_helper.c"):
        emulator._mend(file)
    assert file.read_text() == "\n".join(lines)


def test_what_a_step_says_is_told_when_it_fails(emulator: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="sh ended with 3:\nno such option"):
        emulator._run(["sh", "-c", "echo no such option >&2; exit 3"], tmp_path)
    with pytest.raises(SystemExit, match=r"tools/setup\.sh lab"):
        emulator._run(["no-such-program"], tmp_path)
