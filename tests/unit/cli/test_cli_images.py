"""`aenv image`, `aenv images` and `aenv layers` against a real API."""

from __future__ import annotations

import io
import json
import tarfile

import pytest
from aenv_runner import Aenv
from click.testing import CliRunner

from agentenv.cli.main import cli
from agentenv.core.builds import Registry
from agentenv.core.errors import PermissionDenied
from agentenv.orchestrator.verify import Verified
from agentenv.testing.fake_workshop import make_image


@pytest.fixture
def images(aenv: Aenv):
    found = aenv.server.orchestrator.images
    found.registry["debian"] = make_image("debian", env=("A=1",), user="app")
    found.registry["other"] = make_image("other", "b", layers=("image-base", "image-other"))
    return found


def test_the_life_of_an_image(aenv: Aenv, images):
    assert "no images" in aenv("images").stderr
    pulled = aenv("image", "pull", "debian")
    assert (pulled.exit_code, pulled.stdout) == (0, f"sha256:{'a' * 64}\n")
    assert "pull debian: 2.0 KiB / 2.0 KiB" in pulled.stderr
    assert json.loads(aenv("img", "pull", "other", "--json").stdout)["names"] == ["other"]
    shown = aenv("images").stdout.splitlines()
    assert shown[0].split() == ["NAME", "DIGEST", "LAYERS", "SIZE", "OWN", "USED"]
    assert shown[1].split()[:7] == ["debian", "a" * 12, "2", "2.0", "KiB", "1000", "B"]
    assert [item["ownBytes"] for item in json.loads(aenv("image", "ls", "--json").stdout)] == [1000, 1000]
    layers = aenv("layers")
    assert "image-base   1000 B  2      image debian, image other" in layers.stdout
    assert "3 layers, 2.9 KiB in all" in layers.stderr
    assert len(json.loads(aenv("layers", "--json").stdout)) == 3
    told = aenv("image", "inspect", "debian").stdout
    assert 'Env       ["A=1"]' in told
    assert "User      app" in told
    assert json.loads(aenv("image", "inspect", "sha256:" + "a" * 64, "--json").stdout)["config"]["User"] == "app"
    gone = aenv("image", "rm", "debian", "none", "other")
    assert (gone.exit_code, gone.stdout) == (3, "debian\nother\n")
    assert "image 'none' is not on this node" in gone.stderr


def test_a_pull_that_fails(aenv: Aenv, images):
    missing = aenv("image", "pull", "none")
    assert (missing.exit_code, missing.stdout) == (3, "")
    assert "hint: see that name and tag are right" in missing.stderr
    images.registry["private"] = PermissionDenied("image 'private': unauthorized", "give credentials")
    denied = aenv("image", "pull", "private")
    assert denied.exit_code == 1
    assert "error: image 'private': unauthorized\nhint: give credentials" in denied.stderr


def test_credentials_come_by_standard_input(aenv: Aenv, images):
    words = ["image", "pull", "debian", "--username", "me", "--password-stdin"]
    result = CliRunner().invoke(cli, words, env=aenv.server.environment, input="s3cret\n", prog_name="aenv")
    assert result.exit_code == 0, result.output
    assert images.pulled_with == [Registry("registry", {"username": "me", "password": "s3cret"})]
    assert aenv("image", "pull", "debian", "--username", "me").exit_code == 2
    assert aenv("image", "pull", "debian", "--password-stdin").exit_code == 2


def test_images_that_are_files_and_folders(aenv: Aenv, images, tmp_path):
    (tmp_path / "root.tar").write_bytes(b"x" * 600_000)
    brought = aenv("image", "import", str(tmp_path / "root.tar"), "mine:1")
    assert (brought.exit_code, brought.stdout) == (0, f"sha256:{'a' * 64}\n")
    assert images.received == [b"x" * 600_000]
    layout = tmp_path / "layout"
    layout.mkdir()
    refused = aenv("image", "import", str(layout), "mine:2")
    assert (refused.exit_code, "no OCI layout" in refused.stderr) == (2, True)
    (layout / "index.json").write_text("{}")
    assert aenv("image", "import", str(layout), "mine:2").exit_code == 0
    with tarfile.open(fileobj=io.BytesIO(images.received[1])) as archive:
        assert "./index.json" in archive.getnames()
    assert aenv("image", "import", str(tmp_path / "missing"), "x").exit_code == 2


def test_a_push_tells_how_far_it_is_and_prints_the_digest(aenv: Aenv):
    pushed = aenv("image", "push", "base", "registry:5000/tool:1")
    assert (pushed.exit_code, pushed.stdout) == (0, f"sha256:{'d' * 64}\n")
    assert "pack the layers" in pushed.stderr
    argv = ["img", "push", "base", "r/denied", "-u", "me", "--password-stdin", "--json"]
    allowed = CliRunner().invoke(cli, argv, env=aenv.server.environment, input="secret\n", prog_name="aenv")
    assert json.loads(allowed.stdout)["sizeBytes"] == 2000
    refused = aenv("image", "push", "base", "r/denied")
    assert refused.exit_code != 0
    assert "denied" in refused.stderr
    assert aenv("image", "push", "base", "r/x", "-u", "me").exit_code == 2
    assert aenv("image", "push", "nothing", "r/x").exit_code == 3


def test_layers_are_verified(aenv, server):
    orchestrator = server.orchestrator
    orchestrator.images.library["debian"] = make_image("debian")
    done = aenv("layers", "verify")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "2 layers compared, 2.0 KiB: 0 damaged, 0 made anew" in done.stderr
    orchestrator.verified["image-top"] = Verified("image-top", "mended", "it was damaged", ("image debian",))
    done = aenv("layers", "verify", "image-top")
    assert done.exit_code == 0
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [["image-top", "mended"]]
    orchestrator.verified["image-base"] = Verified("image-base", "damaged", "it is damaged", ("image debian",))
    done = aenv("layers", "verify", "--json")
    assert done.exit_code == 1
    assert [(layer["layerID"], layer["state"]) for layer in json.loads(done.stdout)] == [("image-base", "damaged"), ("image-top", "mended")]
    assert "there are damaged layers" in done.stderr
    done = aenv("layers", "verify", "none")
    assert (done.exit_code, "there is no layer 'none'" in done.stderr) == (3, True)
