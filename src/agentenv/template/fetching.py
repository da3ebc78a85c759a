"""What ADD fetches: files by HTTP and trees of git repositories, by the node, into a cache of its own.

The node stands in other networks than its guests, so it connects to no address that guests may not reach (`network.denied_cidrs`,
and whatever is not of the public internet), also after redirects and whatever a name resolves to later: the address that was
checked is the one that is dialled. Bounded in time, size, redirects and what is kept.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import ipaddress
import json
import os
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from agentenv.core.errors import DeadlineExceeded, InvalidInput, NotFound, PermissionDenied, Unavailable
from agentenv.host.file_cache import FileCache
from agentenv.host.files import require_free, storage_full
from agentenv.template.dockerfile.actions import Remote
from agentenv.template.dockerfile.remotes import file_name, host_and_port
from agentenv.template.dockerfile.supply import Fetched
from agentenv.template.git_fetch import GitFetch
from agentenv.template.tarballs import ArchiveWriter

_REDIRECTS_MAX = 10
_CONNECT_S = 30.0
_IDLE_S = 60.0  # between two pieces of an answer
_FILE_MODE = 0o600  # as BuildKit has it


@dataclass(frozen=True, slots=True)
class FetchRules:
    """Where the node may fetch from, and how much. `private` hosts (`host[:port]`) may be in `denied` networks."""

    denied: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]
    private: frozenset[str]
    file_max_bytes: int
    all_max_bytes: int
    reserve_bytes: int
    deadline_s: float

    def check(self, host: str, port: int, address: str) -> None:
        """PermissionDenied unless that address may be dialled."""
        if host in self.private or f"{host}:{port}" in self.private:
            return
        found = ipaddress.ip_address(address.partition("%")[0])
        plain = found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
        if (
            not plain.is_global
            or plain.is_multicast
            or any(plain in network for network in self.denied if network.version == plain.version)
        ):
            raise PermissionDenied(
                f"{host} is at {address}, a network that builds may not reach",
                f"an operator may allow {host}:{port} by limits.build_fetch_private",
            )


class Fetcher:
    """Fetches for the builds of a node."""

    def __init__(self, folder: Path, rules: FetchRules) -> None:
        self._rules = rules
        self.files = FileCache("build download", folder, 0.0)
        self._locks: dict[str, asyncio.Lock] = {}

    async def fetch(self, remote: Remote, scratch: Path, say: Callable[[str], object]) -> Fetched:
        """What is there now, as an archive in `scratch`, which is the caller's. What is cached and still current is not sent again.

        NotFound, PermissionDenied, InvalidInput (checksum, too large), Unavailable, DeadlineExceeded, HostNotReady (no git).
        """
        lock = self._locks.setdefault(remote.url, asyncio.Lock())
        try:
            async with asyncio.timeout(self._rules.deadline_s), lock:
                if remote.kind == "git":
                    addresses = await resolved(*host_and_port(remote.url), self._rules)
                    fetch = GitFetch(remote, scratch, addresses, self._rules.file_max_bytes, self._rules.deadline_s)
                    return await fetch.run(say)
                return await self._file(remote, scratch, say)
        except TimeoutError as error:
            message = f"{remote.url} did not arrive within {self._rules.deadline_s:g} s"
            raise DeadlineExceeded(message, "try again, or raise limits.build_fetch_s") from error
        finally:
            if not lock.locked():
                self._locks.pop(remote.url, None)

    async def _file(self, remote: Remote, scratch: Path, say: Callable[[str], object]) -> Fetched:
        known = await asyncio.to_thread(self._known, remote)
        if known is not None and remote.checksum and known["sha256"] != remote.checksum:
            known = None
        place = self.files.folder / (known["sha256"] if known else "none")
        with self.files.using(place):
            if known is None or not remote.checksum:
                known = await self._get(remote, known, say)
                place = self.files.folder / known["sha256"]
            return await asyncio.to_thread(self._archived, remote, known, place, scratch)

    def _known(self, remote: Remote) -> dict[str, Any] | None:
        """What is known of a URL, if its content is still there."""
        try:
            known: dict[str, Any] = json.loads(self._note(remote).read_text())
            self.files.touch(self.files.folder / known["sha256"])
            self.files.touch(self._note(remote))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return known

    def _note(self, remote: Remote) -> Path:
        return self.files.folder / f"{hashlib.sha256(remote.url.encode()).hexdigest()}.json"

    async def _get(self, remote: Remote, known: dict[str, Any] | None, say: Callable[[str], object]) -> dict[str, Any]:
        headers = {"Accept-Encoding": "identity", "User-Agent": "agentenv"}
        if known is not None and known.get("etag"):
            headers["If-None-Match"] = known["etag"]
        url = remote.url
        async with httpcore.AsyncConnectionPool(network_backend=_CheckedBackend(self._rules), retries=1) as pool:
            for _ in range(_REDIRECTS_MAX):
                say(f"fetch {url}")
                try:
                    async with pool.stream("GET", url, headers=list(headers.items()), extensions={"timeout": _timeouts()}) as reply:
                        head = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reply.headers}
                        if reply.status in (301, 302, 303, 307, 308) and "location" in head:
                            url = _redirected(url, head["location"])
                            continue
                        if reply.status == 304 and known is not None:
                            return known
                        _check_status(reply.status, remote.url)
                        return await self._receive(remote, reply.aiter_stream(), head)
                except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
                    raise Unavailable(f"{url} could not be fetched: {error or type(error).__name__}", "try again") from error
        raise Unavailable(f"{remote.url} redirects more than {_REDIRECTS_MAX} times")

    async def _receive(self, remote: Remote, chunks: Any, head: dict[str, str]) -> dict[str, Any]:
        folder, limit_bytes = self.files.folder, self._rules.file_max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        declared = int(head["content-length"]) if head.get("content-length", "").isdecimal() else None
        if declared is not None and declared > limit_bytes:
            raise _too_large(remote, limit_bytes)
        require_free(folder, self._rules.reserve_bytes + (declared or 0), "a fetched file")
        digest, size_bytes = hashlib.sha256(), 0
        with storage_full("a fetched file"), tempfile.NamedTemporaryFile(dir=folder, prefix=".fetch-", delete=False) as file:
            partial = Path(file.name)
            try:
                async for chunk in chunks:
                    size_bytes += len(chunk)
                    if size_bytes > limit_bytes:
                        raise _too_large(remote, limit_bytes)
                    digest.update(chunk)
                    await asyncio.to_thread(file.write, chunk)
                if declared is not None and size_bytes != declared:
                    raise Unavailable(f"{remote.url} sent {size_bytes} of {declared} bytes", "try again")
                found = digest.hexdigest()
                if remote.checksum and found != remote.checksum:
                    raise InvalidInput(f"{remote.url} has the checksum sha256:{found}, not sha256:{remote.checksum}")
                file.flush()
                partial.replace(folder / found)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        known = {"sha256": found, "etag": head.get("etag", ""), "mtime_s": _time(head.get("last-modified", ""))}
        self._note(remote).write_text(json.dumps(known))
        await asyncio.to_thread(self.files.trim, self._rules.all_max_bytes, (folder / found, self._note(remote)))
        return known

    def _archived(self, remote: Remote, known: dict[str, Any], place: Path, scratch: Path) -> Fetched:
        name, archive = file_name(remote.url), scratch / f"{len(list(scratch.iterdir()))}.tar"
        with place.open("rb") as content, archive.open("wb") as file, ArchiveWriter(file) as written:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = os.fstat(content.fileno()).st_size, _FILE_MODE, int(known["mtime_s"])
            written.add(info, content)
        return Fetched(archive, name, f"sha256:{known['sha256']} {known['mtime_s']}")


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Dials only addresses that the rules allow, and those it has checked."""

    def __init__(self, rules: FetchRules) -> None:
        self._rules, self._backend = rules, httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in await resolved(host, port, self._rules):
            try:
                return await self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def sleep(self, seconds: float) -> None:
        """As the library asks for it."""
        await asyncio.sleep(seconds)


