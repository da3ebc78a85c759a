"""The programs of `make` that no other test runs whole: each still finds what it uses of the product."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "tools", ROOT / "tests" / "bench")
BUILD_HOOK = "hatch_build.py"  # runs where the wheel is built, beside the library it extends
SCRIPTS = [path for folder in FOLDERS for path in sorted(folder.glob("*.py")) if path.name != BUILD_HOOK]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.parent.name}/{script.name}")
def test_it_can_be_loaded(script: Path):
    code = f"import sys; sys.path[:0] = {[str(folder) for folder in FOLDERS]}; import {script.stem}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "it does its work when it is only loaded"
