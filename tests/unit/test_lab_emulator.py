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


def write(source: Path, texts: list[tuple[str, str]]) -> None:
    """Files of these lines, each of a file's name and a text."""
    for name, text in texts:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        with (source / name).open("a") as file:
            file.write(f"  {text}\n")


def test_each_place_is_changed_once(emulator: Any, tmp_path: Path) -> None:
    write(tmp_path / "before", [(name, old) for name, old, _ in emulator._MENDED])
    write(tmp_path / "after", [(name, new) for name, _, new in emulator._MENDED])
    emulator._mend(tmp_path / "before")
    for name, _, _ in emulator._MENDED:
        assert (tmp_path / "before" / name).read_text() == (tmp_path / "after" / name).read_text()


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("place", range(4))
def test_a_source_it_was_not_written_for_is_refused(emulator: Any, tmp_path: Path, place: int, times: int) -> None:
    write(tmp_path, [(name, "") for name, _, _ in emulator._MENDED])
    write(tmp_path, [(name, old) for n, (name, old, _) in enumerate(emulator._MENDED) for _ in range(times if n == place else 1)])
    with pytest.raises(SystemExit, match=f"is {times} times in {emulator._MENDED[place][0]}"):
        emulator._mend(tmp_path)


def test_what_a_step_says_is_told_when_it_fails(emulator: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="sh ended with 3:\nno such option"):
        emulator._run(["sh", "-c", "echo no such option >&2; exit 3"], tmp_path)
    with pytest.raises(SystemExit, match=r"tools/setup\.sh lab"):
        emulator._run(["no-such-program"], tmp_path)
