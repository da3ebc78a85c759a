"""What ADD fetches: from a server on loopback, with its checksum, time and name; what is cached, bounded and refused."""

from __future__ import annotations

import asyncio
import hashlib
import io
import ipaddress
import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from build_rig import Rig
from http_stub import served

from agentenv.config.schema import NetworkConfig
from agentenv.core.builds import DockerfileSource
from agentenv.core.errors import AgentEnvError, DeadlineExceeded, HostNotReady, InvalidInput, NotFound, PermissionDenied, Unavailable
from agentenv.core.model import Context
from agentenv.template.dockerfile.actions import Remote
from agentenv.template.dockerfile.remotes import parse_remote
from agentenv.template.dockerfile.supply import Fetched
from agentenv.template.fetching import Fetcher, FetchRules, resolved

DENIED = tuple(map(ipaddress.ip_network, NetworkConfig().denied_cidrs))
CONTENT = b"the content" * 1000


class Site(BaseHTTPRequestHandler):
    """Answers by path; `asked` has what was asked, with its condition."""

    asked: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("If-None-Match", "")))
        name = self.path.strip("/").partition("?")[0]
        if name == "etag" and self.headers.get("If-None-Match") == '"1"':
            return self.answer(304, b"")
        if name.startswith("to-"):
            return self.answer(302, b"", Location=f"http://{name.removeprefix('to-')}/x")
        if name == "hop":
            return self.answer(307, b"", Location="/file")
        if name == "loop":
            return self.answer(301, b"", Location="/loop")
        if name in ("401", "404", "500"):
            return self.answer(int(name), b"")
        if name == "short":
            return self.answer(200, CONTENT, length=len(CONTENT) + 5)
        if name == "huge":
            return self.answer(200, b"", length=1 << 40)
        if name == "slow":
            threading.Event().wait(2)
        more = {"ETag": '"1"'} if name == "etag" else {}
        return self.answer(200, CONTENT, **{"Last-Modified": "Sun, 13 Sep 2020 12:26:40 GMT"}, **more)

    def answer(self, status: int, content: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site() -> Iterator[str]:
    Site.asked = []
    with served(Site) as host:
        yield host


def fetcher(folder: Path, *private: str, **more: int) -> Fetcher:
    limits = {"file_max_bytes": 1 << 20, "all_max_bytes": 1 << 20, "reserve_bytes": 0, "deadline_s": 30} | more
    return Fetcher(folder / "downloads", FetchRules(denied=DENIED, private=frozenset(private), **limits))


async def fetch(subject: Fetcher, url: str, folder: Path, checksum: str = "") -> Fetched:
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return await subject.fetch(parse_remote(url, checksum, False), scratch, lambda _: None)


def only_member(fetched: Fetched) -> tuple[str, int, int, bytes]:
    with tarfile.open(fetched.archive) as archive:
        (member,) = archive.getmembers()
        return member.name, member.mode, member.mtime, archive.extractfile(member).read()


async def test_a_file_has_its_name_time_and_mode(site: str, tmp_path: Path):
    subject = fetcher(tmp_path, site)
    fetched = await fetch(subject, f"http://{site}/file?a=b", tmp_path)
    assert only_member(fetched) == ("file", 0o600, 1_600_000_000, CONTENT)
    assert hashlib.sha256(CONTENT).hexdigest() in fetched.content
    assert only_member(await fetch(subject, f"http://{site}/", tmp_path))[0] == "__unnamed__"
    assert only_member(await fetch(subject, f"http://{site}/hop", tmp_path))[::3] == ("hop", CONTENT)


async def test_what_is_cached_is_asked_for_no_more_than_needed(site: str, tmp_path: Path):
    subject = fetcher(tmp_path, "127.0.0.1")
    for _ in range(2):
        assert only_member(await fetch(subject, f"http://{site}/etag", tmp_path))[3] == CONTENT
    assert Site.asked == [("/etag", ""), ("/etag", '"1"')]
    right = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    for _ in range(2):
        await fetch(subject, f"http://{site}/etag", tmp_path, right)
    assert len(Site.asked) == 2, "what has the checksum is not asked for again"
    for path in subject.files.folder.iterdir():
        if path.suffix != ".json":
            path.unlink()
    assert only_member(await fetch(subject, f"http://{site}/etag", tmp_path))[3] == CONTENT, "a cache that lost it"


@pytest.mark.parametrize(
    ("path", "kind", "told"),
    [
        ("404", NotFound, "answered 404"),
        ("401", PermissionDenied, "answered 401"),
        ("500", Unavailable, "answered 500"),
        ("short", Unavailable, "short"),
        ("huge", InvalidInput, "more than 1 MiB"),
        ("loop", Unavailable, "redirects more than"),
        ("to-169.254.169.254", PermissionDenied, "169.254.169.254, a network that builds may not reach"),
        ("to-127.0.0.1:1", Unavailable, "could not be fetched"),
    ],
)
async def test_what_cannot_be_fetched(site: str, tmp_path: Path, path: str, kind: type[AgentEnvError], told: str):
    subject = fetcher(tmp_path, "127.0.0.1")
    with pytest.raises(kind, match=told):
        await fetch(subject, f"http://{site}/{path}", tmp_path)
    assert not list(subject.files.folder.glob("*"))


async def test_a_wrong_checksum_is_refused_and_kept_nowhere(site: str, tmp_path: Path):
    subject = fetcher(tmp_path, site)
    with pytest.raises(InvalidInput, match=f"has the checksum sha256:{hashlib.sha256(CONTENT).hexdigest()}"):
        await fetch(subject, f"http://{site}/file", tmp_path, f"sha256:{'0' * 64}")
    assert not list(subject.files.folder.glob("*"))


async def test_one_that_takes_too_long(site: str, tmp_path: Path):
    with pytest.raises(DeadlineExceeded, match=r"did not arrive within 0\.2 s"):
        await fetch(fetcher(tmp_path, site, deadline_s=0.2), f"http://{site}/slow", tmp_path)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "192.168.0.1",
        "100.64.0.1",
        "0.0.0.0",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:10.0.0.1",
        "224.0.0.1",
    ],
)
async def test_networks_that_builds_may_not_reach(tmp_path: Path, address: str):
    rules = fetcher(tmp_path)._rules
    with pytest.raises(PermissionDenied, match=r"limits\.build_fetch_private"):
        await resolved(address, 80, rules)
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(PermissionDenied):
        await fetch(fetcher(tmp_path, f"{host}:81"), f"http://{host}/x", tmp_path)
    allowed = fetcher(tmp_path, address)._rules
    assert await resolved(address, 80, allowed) == [address]
    assert await resolved("93.184.215.14", 80, rules) == ["93.184.215.14"]


