"""The page "From image to template": its commands, as written, in one shell."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from e2e_node import Node

PAGE = Path(__file__).parents[2] / "docs" / "from-image-to-template.md"
TEMPLATES = ("plain", "hello")
PROGRAMS = ("sh", "cat", "chmod", "echo", "id", "ls", "mkdir", "pwd", "sed", "sleep", "test", "touch")


def commands() -> str:
    """The indented blocks of the page."""
    lines = PAGE.read_text().splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    ") or not line) + "\n"


@pytest.fixture
def debian(node: Node, tmp_path: Path) -> Iterator[None]:
    """What stands in for the image: a root file system under its name, so that no registry is asked."""
    path = tmp_path / "root.tar"
    busybox = Path("/usr/bin/busybox")
    assert busybox.is_file(), "these tests need busybox-static: `tools/setup.sh tests`"
    with tarfile.open(path, "w") as archive:
        for name, content, mode in (("bin/busybox", busybox.read_bytes(), 0o755), ("etc/os-release", b"NAME=stand-in\n", 0o644)):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            archive.addfile(info, BytesIO(content))
        for name in PROGRAMS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    node.aenv("image", "import", str(path), "debian:12")
    yield
    for sandbox in json.loads(node.aenv("list", "--json").stdout):
        if any(sandbox.get("alias", "").endswith(name) for name in TEMPLATES):
            node.aenv("kill", sandbox["sandboxID"], check=False)
    for name in TEMPLATES:
        node.aenv("template", "delete", name, "--yes", check=False)
    node.aenv("image", "remove", "debian:12", check=False)


def test_the_commands_of_the_page(node: Node, debian: None, tmp_path: Path):
    environment = node.environment | {"PATH": f"{Path(sys.executable).parent}:{node.environment['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    said = done.stdout.splitlines()
    assert said[0] == "local/plain"
    assert "NAME=stand-in" in said
    assert said.count("local/hello") == 1
    assert "local/hello:v2" in said
    greeting = said.index("welcome from root")
    assert said[greeting + 1 : greeting + 3] == ["remade by root in /srv", "/tmp/started"]
    assert said[-1].split()[-2:] != []
    assert any(line.startswith("BUILD") for line in said), "the builds are listed"
