"""Starting, finding, restarting and ending the processes that serve volumes, in a network namespace of the test's own."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.core.errors import HostNotReady
from agentenv.core.model import Volume
from agentenv.host import native, process
from agentenv.network.layout import GATEWAY_IP
from agentenv.volume.server import VolumeServers, end_all

VOLUME = Volume("v1", "data", "the-token", 1)


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"aenvtest-{os.getpid()}"
    process.run(["ip", "netns", "add", name], 20)
    process.run(["ip", "-n", name, "-batch", "-"], 20, f"link set dev lo up\naddr add {GATEWAY_IP}/32 dev lo\n")
    yield name
    process.run(["ip", "netns", "del", name], 20)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "volumes" / "v1").mkdir(parents=True)
    yield tmp_path / "run"
    end_all(tmp_path / "run")


def make(run: Path, program: Path | None = None) -> VolumeServers:
    return VolumeServers(program or native.program("volumed"), run.parent / "volumes", run, run.parent / "volumed.log", 0)


def alive(run: Path) -> dict[str, process.ProcessId]:
    return {folder.name: found for folder, found in process.working_below(run).items()}


async def test_a_server_runs_once_and_again_when_it_died(run: Path, namespace: str):
    servers = make(run)
    assert await servers.ensure("life", namespace, [VOLUME])
    (first,) = alive(run).values()
    assert not await servers.ensure("life", namespace, [VOLUME])
    process.kill(first)
    assert await servers.ensure("life", namespace, [VOLUME])
    assert alive(run)["life"] != first
    await servers.stop("life")
    await servers.stop("life")
    assert (alive(run), list(run.iterdir())) == ({}, [])


async def test_keys_are_for_the_owner_only_and_hold_no_token(run: Path, namespace: str):
    await make(run).ensure("life", namespace, [VOLUME])
    exports = run / "life" / "exports.json"
    assert stat.S_IMODE(exports.stat().st_mode) == 0o600
    assert VOLUME.token not in exports.read_text()
    command = Path(f"/proc/{alive(run)['life'].pid}/cmdline").read_text()
    assert str(run) in command  # how it is found when it should not be there


async def test_the_next_node_server_finds_what_runs(run: Path, namespace: str):
    await make(run).ensure("kept", namespace, [VOLUME])
    kept = alive(run)["kept"]
    later = make(run)
    await later.adopt({"kept"})
    assert not await later.ensure("kept", namespace, [VOLUME])
    (run / "left over").mkdir()
    await make(run).adopt(set())
    assert (alive(run), list(run.iterdir())) == ({}, [])
    assert not process.is_alive(kept)


async def test_everything_is_ended_when_a_node_goes_down(run: Path, namespace: str):
    await make(run).ensure("life", namespace, [VOLUME])
    assert end_all(run) == 1
    assert end_all(run) == 0
    assert not run.exists()


async def test_a_server_that_cannot_run_says_why(run: Path, namespace: str):
    with pytest.raises(HostNotReady, match="cannot serve"):
        await make(run).ensure("life", namespace, [Volume("v-gone", "data", "t", 1)])
    with pytest.raises(HostNotReady, match="cannot be started"):
        await make(run, Path("/nonexistent/volumed")).ensure("life", namespace, [VOLUME])
    assert alive(run) == {}
