"""A build's log: its bounds, its file, and lines out of pieces of output."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.core.errors import StorageFull
from agentenv.template import build_log
from agentenv.template.build_log import BuildLog, LineCutter
from agentenv.testing.fake_orchestrator import ManualClock


def test_the_file_says_what_was_said(tmp_path: Path):
    log = BuildLog(tmp_path / "logs" / "a.jsonl", ManualClock())
    log.add("FROM base", "base")
    log.output("x\udcff", "1", "warn")
    log.close()
    log.close()
    entries = build_log.read(tmp_path / "logs" / "a.jsonl")
    assert [(entry.message, entry.step, entry.level) for entry in entries] == [("FROM base", "base", "info"), ("x?", "1", "warn")]
    assert [entry.level for entry in build_log.at_least(entries, "warn")] == ["warn"]


def test_a_cut_line_is_left_out_and_no_file_is_no_log(tmp_path: Path):
    log = BuildLog(tmp_path / "a", ManualClock())
    log.add("whole")
    log.close()
    with (tmp_path / "a").open("a") as file:
        file.write('{"timestamp_ms": 1, "mess')
    assert [entry.message for entry in build_log.read(tmp_path / "a")] == ["whole"]
    assert build_log.read(tmp_path / "nothing") == []


def test_output_is_bounded_and_the_last_words_fit(tmp_path: Path):
    log = BuildLog(tmp_path / "a", ManualClock())
    for number in range(build_log.ENTRIES_MAX + 500):
        log.output(f"line {number}", "1")
    log.add("y" * 10_000, "1", "error")
    assert len(log.entries) < build_log.ENTRIES_MAX
    assert "left out" in log.entries[-2].message
    assert log.entries[-1].message == "y" * build_log.MESSAGE_MAX_CHARS
    for _ in range(500):
        log.add("z")
    assert len(log.entries) == build_log.ENTRIES_MAX == len(build_log.read(tmp_path / "a"))


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFull):
        BuildLog(tmp_path / "file" / "a", ManualClock())


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\nc"], ["ab", "c"]),
        ([b"\xc3", b"\xa4\n"], ["ä"]),
        ([b"10%\r50%\r100%\n"], ["100%"]),
        ([b"a\r\nb\r\n"], ["a", "b"]),
        ([b"\n\n"], ["", ""]),
        ([], []),
    ],
)
def test_lines(pieces: list[bytes], lines: list[str]):
    cutter = LineCutter()
    assert [line for piece in pieces for line in cutter.lines(piece)] + cutter.rest() == lines


def test_a_line_without_an_end_is_cut():
    cutter = LineCutter()
    got = [line for _ in range(100) for line in cutter.lines(b"x" * 1000)]
    assert len(got) > 5
    assert sum(map(len, got)) + sum(map(len, cutter.rest())) == 100_000
