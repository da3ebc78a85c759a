"""The built-in templates, each described by data: what is in its file system, and what runs in its guest at the capture.

Owns the recipes only; `rootfs` makes the file system and `base` boots, starts, warms and captures. Invariant: everything
that decides what is in a template is a field here, so that another recipe is another digest and the template is made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentenv.core import built_in
from agentenv.core.model import Service
from agentenv.guest.kernel import GUEST_SETTINGS
from agentenv.template.rootfs import GuestFile


@dataclass(frozen=True, slots=True)
class Recipe:
    """One built-in template."""

    name: str
    packages: tuple[str, ...] = ()
    """Debian packages beside those that every root file system has."""
    placeholders: tuple[str, ...] = ()
    """Dependencies of those, `name=version`, that are left out: see `rootfs.ensure_rootfs`."""
    commands: tuple[str, ...] = ()
    """Shell commands run as root in the new root file system, after packages and files are in it."""
    start: str = ""
    """A shell command that lets a service run on in the booted guest; it must return at once. Part of the snapshot."""
    ready: str = ""
    """A shell command that succeeds once the service answers; repeated until then."""
    warm_up: str = ""
    """Run before the capture. Each line is something that nearly every session does first; the pages it reads are then in the
    snapshot's memory and shared by all sandboxes."""
    min_memory_mb: int = 0
    """Guest memory is never less than this, whatever the node's setting."""
    files: Callable[[], tuple[GuestFile, ...]] = tuple
    """Files put into the root file system; read when they are needed."""

    @property
    def service(self) -> Service | None:
        """What sandboxes start again when they boot."""
        return Service(self.start, self.ready) if self.start else None

    @property
    def guest_digest(self) -> str:
        """A short name for what runs in the guest; the file system has a digest of its own."""
        run = json.dumps([GUEST_SETTINGS, self.start, self.ready, self.warm_up])
        return hashlib.sha256(run.encode()).hexdigest()[:16]


_PIP_WORKS = "rm -f /usr/lib/python3*/EXTERNALLY-MANAGED"
"""The machine is its user's own: `pip install` need not be told so each time."""

BASE = Recipe(
    name=built_in.BASE,
    commands=(_PIP_WORKS,),
    warm_up="""
su - user -c 'true' ; /bin/bash -l -c 'ls -la /home/user; cat /etc/os-release; env' >/dev/null
python3 -c 'import json, os, sys, subprocess, socket, http.server' ; git --version ; curl --version >/dev/null
""",
)

_INTERPRETER_FOLDER = "/usr/local/lib/agentenv"
_INTERPRETER = f"{_INTERPRETER_FOLDER}/aenv_interpreter"


def _interpreter_files() -> tuple[GuestFile, ...]:
    """The package `interpreter` as it is in the guest."""
    source = Path(__file__).parents[1] / "interpreter"
    return tuple(
        GuestFile(f"{_INTERPRETER}/{path.name}", path.read_bytes(), 0o755 if path.name == "run.sh" else 0o644)
        for path in sorted(source.iterdir())
        if path.suffix in (".py", ".js", ".sh")
    )


CODE_INTERPRETER = Recipe(
    name=built_in.CODE_INTERPRETER,
    packages=(
        "esbuild",
        "node-acorn",
        "python3-ipython",
        "python3-matplotlib",
        "python3-numpy",
        "python3-openpyxl",
        "python3-pandas",
        "python3-pil",
        "python3-requests",
        "python3-tornado",
    ),
    placeholders=(
        "python3-pythran=0+placeholder",  # scipy was compiled with it; it brings two compilers and boost, 480 MB
        "unicode-data=14.0.0+placeholder",  # text files that fonttools does not read, 36 MB
    ),
    files=_interpreter_files,
    commands=(
        _PIP_WORKS,
        f"python3 -m compileall -q {_INTERPRETER_FOLDER}",
        "chmod 755 /root",  # contexts may work there, as clients' suites do
        "su - user -c 'python3 -c \"import matplotlib.pyplot\"'",  # finds the fonts, once
    ),
    start=f"setsid {_INTERPRETER}/run.sh </dev/null >/var/log/code-interpreter.log 2>&1 &",
    ready="curl -sf -m 20 http://127.0.0.1:49999/health",
    warm_up=f"{BASE.warm_up}\npython3 {_INTERPRETER}/warm_up.py\n",
    min_memory_mb=1024,
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (BASE, CODE_INTERPRETER)}
