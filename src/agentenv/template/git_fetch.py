"""One fetch of a git repository for ADD, by the host's git: no configuration, hooks, helpers or redirects, one checked address.

Submodules are not fetched: they may lie anywhere.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

from agentenv.core.errors import HostNotReady, Internal, InvalidInput, NotFound
from agentenv.host.command import run_command
from agentenv.template.dockerfile.actions import Remote
from agentenv.template.dockerfile.remotes import host_and_port
from agentenv.template.dockerfile.supply import Fetched
from agentenv.template.tarballs import ArchiveWriter

_TREE = "tree"


class GitFetch:
    """One fetch of a git repository: a revision without history where the server can, in a folder that goes afterwards."""

    def __init__(self, remote: Remote, scratch: Path, addresses: Sequence[str], most_bytes: int, deadline_s: float) -> None:
        self._remote, self._most_bytes, self._deadline_s = remote, most_bytes, deadline_s
        self._url, fragment = urldefrag(remote.url)
        self._revision, _, self._folder = fragment.partition(":")
        self._work = Path(tempfile.mkdtemp(dir=scratch, prefix="git-"))
        self._archive = scratch / f"{self._work.name}.tar"
        host, port = host_and_port(self._url)
        self._scheme = urlsplit(self._url).scheme
        at = ",".join(f"[{address}]" if ":" in address else address for address in addresses)
        self._pin = f"{host}:{port}:{at}"
        self._has_submodules = False

    async def run(self, say: Callable[[str], object]) -> Fetched:
        """Fetch it. HostNotReady (no git), NotFound, InvalidInput (another commit, too large)."""
        if shutil.which("git") is None:
            raise HostNotReady(f"{self._remote.url} is a git repository, and the node has no git", "install git on the node")
        say(f"fetch {self._remote.url}")
        task = asyncio.ensure_future(asyncio.to_thread(self._fetch))
        try:
            fetched = await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise
        if self._has_submodules:
            say(f"{self._remote.url}: its submodules are not fetched")
        return fetched

    def _fetch(self) -> Fetched:
        try:
            self._git("init", "--quiet")
            self._git("remote", "add", "origin", self._url)
            commit = self._checked_out()
            if self._remote.checksum and commit != self._remote.checksum:
                raise InvalidInput(f"{self._remote.url} is at the commit {commit}, not {self._remote.checksum}")
            self._has_submodules = (self._work / _TREE / ".gitmodules").exists()
            self._pack()
            return Fetched(self._archive, "", f"git:{commit} {self._folder}")
        finally:
            shutil.rmtree(self._work, ignore_errors=True)

    def _checked_out(self) -> str:
        wanted = self._revision or "HEAD"
        if wanted.startswith("-") or any(c.isspace() for c in wanted):
            raise InvalidInput(f"{wanted[:80]!r} is no revision of a git repository")
        try:
            self._git("fetch", "--quiet", "--depth=1", "--no-tags", "origin", wanted)
            self._git("checkout", "--quiet", "FETCH_HEAD")
        except Internal:  # a server that sends no single commit, or one that is named by a part of its hash
            try:
                self._git("fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*", "+HEAD:refs/remotes/origin/HEAD")
                self._git("checkout", "--quiet", "--detach", self._found(wanted))
            except Internal as error:
                raise NotFound(
                    f"{self._remote.url} could not be fetched: {error.message}", "see that repository and revision are right"
                ) from error
        return self._git("rev-parse", "HEAD").decode().strip()

    def _found(self, wanted: str) -> str:
        for name in (f"refs/remotes/origin/{wanted}", f"refs/tags/{wanted}", wanted):
            try:
                return self._git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()
            except Internal:
                continue
        raise Internal(f"it has no revision {wanted[:80]!r}")

    def _git(self, *words: str) -> bytes:
        safe = {
            "core.hooksPath": "/dev/null",
            "http.followRedirects": "false",
            "http.curloptResolve": self._pin,
            "http.proxy": "",  # one would dial for us, and not only what was checked
            "credential.helper": "",
            "protocol.allow": "never",
            f"protocol.{self._scheme}.allow": "always",
        }
        options = [word for name, value in safe.items() for word in ("-c", f"{name}={value}")]
        environment = {
            "HOME": str(self._work),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "true",
            "GIT_DIR": str(self._work / _TREE / ".git"),
            "GIT_WORK_TREE": str(self._work / _TREE),
        }
        (self._work / _TREE).mkdir(exist_ok=True)
        bound = ["prlimit", f"--fsize={self._most_bytes}"]  # of a pack: git itself would take whatever comes
        return run_command([*bound, "git", *options, *words], timeout_s=self._deadline_s, cwd=self._work / _TREE, env=environment)

    def _pack(self) -> None:
        """The tree, or a folder of it, as an archive; links inside are links."""
        tree = self._work / _TREE
        top = tree.joinpath(*(part for part in self._folder.split("/") if part not in ("", ".")))
        if ".." in self._folder.split("/") or not top.is_dir() or not top.resolve().is_relative_to(tree.resolve()):
            raise NotFound(f"{self._url} has no folder {self._folder[:200]!r} at {self._revision or 'HEAD'}")
        size_bytes = 0
        with self._archive.open("wb") as file, ArchiveWriter(file) as written:
            for path in sorted(top.rglob("*")):
                name = path.relative_to(top)
                if ".git" in name.parts and not self._remote.keeps_git:
                    continue
                info = tarfile.TarInfo(str(name))
                status = path.lstat()
                info.mode, info.mtime = status.st_mode & 0o777, int(status.st_mtime)
                if path.is_symlink():
                    info.type, info.linkname = tarfile.SYMTYPE, os.fspath(path.readlink())
                    written.add(info)
                elif path.is_dir():
                    info.type = tarfile.DIRTYPE
                    written.add(info)
                else:
                    info.size = status.st_size
                    size_bytes += info.size
                    if size_bytes > self._most_bytes:
                        raise InvalidInput(f"{self._url} has more than {self._most_bytes >> 20} MiB", "raise limits.build_file_mb")
                    with path.open("rb") as content:
                        written.add(info, content)
