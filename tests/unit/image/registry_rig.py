"""A real registry on loopback: plain or TLS, open or with a password."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from image_rig import tool

USER, PASSWORD = "someone", "pass:word with spaces"
_START_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class RealRegistry:
    """`host` is `127.0.0.1:<port>`."""

    host: str
    ca: Path | None
    log: Path

    def push(self, layout: Path, name: str, with_password: bool = False) -> str:
        options = ["--dest-tls-verify=false"]
        if with_password:
            options += ["--dest-creds", f"{USER}:{PASSWORD}"]
        tool("skopeo", "--insecure-policy", "copy", "-q", *options, f"oci:{layout}:image", f"docker://{self.host}/{name}")
        return f"{self.host}/{name}"

    def blobs_served(self) -> int:
        """How many blobs were asked for in full so far."""
        return sum(
            '"GET /v2/' in line and "/blobs/" in line and "go-containerregistry" not in line for line in self.log.read_text().splitlines()
        )


@contextlib.contextmanager
def real_registry(work: Path, *, tls: bool = False, password: bool = False, host: str = "") -> Iterator[RealRegistry]:
    """`host` is where it listens (`127.0.0.1:<port>`); empty: at a free port."""
    program = shutil.which("docker-registry")
    assert program, "these tests need the registry: `tools/setup.sh tests`"
    work.mkdir(parents=True)
    host = host or _free_place()
    settings: dict[str, object] = {
        "version": 0.1,
        "log": {"accesslog": {"disabled": False}},
        "storage": {"filesystem": {"rootdirectory": str(work / "data")}},
        "http": {"addr": host},
    }
    ca = None
    if tls:
        ca = _certificate(work)
        settings["http"] = {"addr": host, "tls": {"certificate": str(work / "cert.pem"), "key": str(work / "key.pem")}}
    if password:
        (work / "htpasswd").write_bytes(tool("htpasswd", "-niB", USER, stdin=PASSWORD.encode()))
        settings["auth"] = {"htpasswd": {"realm": "tests", "path": str(work / "htpasswd")}}
    (work / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    log = work / "log"
    with log.open("wb") as out:
        server = subprocess.Popen([program, "serve", work / "config.yml"], stdout=out, stderr=out)
    try:
        _wait(f"{'https' if tls else 'http'}://{host}/v2/", server, log)
        yield RealRegistry(host, ca, log)
    finally:
        server.kill()
        server.wait()


def _free_place() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_DEADLINE_S
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url, verify=False, timeout=5)
            return
        time.sleep(0.05)
    raise AssertionError(f"the registry did not start: {log.read_text()[-2000:]}")


def _certificate(folder: Path) -> Path:
    """An authority of its own and a certificate of the registry; returns the authority's."""
    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of the tests")])
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def signed(name: x509.Name, holder: ec.EllipticCurvePrivateKey, is_ca: bool) -> bytes:
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(holder.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if not is_ca:
            builder = builder.add_extension(address, critical=False)
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    (folder / "ca.pem").write_bytes(signed(issuer, authority, True))
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "registry of the tests")])
    (folder / "cert.pem").write_bytes(signed(own, key, False))
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(private)
    return folder / "ca.pem"
