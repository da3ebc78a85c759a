"""Pulling from a real registry: plain and TLS, with and without a password, by tag and digest, through mirrors."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_rig import Layout, folder, layer, member, quiet, tool
from limiting_registry import limiting_registry
from registry_rig import PASSWORD, USER, RealRegistry, real_registry

from agentenv.config.schema import ImagesConfig
from agentenv.core.errors import DataCorrupt, InvalidInput, NotFound, PermissionDenied, Unavailable
from agentenv.core.images import Platform
from agentenv.image.archives import load_archive
from agentenv.image.blobs import BlobFolder
from agentenv.image.credentials import Credentials
from agentenv.image.registry import LocalImage, Registry

LAYERS = (layer(folder("etc"), member("etc/one", "1")), layer(member("two", "2")))
RUN = {"Env": ["A=1"], "User": "1000", "Cmd": ["/two"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "plain") as registry:
        yield registry


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return Layout.make(tmp_path_factory.mktemp("layout"), LAYERS, run=RUN)


def _registry(work: Path, host: str, **settings: object) -> Registry:
    chosen = {"insecure_registries": (host,), "docker_config": str(work / "none.json"), "certs_dir": work / "certs"} | settings
    return Registry(work / "cache", ImagesConfig(**chosen))


def _pull(registry: Registry, name: str, credentials: Credentials | None = None) -> LocalImage:
    return registry.pull(registry.resolve(name, credentials), credentials, quiet)


def test_a_plain_registry(place: RealRegistry, layout: Layout, tmp_path: Path) -> None:
    name = place.push(layout.folder, "team/tool:v1")
    registry = _registry(tmp_path, place.host)
    image = _pull(registry, name)
    assert [blob.digest for blob in image.manifest.layers] == [entry["digest"] for entry in layout.manifest["layers"]]
    assert (image.config.env, image.config.user, image.config.cmd) == (("A=1",), "1000", ("/two",))
    by_digest = _pull(registry, f"{place.host}/team/tool@{image.digest}")
    assert (by_digest.digest, by_digest.manifest) == (image.digest, image.manifest)
    assert not list((tmp_path / "cache" / "images").glob(".*")), "notes and credentials were left"


def test_a_second_pull_asks_for_no_blob(place: RealRegistry, layout: Layout, tmp_path: Path) -> None:
    name = place.push(layout.folder, "team/again")
    registry = _registry(tmp_path, place.host)
    _pull(registry, name)
    served = place.blobs_served()
    shown: list[object] = []
    registry.pull(registry.resolve(name), None, lambda *facts: shown.append(facts))
    assert (place.blobs_served(), shown) == (served, [])


def test_an_index_with_attestations(place: RealRegistry, layout: Layout, tmp_path: Path) -> None:
    copy = Layout(tmp_path / "layout")
    shutil.copytree(layout.folder, copy.folder)
    entry = json.loads((layout.folder / "index.json").read_text())["manifests"][0]
    other = Layout.make(tmp_path / "other", (layer(),))
    foreign = json.loads((other.folder / "index.json").read_text())["manifests"][0]
    shutil.copytree(other.folder / "blobs", copy.folder / "blobs", dirs_exist_ok=True)
    attestation = foreign | {
        "platform": {"os": "unknown", "architecture": "unknown"},
        "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
    }
    kind = "application/vnd.oci.image.index.v1+json"
    listed = [attestation, foreign | {"platform": {"os": "linux", "architecture": "arm64"}}]
    index = {"schemaVersion": 2, "mediaType": kind, "manifests": [*listed, entry | {"platform": {"os": "linux", "architecture": "amd64"}}]}
    copy.write_index([copy.blob(json.dumps(index).encode(), kind) | {"annotations": {"org.opencontainers.image.ref.name": "image"}}])
    name = f"{place.host}/team/many"
    tool("skopeo", "--insecure-policy", "copy", "-q", "--all", "--dest-tls-verify=false", f"oci:{copy.folder}:image", f"docker://{name}")
    image = _pull(_registry(tmp_path, place.host), name)
    assert image.digest == entry["digest"]
    with pytest.raises(InvalidInput, match="not made for linux/s390x"):
        _registry(tmp_path, place.host).resolve(name, None, Platform("linux", "s390x"))


@pytest.mark.parametrize(
    ("name", "error"), [("team/missing", NotFound), ("team/tool:missing", NotFound), (f"team/tool@sha256:{'0' * 64}", NotFound)]
)
def test_what_is_not_there(name: str, error: type[Exception], place: RealRegistry, layout: Layout, tmp_path: Path) -> None:
    place.push(layout.folder, "team/tool")
    with pytest.raises(error):
        _registry(tmp_path, place.host).resolve(f"{place.host}/{name}")


def test_a_registry_that_is_down_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="connection refused"):
        _registry(tmp_path, "127.0.0.1:1").resolve("127.0.0.1:1/x")


def test_without_leave_a_plain_registry_is_not_asked(place: RealRegistry, layout: Layout, tmp_path: Path) -> None:
    name = place.push(layout.folder, "team/tool")
    with pytest.raises(Unavailable) as caught:
        _registry(tmp_path, place.host, insecure_registries=()).resolve(name)
    assert "images.insecure_registries" in caught.value.hint


def test_mirrors_are_asked_first_and_may_fail(place: RealRegistry, layout: Layout, tmp_path: Path) -> None:
    place.push(layout.folder, "hub/library/tool:1")
    mirrors = ("docker.io=127.0.0.1:1", f"docker.io={place.host}/hub")
    image = _pull(_registry(tmp_path, place.host, mirrors=mirrors), "tool:1")
    assert image.name == "docker.io/library/tool:1"


def test_when_all_places_fail_each_is_named_in_plain_words(tmp_path: Path) -> None:
    mirrors = ("127.0.0.1:1=127.0.0.1:2", "127.0.0.1:1=127.0.0.1:3/hub")
    with pytest.raises(Unavailable) as caught:
        _registry(tmp_path, "127.0.0.1:1", mirrors=mirrors).resolve("127.0.0.1:1/tool:1")
    for text in ("'127.0.0.1:1/tool:1'", "mirror 127.0.0.1:2", "mirror 127.0.0.1:3", "connection refused"):
        assert text in caught.value.message
    assert "level=" not in caught.value.message
    assert caught.value.hint


def test_lists_are_checked_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(PermissionDenied):
        _registry(tmp_path, "x", deny=("127.0.0.1:1",)).resolve("127.0.0.1:1/x")


def test_a_blob_damaged_in_the_cache_is_noticed(place: RealRegistry, layout: Layout, tmp_path: Path) -> None:
    name = place.push(layout.folder, "team/tool")
    registry = _registry(tmp_path, place.host)
    image = _pull(registry, name)
    config = registry.blobs.path(image.manifest.config.digest)
    config.write_bytes(config.read_bytes().replace(b"amd64", b"arm64"))
    with pytest.raises(DataCorrupt):
        _pull(registry, name)


def test_tls_and_a_password(layout: Layout, tmp_path: Path) -> None:
    with real_registry(tmp_path / "registry", tls=True, password=True) as place:
        name = place.push(layout.folder, "private/tool", with_password=True)
        with pytest.raises(Unavailable) as caught:  # nobody vouches for the certificate
            _registry(tmp_path, place.host, insecure_registries=()).resolve(name, Credentials(USER, PASSWORD))
        assert "images.certs_dir" in caught.value.hint
        assert place.ca is not None
        (tmp_path / "certs" / place.host).mkdir(parents=True)
        shutil.copy(place.ca, tmp_path / "certs" / place.host / "ca.crt")
        registry = _registry(tmp_path, place.host, insecure_registries=())
        for credentials in (None, Credentials(USER, "wrong")):
            with pytest.raises(PermissionDenied):
                registry.resolve(name, credentials)
        given = _pull(registry, name, Credentials(USER, PASSWORD))
        login = {"auths": {place.host: {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}}}
        (tmp_path / "login.json").write_text(json.dumps(login))
        by_login = _pull(_registry(tmp_path, place.host, insecure_registries=(), docker_config=str(tmp_path / "login.json")), name)
        assert by_login.digest == given.digest


@pytest.mark.parametrize(("refuse", "refuse_from"), [(1, 0), (2, 3)])
def test_a_registry_that_limits_its_callers_is_waited_for(refuse: int, refuse_from: int, layout: Layout, tmp_path: Path) -> None:
    """F17: as long as it says."""
    with limiting_registry(layout.folder, refuse=refuse, refuse_from=refuse_from, retry_after_s=2) as place:
        image = _pull(_registry(tmp_path, place.host), f"{place.host}/team/tool:1")
        assert len(image.manifest.layers) == len(LAYERS)
        at = {status: [time_s for time_s, path, found in place.seen if found == status and path != "/v2/"] for status in (200, 429)}
        assert len(at[429]) == refuse
        assert all(min(later for later in at[200] + at[429] if later > refused) - refused >= 1.9 for refused in at[429][-1:])


def test_a_registry_that_never_lets_us_in_is_named(layout: Layout, tmp_path: Path) -> None:
    with (
        limiting_registry(layout.folder, refuse=1000) as place,
        pytest.raises(Unavailable, match=f"{place.host}/team/tool.*toomanyrequests") as caught,
    ):
        _pull(_registry(tmp_path, place.host), f"{place.host}/team/tool:1")
    assert "images.mirrors" in caught.value.hint
    assert len(place.seen) < 12


@pytest.mark.parametrize("token_uses", [2, 3])
def test_a_token_that_ends_in_the_middle_is_replaced(token_uses: int, tmp_path: Path) -> None:
    layout = Layout.make(tmp_path / "layout", [layer(member(f"f{n}", f"{n}" * 50_000)) for n in range(5)])
    with limiting_registry(layout.folder, token_uses=token_uses) as place:
        image = _pull(_registry(tmp_path, place.host), f"{place.host}/team/tool:1")
        assert all(image.blobs.is_complete(blob.digest, blob.size_bytes) for blob in image.manifest.layers)
        assert place.blobs_served() == 6, "no blob was fetched twice"
        assert len(place.tokens) > 2


def test_a_token_that_is_never_good_ends_the_pull(layout: Layout, tmp_path: Path) -> None:
    with limiting_registry(layout.folder, token_uses=1) as place:
        registry = _registry(tmp_path, place.host)
        found = registry.resolve(f"{place.host}/team/tool:1")
        place.token_uses = -1
        with pytest.raises(PermissionDenied):
            registry.pull(found, None, quiet)
        assert len(place.seen) < 20


def _archive_of(kind: str, layout: Layout, work: Path) -> Path:
    out = work / f"{kind}.tar"
    if kind == "oci-archive":
        with tarfile.open(out, "w") as archive:
            archive.add(layout.folder, ".")
    else:
        tool("skopeo", "--insecure-policy", "copy", "-q", f"oci:{layout.folder}:image", f"docker-archive:{out}:tool:1")
    return out


@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
def test_archives_hold_the_same_image(kind: str, layout: Layout, tmp_path: Path) -> None:
    image = load_archive(_archive_of(kind, layout, tmp_path), tmp_path / "work", "tool", Platform(), 1 << 30)
    assert image.config.env == ("A=1",)
    assert len(image.config.diff_ids) == len(image.manifest.layers) == 2
    assert all(image.blobs.is_complete(blob.digest, blob.size_bytes) for blob in image.manifest.layers)


@pytest.mark.parametrize("packing", ["", "gz", "zst"])
def test_a_root_file_system_alone(packing: str, tmp_path: Path) -> None:
    archive = tmp_path / "root.tar"
    archive.write_bytes(LAYERS[0])
    if packing:
        tool({"gz": "gzip", "zst": "zstd"}[packing], "-q", archive)
        archive = tmp_path / f"root.tar.{packing}"
    image = load_archive(archive, tmp_path / "work", "root", Platform(), 1 << 30)
    assert (len(image.manifest.layers), image.config.env) == (1, ())


@pytest.mark.parametrize("content", [b"", b"not an archive" * 100])
def test_what_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InvalidInput):
        load_archive(tmp_path / "x", tmp_path / "work", "x", Platform(), 1 << 30)


def test_an_archive_cannot_point_outside_of_itself(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    index = json.dumps([{"Config": "config", "Layers": ["../../secret.json"], "RepoTags": []}])
    config = tarfile.TarInfo("config")
    config.type, config.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.json")
    (tmp_path / "x.tar").write_bytes(layer(member("manifest.json", index), (config, b"")))
    with pytest.raises(InvalidInput, match="lacks"):
        load_archive(tmp_path / "x.tar", tmp_path / "work", "x", Platform(), 1 << 30)


def test_the_cache_keeps_what_was_used_last_and_what_is_young(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path / "blobs")
    (tmp_path / "blobs" / "sha256").mkdir(parents=True)
    hour_s = 3600
    for name, age_s in (("a", 5 * hour_s), ("b", 3 * hour_s), ("c", 4 * hour_s), ("d", 0)):
        blobs.path(f"sha256:{name}").write_bytes(bytes(100))
        os.utime(blobs.path(f"sha256:{name}"), (time.time() - age_s,) * 2)
    assert blobs.is_complete("sha256:a", 100), "and so it counts as used now"
    assert blobs.prune(300) == 100
    assert sorted(path.name for path in (tmp_path / "blobs" / "sha256").iterdir()) == ["a", "b", "d"]
    assert blobs.prune(0) == 100  # the young ones stay whatever the limit
