"""Names of images, the lists that let them in, and the documents that describe them."""

from __future__ import annotations

import json

import pytest

from agentenv.core.errors import DataCorrupt, InvalidInput, PermissionDenied, Unsupported
from agentenv.core.images import Platform
from agentenv.image import manifest as manifests
from agentenv.image.reference import check_allowed, parse, pull_names

DIGEST = "sha256:" + "0a" * 32
GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG = "application/vnd.oci.image.config.v1+json"


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("debian:12", "docker.io/library/debian:12"),
        ("someone/tool", "docker.io/someone/tool:latest"),
        ("index.docker.io/debian", "docker.io/library/debian:latest"),
        ("docker.io/a/b:c", "docker.io/a/b:c"),
        ("localhost/x", "localhost/x:latest"),
        ("localhost:5000/x", "localhost:5000/x:latest"),
        ("[::1]:5000/x", "[::1]:5000/x:latest"),
        ("quay.io/a/b/c:v1.0_x-y", "quay.io/a/b/c:v1.0_x-y"),
        (f"debian@{DIGEST}", f"docker.io/library/debian@{DIGEST}"),
        (f"debian:12@{DIGEST}", f"docker.io/library/debian:12@{DIGEST}"),
    ],
)
def test_short_names_mean_what_they_mean_elsewhere(text: str, full: str) -> None:
    assert str(parse(text)) == full


@pytest.mark.parametrize(
    "text",
    ["", "Debian", "debian:", "debian:-x", "a//b", "/a", "a@sha256:12", f"a@md5:{'0' * 32}", "a b", "-a", "a/../b", "--flag", "x" * 300],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse(text)


def test_a_digest_is_stronger_than_a_tag() -> None:
    assert parse(f"debian:12@{DIGEST}").exact == f"docker.io/library/debian@{DIGEST}"


def test_another_default_registry_has_no_library() -> None:
    assert str(parse("tool", "registry.lan:5000")) == "registry.lan:5000/tool:latest"


@pytest.mark.parametrize(
    ("allow", "deny", "is_in"),
    [
        ((), (), True),
        (("docker.io",), (), True),
        (("docker.io/library",), (), True),
        (("docker.io/lib",), (), False),
        (("*/debian",), (), True),
        (("quay.io",), (), False),
        (("docker.io",), ("docker.io/library/debian",), False),
        ((), ("*debian*",), False),
        ((), ("docker.io/library/deb",), True),
    ],
)
def test_deny_is_stronger_and_names_are_whole(allow: tuple[str, ...], deny: tuple[str, ...], is_in: bool) -> None:
    if is_in:
        check_allowed(parse("debian"), allow, deny)
    else:
        with pytest.raises(PermissionDenied):
            check_allowed(parse("debian"), allow, deny)


def test_mirrors_come_first_and_only_for_their_registry() -> None:
    mirrors = ("docker.io=mirror.lan:5000/hub", "quay.io=other.lan", "docker.io=second.lan")
    found = [str(place) for place in pull_names(parse("debian:12"), mirrors)]
    assert found == ["mirror.lan:5000/hub/library/debian:12", "second.lan/library/debian:12", "docker.io/library/debian:12"]


def _entry(platform: dict[str, str] | None = None, digest: str = DIGEST, **more: object) -> dict[str, object]:
    return {"digest": digest, "size": 1, "mediaType": "x", **({"platform": platform} if platform else {}), **more}


def test_attestations_and_other_platforms_are_passed_over() -> None:
    attestation = {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}}
    wanted = "sha256:" + "1" * 64
    index = {
        "manifests": [
            _entry({"os": "linux", "architecture": "amd64"}, **attestation),
            _entry({"os": "unknown", "architecture": "unknown"}),
            _entry({"os": "linux", "architecture": "arm64"}),
            _entry({"os": "linux", "architecture": "amd64", "variant": "v3"}),
            _entry({"os": "linux", "architecture": "amd64"}, wanted),
        ]
    }
    assert manifests.choose(index, Platform(), "x") == wanted
    with pytest.raises(InvalidInput, match=r"linux/riscv64") as caught:
        manifests.choose(index, Platform("linux", "riscv64"), "x")
    assert "linux/amd64, linux/arm64" in caught.value.hint


def _manifest(**changes: object) -> dict[str, object]:
    layers = [{"mediaType": GZIP, "digest": DIGEST, "size": 10}]
    return {"schemaVersion": 2, "config": {"mediaType": CONFIG, "digest": DIGEST, "size": 2}, "layers": layers} | changes


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"schemaVersion": 1}, InvalidInput),
        ({"config": {"mediaType": "application/vnd.cncf.helm.config.v1+json", "digest": DIGEST, "size": 2}}, InvalidInput),
        ({"layers": [{"mediaType": GZIP, "digest": "../../etc/passwd", "size": 1}]}, DataCorrupt),
        ({"layers": [{"mediaType": GZIP, "digest": DIGEST, "size": -1}]}, DataCorrupt),
        ({"layers": [{"mediaType": f"{GZIP}+encrypted", "digest": DIGEST, "size": 1}]}, Unsupported),
        ({"layers": [{"mediaType": GZIP, "digest": DIGEST, "size": 1}] * 201}, InvalidInput),
        ({"layers": "x"}, DataCorrupt),
    ],
)
def test_a_manifest_is_checked(changes: dict[str, object], error: type[Exception]) -> None:
    assert len(manifests.parse_manifest(_manifest(), "x").layers) == 1
    with pytest.raises(error):
        manifests.parse_manifest(_manifest(**changes), "x")


def test_the_configuration_is_read_whole() -> None:
    run = {
        "Env": ["A=b c"],
        "Entrypoint": ["/app"],
        "Cmd": None,
        "User": "1000:100",
        "WorkingDir": "/srv",
        "ExposedPorts": {"80/tcp": {}, "53/udp": {}},
        "Labels": {"k": "v"},
    }
    raw = {"os": "linux", "architecture": "amd64", "config": run, "rootfs": {"diff_ids": [DIGEST]}}
    manifest = manifests.parse_manifest(_manifest(), "x")
    found = manifests.parse_config(json.dumps(raw).encode(), manifest, Platform(), "x")
    assert (found.env, found.entrypoint, found.cmd, found.user) == (("A=b c",), ("/app",), None, "1000:100")
    assert (found.working_dir, found.exposed_ports, found.labels) == ("/srv", ("53/udp", "80/tcp"), {"k": "v"})
    for change, error in (
        ({"architecture": "arm64"}, InvalidInput),
        ({"rootfs": {"diff_ids": []}}, DataCorrupt),
        ({"config": 3}, DataCorrupt),
        ({"config": {"Env": ["A=\0"]}}, InvalidInput),
        ({"config": {"Env": ["A=" + "x" * 200_000]}}, InvalidInput),
        ({"config": {"Env": [f"A{n}=" + "x" * 100_000 for n in range(12)]}}, InvalidInput),
    ):
        with pytest.raises(error):
            manifests.parse_config(json.dumps(raw | change).encode(), manifest, Platform(), "x")
