"""A template pushed to a real registry, forgotten, and started from there: the guest runs while its disk is still elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox, Template
from e2e_node import Node
from registry_rig import RealRegistry, real_registry

NAME = "e2e-lazy"
NOISE_BYTES = 64 << 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "plain") as registry:
        yield registry


@pytest.fixture(scope="module")
def lazy_node(node: Node, place: RealRegistry) -> Iterator[Node]:
    """The node, told that the registry has no TLS, and to leave layers where they are."""
    more = {"AENV_IMAGES_INSECURE_REGISTRIES": json.dumps([place.host]), "AENV_IMAGES_DOWNLOAD_MB_PER_S": "0"}
    node.aenv("down", timeout=300)
    node.environment.update(more)
    node.up()
    yield node
    for name in more:
        node.environment.pop(name)
    node.aenv("down", timeout=300)
    node.up()


def build(node: Node, template: Any, name: str) -> None:
    Template.build(template, name, **node.options)


def figures(node: Node) -> dict[str, Any]:
    transport = httpx.HTTPTransport(uds=str(node.run / "blockd.sock"))
    with httpx.Client(transport=transport, base_url="http://blockd", timeout=10) as blockd:
        return dict(blockd.get("/v1/remotes").raise_for_status().json())


@pytest.mark.timeout(900)
def test_a_pushed_template_starts_from_the_registry(lazy_node: Node, place: RealRegistry, tmp_path: Path):
    node, reference = lazy_node, f"{place.host}/e2e/lazy:1"
    noise = f"head -c {NOISE_BYTES} /dev/urandom > /opt/noise; sha256sum /opt/noise > /opt/noise.sum"
    build(node, Template().from_template("base").set_user("root").run_cmd(noise).set_envs({"FROM": "the image"}), NAME)
    pushed = json.loads(node.aenv("image", "push", NAME, reference, "--json", timeout=600).stdout)
    assert pushed["sizeBytes"] > NOISE_BYTES
    again = json.loads(node.aenv("image", "push", NAME, reference, "--json", timeout=600).stdout)
    assert again["digest"] == pushed["digest"]
    node.aenv("template", "delete", "--yes", NAME)
    before = figures(node)["cache"]["used_bytes"]  # the cache outlives runs of this test
    begun = time.monotonic()
    build(node, Template().from_image(reference).run_cmd("test -s /opt/noise.sum"), NAME)
    print(f"from the registry in {time.monotonic() - begun:.1f} s")
    cache = figures(node)["cache"]
    assert 0 < cache["used_bytes"] - before < pushed["sizeBytes"] / 2, f"{cache} of {pushed['sizeBytes']}, {before} before"
    sandbox = Sandbox.create(NAME, timeout=600, **node.options)
    try:
        assert sandbox.commands.run("echo $FROM").stdout.strip() == "the image"
        # All of it comes, right, when it is asked for.
        assert sandbox.commands.run("sha256sum -c /opt/noise.sum", timeout=300).stdout.strip() == "/opt/noise: OK"
        assert figures(node)["cache"]["used_bytes"] - before > NOISE_BYTES
        sandbox.commands.run("echo mine > /opt/mine")
        sandbox.pause()
        resumed = sandbox.connect(timeout=600)
        assert resumed.commands.run("cat /opt/mine").stdout.strip() == "mine"
    finally:
        sandbox.kill()
        node.aenv("template", "delete", "--yes", NAME)
        node.aenv("image", "remove", reference)
