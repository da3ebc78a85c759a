"""Build the native programs and put them into the package (`src/agentenv/_bin`).

All are static: `envd` must run in any guest image, and the others, static, let one wheel serve every Linux
with whatever libc. Needs cargo and a C linker. Run by `make setup` and by the wheel's build hook.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = "x86_64-unknown-linux-gnu"
PROGRAMS = ("blockd", "envd", "imagefs", "volumed")
FLAGS = {"RUSTFLAGS": "-C target-feature=+crt-static"}
FOLDER = ROOT / "src" / "agentenv" / "_bin"


def build() -> list[Path]:
    """Build and install the programs; returns their paths. Exits with cargo's message when the build fails."""
    if shutil.which("cargo") is None:
        sys.exit("cargo is not installed; get Rust 1.85 or newer, by rustup or from your distribution")
    command = ["cargo", "build", "--release", "--locked", "--target", TARGET]
    for program in PROGRAMS:
        command += ["-p", program]
    if subprocess.run(command, cwd=ROOT / "native", env=os.environ | FLAGS, check=False).returncode != 0:
        sys.exit("the native programs could not be built; see cargo's messages above")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "native" / "target"))
    FOLDER.mkdir(exist_ok=True)
    installed = []
    for program in PROGRAMS:
        built, place = target / TARGET / "release" / program, FOLDER / program
        if not place.exists() or built.read_bytes() != place.read_bytes():
            fresh = place.with_suffix(".new")  # renamed over the old one, which may be running
            shutil.copy2(built, fresh)
            fresh.replace(place)
        installed.append(place)
    return installed


if __name__ == "__main__":
    for path in build():
        print(path.relative_to(ROOT))