async def test_downloads_are_bounded(site: str, tmp_path: Path):
    subject = fetcher(tmp_path, site, all_max_bytes=100)
    await fetch(subject, f"http://{site}/one", tmp_path)
    await fetch(subject, f"http://{site}/two", tmp_path)
    kept = [path for path in subject.files.folder.iterdir() if path.suffix != ".json"]
    assert len(kept) == 1, "only what was fetched last, which is one content here"


# --- git


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A repository served as plain files: what the simplest server can do."""
    work, bare = tmp_path / "work", tmp_path / "served" / "repo.git"
    git = ["git", "-C", str(work), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", "init", "-q", "-b", "main", str(work)], check=True)
    (work / "sub").mkdir()
    for name, text in (("sub/file", "one"), ("top", "top")):
        (work / name).write_text(text)
    (work / "top").chmod(0o755)
    (work / "sub" / "link").symlink_to("../top")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    subprocess.run([*git, "tag", "v1"], check=True)
    (work / "sub" / "file").write_text("two")
    subprocess.run([*git, "commit", "-q", "-a", "-m", "two"], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True)
    subprocess.run(["git", "-C", str(bare), "update-server-info"], check=True)
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with served(partial(handler, directory=str(bare.parent))) as host:
        yield f"http://{host}/repo.git", work


def tree(fetched: Fetched) -> dict[str, str]:
    with tarfile.open(fetched.archive) as archive:
        return {
            m.name: archive.extractfile(m).read().decode(errors="replace") if m.isreg() else m.linkname
            for m in archive.getmembers()
            if not m.isdir()
        }


def commit_of(work: Path, revision: str) -> str:
    done = subprocess.run(["git", "-C", str(work), "rev-parse", revision], capture_output=True, text=True, check=True)
    return done.stdout.strip()


async def test_revisions_and_folders(repository: tuple[str, Path], tmp_path: Path):
    url, work = repository
    subject = fetcher(tmp_path, "127.0.0.1")
    commit = commit_of(work, "v1")
    for fragment, expected in (
        ("", {"sub/file": "two", "sub/link": "../top", "top": "top"}),
        ("#main", {"sub/file": "two", "sub/link": "../top", "top": "top"}),
        ("#v1:sub", {"file": "one", "link": "../top"}),
        (f"#{commit}:/sub/", {"file": "one", "link": "../top"}),
        (f"#{commit[:10]}:sub", {"file": "one", "link": "../top"}),
    ):
        fetched = await fetch(subject, f"{url}{fragment}", tmp_path)
        assert tree(fetched) == expected, fragment
        assert fetched.name == ""
        assert fetched.content.startswith(f"git:{commit}") is ("one" in expected.values() or expected.get("file") == "one")
    assert await fetch(subject, f"{url}#v1", tmp_path, commit)
    with pytest.raises(InvalidInput, match=f"not {commit}"):
        await fetch(subject, f"{url}#main", tmp_path, commit)
    kept = await subject.fetch(Remote(url, "git", keeps_git=True), tmp_path / "scratch", lambda _: None)
    assert ".git/HEAD" in tree(kept)


@pytest.mark.parametrize("fragment", ["#none", "#main:none", "#main:../..", "#main:top", "#--upload-pack=x"])
async def test_what_a_repository_has_not(repository: tuple[str, Path], tmp_path: Path, fragment: str):
    with pytest.raises((NotFound, InvalidInput)):
        await fetch(fetcher(tmp_path, "127.0.0.1"), f"{repository[0]}{fragment}", tmp_path)
    assert not list((tmp_path / "scratch").glob("git-*")), "no clone is left"


async def test_a_repository_that_is_too_large(repository: tuple[str, Path], tmp_path: Path):
    url, work = repository
    (work / "big").write_bytes(os.urandom(300_000))
    git = ["git", "-C", str(work), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    served = tmp_path / "served" / "repo.git"
    for command in ([*git, "add", "."], [*git, "commit", "-qm", "big"], [*git, "push", "-q", str(served), "main"]):
        await asyncio.to_thread(subprocess.run, command, check=True)
    await asyncio.to_thread(subprocess.run, ["git", "-C", str(served), "update-server-info"], check=True)
    assert tree(await fetch(fetcher(tmp_path, "127.0.0.1"), f"{url}#main:sub", tmp_path))
    with pytest.raises((NotFound, InvalidInput)):
        await fetch(fetcher(tmp_path, "127.0.0.1", file_max_bytes=100_000), f"{url}#main", tmp_path)
    assert not list((tmp_path / "scratch").glob("git-?*/")), "no clone is left"


async def test_git_reaches_no_other_network_either(repository: tuple[str, Path], tmp_path: Path):
    with pytest.raises(PermissionDenied):
        await fetch(fetcher(tmp_path), repository[0], tmp_path)


async def test_a_node_without_git(repository: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostNotReady, match="has no git"):
        await fetch(fetcher(tmp_path, "127.0.0.1"), repository[0], tmp_path)


# --- in builds


async def test_add_in_a_build(tmp_path: Path, site: str):
    rig = Rig(tmp_path / "node", build_fetch_private=("127.0.0.1",))
    await rig.builds.open()
    rig.images.contexts = {"debian": Context()}
    text = f"FROM debian\nADD http://{site}/etag /x/\nADD --chmod=755 http://{site}/file /y\n"
    for cached in (0, 2):
        job = await rig.build(dockerfile=DockerfileSource(text))
        assert job.status == "ready", job.failure
        assert sum("CACHED" in line for line in await rig.said(job)) == cached
    placed = []
    for content in rig.workshop.uploaded:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            placed += [(m.name, m.mode, m.uid, m.mtime) for m in archive.getmembers()]
    assert placed == [("etag", 0o600, 0, 1_600_000_000), ("y", 0o755, 0, 1_600_000_000)]
    assert [what for what in rig.disk() if what.startswith("files")] == ["files /x 0:0", "files / 0:0"]
    job = await rig.build(dockerfile=DockerfileSource(f"FROM debian\nADD http://{site}/404 /x\n"))
    assert job.failure.message.startswith("Dockerfile:2: ")
    assert "answered 404" in job.failure.message
    await asyncio.sleep(0)
    rig.assert_rests()
