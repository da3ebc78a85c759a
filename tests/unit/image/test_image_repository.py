"""Referrers, asked of a scripted registry: with which proof, and what each answer means."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest
from http_stub import served

from agentenv.config.schema import ImagesConfig
from agentenv.core.errors import PermissionDenied, Unavailable
from agentenv.image.credentials import Credentials
from agentenv.image.reference import parse
from agentenv.image.repository import Repository, known_login, repository_of

DIGEST = f"sha256:{'1' * 64}"
LOGIN = Credentials("me", "pass:word")
BASIC = "Basic " + base64.b64encode(b"me:pass:word").decode()
Answer = Callable[[str, str | None], tuple[int, dict[str, str], bytes]]


@contextmanager
def registry(answer: Answer) -> Iterator[str]:
    """`answer(path, authorization)` gives status, headers and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self.path, self.headers.get("authorization"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as host:
        yield host


def at(host: str) -> Repository:
    return Repository(f"http://{host}/v2/team/tool", host, True, Path("/none"))


def test_the_list_is_asked_for_by_type() -> None:
    asked: list[str] = []

    def answer(path: str, _proof: str | None) -> tuple[int, dict[str, str], bytes]:
        asked.append(path)
        return 200, {}, b"{}"

    with registry(answer) as host:
        assert at(host).referrers(DIGEST, "a/b+json", None) == b"{}"
    assert asked == [f"/v2/team/tool/referrers/{DIGEST}?artifactType=a%2Fb%2Bjson"]


@pytest.mark.parametrize(("login", "token"), [(LOGIN, "mine"), (None, "anybody")])
def test_a_token_is_bought_with_the_password_or_without(login: Credentials | None, token: str) -> None:
    def answer(path: str, proof: str | None) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/token?service=s&scope=repository%3Ateam%2Ftool%3Apull"):
            return 200, {}, json.dumps({"token": "mine" if proof == BASIC else "anybody"}).encode()
        if proof == f"Bearer {token}":
            return 200, {}, b"{}"
        challenge = f'Bearer realm="http://{host}/token",service="s",scope="repository:team/tool:pull"'
        return 401, {"www-authenticate": challenge}, b""

    with registry(answer) as host:
        assert at(host).referrers(DIGEST, "x", login) == b"{}"


def test_a_password_goes_to_who_asks_for_one() -> None:
    def answer(_path: str, proof: str | None) -> tuple[int, dict[str, str], bytes]:
        return (200, {}, b"{}") if proof == BASIC else (401, {"www-authenticate": 'Basic realm="x"'}, b"")

    with registry(answer) as host:
        assert at(host).referrers(DIGEST, "x", LOGIN) == b"{}"
        for login in (None, Credentials("me", "wrong")):
            with pytest.raises(PermissionDenied):
                at(host).referrers(DIGEST, "x", login)


@pytest.mark.parametrize(("status", "error"), [(404, None), (400, None), (403, PermissionDenied), (429, Unavailable), (503, Unavailable)])
def test_what_other_answers_mean(status: int, error: type[Exception] | None) -> None:
    with registry(lambda _path, _proof: (status, {}, b"")) as host:
        if error is None:
            assert at(host).referrers(DIGEST, "x", None) is None
        else:
            with pytest.raises(error):
                at(host).referrers(DIGEST, "x", None)
    with pytest.raises(Unavailable):
        Repository(f"http://{host}/v2/x", host, True, Path("/none")).referrers(DIGEST, "x", None)


def test_where_a_repository_is(tmp_path: Path) -> None:
    found = repository_of(parse("debian"), ImagesConfig(certs_dir=tmp_path))
    assert (found.url, found.check_certificate) == ("https://registry-1.docker.io/v2/library/debian", True)
    found = repository_of(parse("r:5000/x"), ImagesConfig(certs_dir=tmp_path))
    assert (found.url, found.certificates) == ("https://r:5000/v2/x", tmp_path / "r:5000")


def test_a_secure_registry_cannot_send_secrets_to_a_token_server_without_tls() -> None:
    refusal = httpx.Response(401, headers={"www-authenticate": 'Bearer realm="http://elsewhere/token"'})
    with pytest.raises(PermissionDenied, match="without TLS"), httpx.Client() as client:
        Repository("https://r/v2/x", "r", True, Path("/none"))._proof(client, refusal, LOGIN)


def test_logins_of_docker(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    entry = {"auth": base64.b64encode(b"me:pass:word").decode()}
    config.write_text(json.dumps({"auths": {"r:5000": entry, "https://index.docker.io/v1/": entry, "broken.example": {}}}))
    settings = ImagesConfig(docker_config=str(config))
    assert known_login(parse("r:5000/x"), settings) == LOGIN
    assert known_login(parse("debian"), settings) == LOGIN
    for other in ("broken.example/x", "r.example/x", "r:5001/x"):
        assert known_login(parse(other), settings) is None
    assert known_login(parse("r:5000/x"), ImagesConfig(docker_config=str(tmp_path / "none"))) is None
