"""The page "From image to template": its commands, as written, in one shell."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_node import Node

PAGE = Path(__file__).parents[2] / "docs" / "from-image-to-template.md"
TEMPLATES = ("plain", "hello")


def commands() -> str:
    """The indented blocks of the page."""
    lines = PAGE.read_text().splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    ") or not line) + "\n"


@pytest.fixture
def forgets(node: Node) -> Iterator[None]:
    yield
    for sandbox in json.loads(node.aenv("list", "--json").stdout):
        if any(sandbox.get("alias", "").endswith(name) for name in TEMPLATES):
            node.aenv("kill", sandbox["sandboxID"], check=False)
    for name in TEMPLATES:
        node.aenv("template", "delete", name, "--yes", check=False)


def test_the_commands_of_the_page(node: Node, debian: str, forgets: None, tmp_path: Path):
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
    listed = next(at for at, line in enumerate(said) if line.startswith("BUILD"))
    assert [line.split()[1:4] for line in said[listed + 1 : listed + 4]] == [
        ["hello", "default", "ready"],
        ["hello", "v2", "ready"],
        ["hello", "default", "ready"],
    ]
