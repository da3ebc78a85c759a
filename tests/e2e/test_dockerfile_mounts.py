"""What COPY keeps of files, RUN --mount, and ADD of what has to be fetched: on real guests, by `aenv template build`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from e2b import Sandbox
from e2e_node import Node
from http_stub import served

NAME = "e2e-mounts"
TELL = """
import hashlib, json, os, stat, sys
def told(path):
    info = os.lstat(path)
    kind = stat.S_IFMT(info.st_mode)
    what = [f"{info.st_mode:o}", info.st_uid, info.st_gid, info.st_mtime_ns]
    what.append({name: os.getxattr(path, name, follow_symlinks=False).hex() for name in sorted(os.listxattr(path, follow_symlinks=False))})
    if kind == stat.S_IFREG:
        what += [info.st_size, info.st_nlink, info.st_blocks * 512 < 1 << 20]
        what.append(hashlib.sha256(open(path, "rb").read()).hexdigest() if info.st_size < 1 << 20 else "")
    elif kind == stat.S_IFLNK:
        what.append(os.readlink(path))
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        what.append([os.major(info.st_rdev), os.minor(info.st_rdev)])
    return what
top = sys.argv[1]
found = {name: told(os.path.join(top, name)) for name in sorted(os.listdir(top))}
found["."] = told(top)
print(json.dumps(found))
"""
MAKE = """
import os, stat
os.makedirs("/made/sub"); os.chdir("/made")
open("program", "w").write("#!x"); os.chown("program", 7, 8); os.chmod("program", 0o4755)
os.setxattr("program", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
os.setxattr("program", "user.note", b"a\\nb\\0")
os.link("program", "other-name")
acl = b"\\x02\\0\\0\\0" + b"".join(t.to_bytes(2, "little") + p.to_bytes(2, "little") + i.to_bytes(4, "little")
    for t, p, i in ((1, 6, 2**32 - 1), (2, 4, 1234), (4, 4, 2**32 - 1), (16, 6, 2**32 - 1), (32, 0, 2**32 - 1)))
open("listed", "w").close(); os.setxattr("listed", "system.posix_acl_access", acl)
f = open("sparse", "wb"); f.truncate(1 << 30); f.seek(1 << 29); f.write(b"middle"); f.close()
os.mkfifo("pipe"); os.mknod("null", 0o666 | stat.S_IFCHR, os.makedev(1, 3)); os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(259, 7))
os.symlink("/nowhere", "link"); os.setxattr("sub", "user.folder", b"x")
os.utime("listed", ns=(0, 1_234_567_890_123_456_789)); os.utime("link", ns=(0, 5), follow_symlinks=False)
os.utime("sub", ns=(0, 1_000_000_000_000_000_007)); os.utime(".", ns=(0, 77))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "ctx").mkdir(parents=True)
    (folder / "make.py").write_text(MAKE)
    (folder / "tell.py").write_text(TELL)
    (folder / "ctx" / "kept.txt").write_text("from the context\n")
    os.link(folder / "ctx" / "kept.txt", folder / "ctx" / "second")
    os.setxattr(folder / "ctx" / "kept.txt", "user.sent", b"\xff\n1")
    os.utime(folder / "ctx" / "kept.txt", ns=(0, 1_500_000_000_000_000_009))
    return folder


@pytest.fixture
def forgets(node: Node) -> Iterator[None]:
    yield
    node.aenv("template", "delete", NAME, "--yes", check=False)


def build(node: Node, folder: Path, text: str, *more: str, check: bool = True):  # type: ignore[no-untyped-def]
    (folder / "Dockerfile").write_text(text)
    return node.aenv("template", "build", str(folder), "--name", NAME, "--no-start", *more, check=check, timeout=600)


def test_copy_keeps_whatever_a_file_has(node: Node, project: Path, forgets: None):
    text = """FROM template://base AS one
USER root
COPY make.py tell.py /
RUN python3 /make.py && python3 /tell.py /made > /facts.json
FROM template://base
USER root
COPY --from=one /made /copy
COPY --from=one /facts.json /tell.py /
COPY ctx /ctx
"""
    done = build(node, project, text)
    assert done.stdout == f"local/{NAME}\n", done.stderr
    made = Sandbox.create(NAME, timeout=600, **node.options)
    try:
        expected = json.loads(made.files.read("/facts.json", user="root"))
        found = json.loads(made.commands.run("python3 /tell.py /copy", user="root").stdout)
        assert len(expected) == 10
        for name in expected:
            assert found[name] == expected[name], name
        assert set(found) == set(expected)
        sent = json.loads(made.commands.run("python3 /tell.py /ctx", user="root").stdout)
        assert sent["kept.txt"][3:5] == [1_500_000_000_000_000_009, {"user.sent": "ff0a31"}]
        assert (sent["kept.txt"][6], sent["second"][6]) == (2, 2), "two names of one file"
    finally:
        made.kill()


