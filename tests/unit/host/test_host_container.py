"""The recipe of the container image agrees with the tables it repeats, and with how it is said to be run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from agentenv.host.requirements import REQUIREMENTS
from agentenv.host.setup_plan import unit_text
from agentenv.template.dockerfile.document import parse
from agentenv.template.dockerfile.stages import read

PACKAGING = Path(__file__).parents[3] / "packaging"
RECIPE = (PACKAGING / "Containerfile").read_text()
PAGE = (Path(__file__).parents[3] / "docs" / "production.md").read_text()
SHELL = {"ca-certificates", "python3", "python3-venv", "tini"}
"""What only the image needs: certificates, the server's interpreter, a process 1 that reaps."""


def test_it_installs_what_a_host_gets():
    [packages] = re.findall(r'^ARG PACKAGES="(.*)"$', RECIPE, re.MULTILINE)
    assert set(packages.split()) == {entry.package for entry in REQUIREMENTS if entry.package} | SHELL


def test_our_own_builder_reads_it():
    plan = read(parse(RECIPE), {"BASE": "template://base", "PACKAGES": ""}, "")
    assert [(stage.base.kind, stage.base.name) for stage in plan.stages] == [("template", "base")]


def test_it_runs_with_the_capabilities_of_the_service():
    [bounding] = re.findall(r"^CapabilityBoundingSet=(.*)$", unit_text("agentenv.service"), re.MULTILINE)
    added = {name for words in re.findall(r"--cap-add ([A-Z_,]+)", PAGE) for name in words.split(",")}
    assert {f"CAP_{name}" for name in added} == set(bounding.split())
    assert "--privileged" not in re.sub(r"not `--privileged`", "", PAGE)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A stand-in for `aenv` that writes down what it is asked: `up` serves until `down`, or dies as often as it is told to."""
    script = tmp_path / "aenv"
    script.write_text(
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/asked
case $1 in
  up)
    echo 1 > {tmp_path}/server.pid
    if [ -s {tmp_path}/deaths ]; then rm {tmp_path}/deaths; exit 7; fi
    touch {tmp_path}/ready
    while [ -e {tmp_path}/server.pid ]; do sleep 0.05; done;;
  down) rm -f {tmp_path}/server.pid;;
  ls) exit 4;;
esac
"""
    )
    script.chmod(0o755)
    return tmp_path


def start(programs: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "AENV_NODE_RUN": str(programs)}
    node = subprocess.Popen([str(PACKAGING / "entrypoint.sh"), *arguments], env=environment)
    for _ in range(200):
        if (programs / "ready").exists():
            return node
        with pytest.raises(subprocess.TimeoutExpired):
            node.wait(0.05)
    pytest.fail("`aenv up` was not run")


def test_a_stop_pauses_the_sandboxes_first(programs):
    node = start(programs, "--port", "4000")
    node.terminate()
    assert node.wait(20) == 0
    asked = (programs / "asked").read_text().splitlines()
    assert (asked[0], asked[-1]) == ("up --port 4000", "down")


def test_a_server_that_died_is_started_again(programs):
    (programs / "deaths").write_text("once")
    node = start(programs)
    assert (programs / "asked").read_text().splitlines() == ["up", "ls", "up"]
    subprocess.run([str(programs / "aenv"), "down"], check=True)
    assert node.wait(20) == 0