async def resolved(host: str, port: int, rules: FetchRules) -> Sequence[str]:
    """The addresses of a host, each checked. Unavailable, PermissionDenied."""
    host = host.strip("[]")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unavailable(f"{host} cannot be found: {error.strerror}", "see whether the name is right") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        rules.check(host, port, address)
    return addresses


def _redirected(url: str, location: str) -> str:
    target = urljoin(url, location)
    if urlsplit(target).scheme not in ("http", "https"):
        raise Unavailable(f"{url} redirects to {target[:200]!r}, which is not fetched")
    return target


def _check_status(status: int, url: str) -> None:
    if status in (401, 403):
        raise PermissionDenied(f"{url} answered {status}", "fetch it in a RUN with --mount=type=secret for its credentials")
    if status in (404, 410):
        raise NotFound(f"{url} answered {status}", "see that the URL is right")
    if status != 200:
        raise Unavailable(f"{url} answered {status}", "try again")


def _too_large(remote: Remote, limit_bytes: int) -> InvalidInput:
    return InvalidInput(f"{remote.url} has more than {limit_bytes >> 20} MiB", "raise limits.build_file_mb")


def _timeouts() -> dict[str, float]:
    return {"connect": _CONNECT_S, "read": _IDLE_S, "write": _IDLE_S, "pool": _CONNECT_S}


def _time(text: str) -> int:
    """Seconds since the epoch; 0 where the server says none."""
    try:
        return max(0, int(email.utils.parsedate_to_datetime(text).timestamp()))
    except (TypeError, ValueError):
        return 0
