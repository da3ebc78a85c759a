"""Modes of --chmod: what they make of a mode is what coreutils' chmod makes of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.core.errors import InvalidInput
from agentenv.template.dockerfile.modes import apply_mode, check_mode

LETTERS = st.one_of(st.sampled_from("ugo"), st.text("rwxXst", max_size=4))
CHANGES = st.lists(st.tuples(st.sampled_from("+-="), LETTERS).map("".join), min_size=1, max_size=2).map("".join)
CLAUSES = st.tuples(st.text("ugoa", max_size=3), CHANGES).map("".join)
TEXTS = st.lists(CLAUSES, min_size=1, max_size=3).map(",".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.integers(0, 0o7777), st.booleans())
def test_as_chmod_does_it(tmp_path: Path, text: str, mode: int, is_folder: bool):
    place = tmp_path / "place"
    if is_folder:
        place.mkdir()
    else:
        place.touch()
    try:
        place.chmod(mode)
        command = ["sh", "-c", 'umask 022; chmod -- "$1" "$2"', "sh", text, str(place)]
        subprocess.run(command, check=False, capture_output=True)  # it complains when the umask keeps something, and does it
        expected = place.stat().st_mode & 0o7777
    finally:
        os.rmdir(place) if is_folder else place.unlink()  # noqa: PTH106
    assert apply_mode(check_mode(text), mode, is_folder) == expected


@pytest.mark.parametrize(("text", "mode"), [("755", 0o755), ("0644", 0o644), ("4711", 0o4711), ("0", 0)])
def test_octal(text: str, mode: int):
    assert apply_mode(check_mode(text), 0o1234, False) == mode


@pytest.mark.parametrize("text", ["", "8", "77777", "u", "+q", "u+x,", ",u+x", "u=rw go=r", "z=r", "u=rg"])
def test_no_modes(text: str):
    with pytest.raises(InvalidInput, match="neither octal nor symbolic"):
        check_mode(text)
