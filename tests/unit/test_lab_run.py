"""`make lab` goes on in another machine with what was left when one ended by itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SAID = """\
--- check_host: What production needs of a host is there.
    ok: check_host in 0.1 s
--- check_ublk: blockd's own tests of ublk devices: I/O, kills, limits.
    FAILED: check_ublk in 9.0 s
--- check_node: A node of our wheel.
    passed: tests/e2e/test_cases_i.py::test_i11[kill of the VMM]
    passed: tests/e2e/test_warm.py::test_one
"""


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "lab"))
    module = importlib.import_module("run")
    monkeypatch.setattr(module, "pack", lambda folder, _checks: folder / "archive")
    yield module
    for name in {"run", "inside", "payload", "emulator"} - before:
        sys.modules.pop(name, None)


def attempts(lab: Any, monkeypatch: pytest.MonkeyPatch, ends: list[int | None]) -> list[tuple[list[str], list[str]]]:
    """Each machine says SAID and then ends with a code or, None, by itself; what each was given to do, and to leave out."""
    given: list[tuple[list[str], list[str]]] = []

    def run_once(_template: str, _archive: Path, checks: list[str], heard: Any) -> int:
        given.append((checks, heard.tests()))
        heard(SAID)
        if (code := ends.pop(0)) is None:
            raise lab.LabEnded("gone")
        return code

    monkeypatch.setattr(lab, "run_once", run_once)
    return given


def test_what_was_through_is_not_done_again(lab: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = attempts(lab, monkeypatch, [None, 3])
    assert lab.run_inside("lab", []) == 3
    (first, none), (second, tests) = given
    assert none == []
    assert "check_peers" not in first, "it is to be asked for"
    assert second == [check for check in first if check != "check_host"], "what has failed is tried once more"
    assert tests == ["tests/e2e/test_cases_i.py::test_i11[kill of the VMM]", "tests/e2e/test_warm.py::test_one"]
    assert SAID in capsys.readouterr().out


def test_a_machine_that_ends_after_all_is_done_is_no_failure(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = attempts(lab, monkeypatch, [None])
    assert lab.run_inside("lab", ["check_host"]) == 0
    assert [checks for checks, _ in given] == [["check_host"]]


def test_machines_that_all_end_are_a_failure(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = attempts(lab, monkeypatch, [None] * lab.ATTEMPTS)
    assert lab.run_inside("lab", ["check_node"]) == 1
    assert len(given) == lab.ATTEMPTS


def test_an_unknown_check_is_named_with_those_there_are(lab: Any) -> None:
    with pytest.raises(SystemExit, match=r"there is no check check_nodes; there are check_host, .*check_node"):
        lab.run_inside("lab", ["check_host", "check_nodes"])
