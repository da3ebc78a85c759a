"""One agent per test module for what does not change it, one per test for what does."""

import os
from pathlib import Path

import pytest
from envd_rig import Envd, can_make_spaces, find_binary


@pytest.fixture(scope="session")
def binary():
    path = find_binary()
    if path is None:
        pytest.skip("envd is not built: cargo build --manifest-path native/Cargo.toml -p envd")
    if not can_make_spaces():
        pytest.skip("needs root and mount namespaces")
    return path


@pytest.fixture(scope="module")
def envd(binary):
    running = Envd(binary, "--allow-init-from", "any")
    yield running
    running.stop()


@pytest.fixture
def fresh(binary):
    running = Envd(binary, "--allow-init-from", "any")
    yield running
    running.stop()


@pytest.fixture
def cgrouped(binary, tmp_path):
    """An agent with a cgroup2 folder, as in a guest."""
    roots = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[2] == "cgroup2"]
    if not roots:
        pytest.skip("no cgroup2 hierarchy")
    folder = Path(roots[0]) / f"envd-test-{os.getpid()}-{tmp_path.name}"
    running = Envd(binary, "--allow-init-from", "any", "--cgroup", str(folder))
    running.cgroup = folder
    yield running
    running.stop()
    for group in [*folder.iterdir(), folder]:
        if group.is_dir():
            group.rmdir()