MOUNTS = """FROM template://base AS seed
USER root
RUN mkdir /seed && echo seeded > /seed/file && chown 5:6 /seed/file
FROM template://base
USER root
RUN --mount=src=ctx,target=/in/ctx --mount=from=seed,source=/seed,target=/from,rw --mount=type=secret,id=token \\
    --mount=type=secret,id=token,env=TOKEN --mount=type=tmpfs,target=/mem,size=4m --mount=type=secret,id=none <<EOF
set -e
{ ! echo x > /in/ctx/new; } 2>/dev/null
cat /in/ctx/kept.txt > /told
echo changed > /from/file && cat /from/file >> /told
stat -c '%U %a' /run/secrets/token >> /told
test "$(cat /run/secrets/token)" = "$TOKEN" && echo "$TOKEN" | wc -c >> /told
echo "printed: $TOKEN"
test ! -e /run/secrets/none
stat -f -c %T /mem >> /told
EOF
RUN test ! -e /in && test ! -e /from && test ! -e /mem && test ! -e /run/secrets/token && ! ls -d /.aenv*
RUN --mount=type=cache,id=CACHE-ID,target=/cache,uid=77,sharing=locked \\
    stat -c '%u' /cache > /cached; cat /cache/count >> /cached; echo TURN >> /cache/count
"""


def test_mounts_of_run(node: Node, project: Path, forgets: None, tmp_path: Path):
    secret = "Zx9-" + os.urandom(8).hex()
    (tmp_path / "token").write_text(secret)
    text = MOUNTS.replace("CACHE-ID", f"e2e-{secret[4:10]}")
    done = build(node, project, text.replace("TURN", "one"), "--secret", f"id=token,src={tmp_path / 'token'}")
    assert secret not in done.stderr
    assert "printed: ***" in done.stderr
    (tmp_path / "token").write_text("another one")
    again = build(node, project, text.replace("TURN", "two"), "--secret", f"id=token,src={tmp_path / 'token'}")
    assert again.stderr.count(" CACHED") >= 4, "what a secret holds is no part of a step's key"
    made = Sandbox.create(NAME, timeout=600, **node.options)
    try:
        told = made.files.read("/told", user="root").split()
        assert told == ["from", "the", "context", "changed", "root", "400", str(len(secret) + 1), "tmpfs"]
        assert made.files.read("/cached", user="root").split() == ["77", "one"], "what the first build left"
        gone = made.commands.run("ls /in /from /mem /cache 2>&1; true", user="root").stdout
        assert gone.count("No such file") == 4, gone
    finally:
        made.kill()
    kept = [str(node.home / "builds"), str(node.home / "log"), str(node.home / "node.db")]
    found = subprocess.run(["grep", "-rlaF", secret, *kept], capture_output=True, text=True, check=False)
    assert found.stdout == "", "the secret is kept nowhere"
    failed = build(node, project, "FROM template://base\nRUN --mount=type=secret,id=gone,required true", check=False)
    assert "Dockerfile:2: " in failed.stderr
    assert "--secret id=gone" in failed.stderr


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "site"
    folder.mkdir()
    with served(partial(Quiet, directory=str(folder))) as host:
        yield f"http://{host}", folder


def test_add_fetches_files_and_repositories(node: Node, project: Path, forgets: None, site: tuple[str, Path], tmp_path: Path):
    url, folder = site
    (folder / "tool.bin").write_bytes(b"a tool")
    os.utime(folder / "tool.bin", (1_600_000_000, 1_600_000_000))
    shutil.make_archive(str(folder / "parts"), "gztar", project / "ctx")
    work = tmp_path / "work"
    subprocess.run(["git", "init", "-q", "-b", "main", str(work)], check=True)
    (work / "sub").mkdir()
    (work / "sub" / "file").write_text("of the repository")
    git = ["git", "-C", str(work), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(folder / "repo.git")], check=True)
    subprocess.run(["git", "-C", str(folder / "repo.git"), "update-server-info"], check=True)
    digest = hashlib.sha256(b"a tool").hexdigest()
    text = f"""FROM template://base
USER root
ADD {url}/tool.bin {url}/parts.tar.gz /add/
ADD --checksum=sha256:{digest} --chmod=u=rx,go= --chown=5:6 {url}/tool.bin /renamed
ADD --unpack {url}/parts.tar.gz /unpacked
ADD {url}/repo.git#main:sub /repo
"""
    build(node, project, text)
    made = Sandbox.create(NAME, timeout=600, **node.options)
    try:
        told = made.commands.run(
            "cd /; stat -c '%a %u %g %Y %n' add/tool.bin renamed; ls add unpacked repo; cat repo/file", user="root"
        ).stdout.splitlines()
    finally:
        made.kill()
    assert told == [
        *("600 0 0 1600000000 add/tool.bin", "500 5 6 1600000000 renamed"),
        *("add:", "parts.tar.gz", "tool.bin", "", "repo:", "file", "", "unpacked:", "kept.txt", "second", "of the repository"),
    ]
    failed = build(node, project, f"FROM template://base\nADD --checksum=sha256:{'0' * 64} {url}/tool.bin /x\n", check=False)
    assert f"has the checksum sha256:{digest}" in failed.stderr
