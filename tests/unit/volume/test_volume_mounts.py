"""What a caller may ask to have mounted where."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.core.errors import InvalidInput
from agentenv.core.model import VolumeMount
from agentenv.testing.fake_orchestrator import ManualClock
from agentenv.testing.fake_store import MemoryShelf
from agentenv.volume.mounts import MOUNTS_MAX, resolve
from agentenv.volume.registry import Volumes


@pytest.fixture
async def volumes(tmp_path: Path) -> Volumes:
    volumes = Volumes(MemoryShelf("volume_id"), tmp_path / "volumes", ManualClock())
    await volumes.create("data")
    return volumes


@pytest.mark.parametrize("path", ["/mnt", "/home/user/my data", "/mnt/ü", "/runner", "/...", "/procs/x", "/run/data"])
async def test_good_paths(volumes: Volumes, path: str):
    volume = volumes.all()[0]
    assert resolve(volumes, [("data", path)]) == (VolumeMount(volume.volume_id, "data", path),)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "absolute"),
        ("mnt", "absolute"),
        ("./mnt", "absolute"),
        ("/mnt/", "slashes"),
        ("//mnt", "slashes"),
        ("/mnt//a", "slashes"),
        ("/mnt/../etc", "slashes"),
        ("/.", "slashes"),
        ("/", "system"),
        ("/proc", "system"),
        ("/sys/x", "system"),
        ("/dev/shm", "system"),
        ("/run", "system"),
        ("/a\0b", "NUL"),
        ("/" + "n" * 1024, "bytes"),
    ],
)
async def test_bad_paths(volumes: Volumes, path: str, reason: str):
    with pytest.raises(InvalidInput, match=reason):
        resolve(volumes, [("data", path)])


async def test_everything_that_is_wrong_is_said_at_once(volumes: Volumes):
    with pytest.raises(InvalidInput) as caught:
        resolve(volumes, [("none", "/a"), ("data", "b"), ("data", "/a"), ("data", "/c")])
    assert caught.value.message == (
        "invalid mounts:\n\t- volume mount #0: volume 'none' not found\n\t- volume mount #1: path must be absolute"
        "\n\t- volume mount #2: path '/a' is used twice"
    )


async def test_their_number_has_a_limit(volumes: Volumes):
    asked = [("data", f"/{number}") for number in range(MOUNTS_MAX + 1)]
    assert len(resolve(volumes, asked[:-1])) == MOUNTS_MAX
    with pytest.raises(InvalidInput, match="more than"):
        resolve(volumes, asked)
