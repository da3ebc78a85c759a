"""Talks to `blockd` over its Unix socket. One method per route of its API (`native/crates/blockd/src/api`).

Calls are idempotent by the ids the caller chooses, so a call whose answer was lost may be repeated. Errors of blockd
come back as classes of `core.errors`, decided by its stable `code`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpcore

from agentenv.core import errors
from agentenv.host.http_limits import all_within

T = TypeVar("T")
PROTOCOL = 1
_HEADERS: dict[bytes | str, bytes | str] = {"Host": "blockd", "Content-Type": "application/json", "Accept": "*/*"}
_IDLE_S = 5.0  # after which a connection is not used again
_DEADLINE_S = 30.0  # opening 255 layers from a cold disk takes a few seconds at most
_ALL = 1 << 62  # more bytes than any cache has
_COPY_DEADLINE_S = 600.0  # captures, imports and commits copy up to the size of a disk

_BY_CODE: dict[str, type[errors.AgentEnvError]] = {
    "not_found": errors.NotFound,
    "invalid_input": errors.InvalidInput,
    "conflict": errors.Conflict,
    "busy": errors.Conflict,
    "storage_full": errors.StorageFull,
    "corrupt": errors.DataCorrupt,
    "denied": errors.PermissionDenied,
    "unavailable": errors.Unavailable,
}


@dataclass(frozen=True, slots=True)
class Upper:
    """The two files of a writable layer."""

    data: Path
    index: Path


@dataclass(frozen=True, slots=True)
class Stack:
    """An opened stack of layers: `path` is a device or file for the VMM."""

    stack_id: str
    path: Path
    virtual_size_bytes: int
    open_handles: int
    upper_data_bytes: int
    lowers: tuple[Path, ...]
    upper: Path | None
    waits_for_room: bool = False
    """Whether writes of a device are kept until there is room on the host's disk."""

    @property
    def is_device(self) -> bool:
        """Whether it is a block device, which outlives a kill of blockd; else a file, which does not."""
        return self.path.parent == Path("/dev")

    @property
    def files(self) -> tuple[Path, ...]:
        """The data files it is made of."""
        return self.lowers if self.upper is None else (*self.lowers, self.upper)


@dataclass(frozen=True, slots=True)
class RemoteBlob:
    """A layer in a registry: `<blobs_url>/<digest>` is its address."""

    blobs_url: str
    digest: str
    size_bytes: int
    check_certificate: bool = True


@dataclass(frozen=True, slots=True)
class Written:
    """A layer file just written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Capture:
    """What a memory capture wrote."""

    size_bytes: int
    pages: int
    zero_pages: int
    stored_pages: int
    find_us: int
    copy_us: int


class BlockClient:
    """Client of one blockd. Keeps a few connections; `close` it in the end."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._has_devices = False  # as the last `info` said
        self.fills_memory = False  # likewise: one of an earlier version, which has run on, cannot
        self._http = httpcore.AsyncConnectionPool(uds=str(socket), max_connections=32, keepalive_expiry=_IDLE_S)

    async def info(self, deadline_s: float = 5.0) -> dict[str, Any]:
        """Program, version, protocol and mount of the running blockd. Unavailable when it does not answer."""
        info = await self._call("GET", "/v1/info", dict, deadline_s=deadline_s)
        self._has_devices = "ublk" in info.get("exports", ())
        self.fills_memory = bool(info.get("fills_memory"))
        return info

    async def open(
        self,
        stack_id: str,
        lowers: Sequence[Path],
        upper: Upper | None,
        virtual_size_bytes: int | None,
        cache: str,
        export: Literal["fuse", "ublk", "auto"] | None = None,
        owner: tuple[int, int] | None = None,
        records_zeros: bool = False,
    ) -> Stack:
        """Open layers (bottom first) as one device. `cache`: `page` for shared memory, `direct` for disks.

        A disk is a block device (ublk) where the host has them, and goes on over a kill of blockd; memory is a file, which many map.
        `export` and `owner` (user, group, of a file) are for a VMM that needs them otherwise; `records_zeros` is for memory that a VMM
        writes: pages of zeros take no room.
        A new upper overwrites in place what it has already, so that a guest which writes for ever does not fill the host's disk.
        """
        body: dict[str, Any] = {
            "lowers": [str(path) for path in lowers],
            "upper": None if upper is None else {"data": str(upper.data), "index": str(upper.index)},
            "upper_layout": "hybrid",
            "virtual_size_bytes": virtual_size_bytes,
            "cache": cache,
        }
        if export is None and cache == "direct" and self._has_devices:
            export = "auto"
        if export is not None:
            body["export"] = export
        if owner is not None:
            body["owner"] = {"uid": owner[0], "gid": owner[1]}
        if records_zeros:
            body["records_zeros"] = True
        return await self._call("PUT", f"/v1/stacks/{stack_id}", _stack, body)

    async def stacks(self) -> list[Stack]:
        """Every open stack."""
        return await self._call("GET", "/v1/stacks", lambda reply: [_stack(item) for item in reply["stacks"]])

    async def seal(self, stack_id: str, fresh: Upper, sync: bool = False) -> Stack:
        """Make the upper the newest immutable layer and go on with a fresh one, in O(index). Returns the stack as it is then."""
        body = {"upper": {"data": str(fresh.data), "index": str(fresh.index)}, "sync": sync}
        return await self._call("POST", f"/v1/stacks/{stack_id}/seal", lambda reply: _stack(reply["stack"]), body, _COPY_DEADLINE_S)

    async def replace(self, stack_id: str, lowers: Sequence[Path], replacement: Path) -> Stack:
        """Read sealed layers that lie one upon the other from one layer that reads the same (a commit of them) from now on.

        Conflict when the stack does not have them so. A repeated call changes nothing.
        """
        body = {"lowers": [str(path) for path in lowers], "replacement": str(replacement)}
        return await self._call("POST", f"/v1/stacks/{stack_id}/replace", _stack, body, _COPY_DEADLINE_S)

    async def flush(self, stack_id: str) -> None:
        """Make everything written so far durable."""
        await self._call("POST", f"/v1/stacks/{stack_id}/flush", _nothing)

    async def close_stack(self, stack_id: str, force: bool = False) -> None:
        """Close a stack; no error when it is not open. Conflict while someone has it open, unless `force`."""
        try:
            await self._call("DELETE", f"/v1/stacks/{stack_id}" + ("?force=true" if force else ""), _nothing)
        except errors.NotFound:
            return

    async def capture(self, pid: int, stack_id: str, output: Path, sync: bool = False) -> Capture:
        """Write the pages of `pid`'s private mapping of `stack_id` that diverged from it into one new layer."""
        body = {"pid": pid, "stack": stack_id, "output": str(output), "sync": sync}
        return await self._call("POST", "/v1/captures", _capture, body, _COPY_DEADLINE_S)

    async def fill(self, pid: int, stack_id: str, layers: Sequence[Path]) -> int:
        """Write what `layers`, which lie upon `stack_id`, hold into `pid`'s private mapping of it, which then reads as all of them.

        Its guest must not run yet. Returns the bytes written. Only if `fills_memory`.
        """
        body = {"pid": pid, "stack": stack_id, "layers": [str(path) for path in layers]}
        return await self._call("POST", "/v1/fills", lambda reply: int(reply["bytes"]), body, _COPY_DEADLINE_S)

    async def import_raw(self, source: Path, output: Path) -> int:
        """Turn a raw disk image into a sealed layer without its zero blocks. Returns the layer's size in bytes."""
        body = {"source": str(source), "output": str(output), "virtual_size_bytes": None}
        return await self._call("POST", "/v1/imports", _size, body, _COPY_DEADLINE_S)

    async def commit(self, lowers: Sequence[Path], output: Path) -> int:
        """Flatten sealed layers into one. Returns its size in bytes."""
        body = {"lowers": [str(path) for path in lowers], "output": str(output), "sync": False}
        return await self._call("POST", "/v1/commits", _size, body, _COPY_DEADLINE_S)

    async def pack(self, layer: Path, output: Path) -> Written:
        """Write one layer as overlaybd images have it: by lz4, in a tar archive, with its own identity. Equal layers give equal files."""
        compression = {"algorithm": "lz4", "block_bytes": 4096}
        body = {"lowers": [str(layer)], "output": str(output), "compression": compression, "tar": True, "keep_uuid": True}
        return await self._call(
            "POST", "/v1/commits", lambda reply: Written(int(reply["size_bytes"]), str(reply["sha256"])), body, _COPY_DEADLINE_S
        )

    async def add_remote(self, output: Path, blob: RemoteBlob, login: tuple[str, str] | None = None) -> int:
        """Make a layer file that is read from a registry as needed; returns the size of its disk in bytes.

        `login` (user, password) stays in blockd's memory; without one, docker's config counts. A repeated call changes nothing, but for
        the login. PermissionDenied, NotFound, Unavailable, DataCorrupt (no layer, or another one).
        """
        body = {
            "output": str(output),
            "blobs_url": blob.blobs_url,
            "digest": blob.digest,
            "size_bytes": blob.size_bytes,
            "check_certificate": blob.check_certificate,
            "login": None if login is None else {"username": login[0], "password": login[1]},
        }
        return await self._call("POST", "/v1/remotes", lambda reply: int(reply["virtual_size_bytes"]), body)

    async def remotes(self) -> dict[str, Any]:
        """The layers in registries that are open, with the bytes fetched of each, and figures of the block cache."""
        return await self._call("GET", "/v1/remotes", dict)

    async def shrink_cache(self, size_bytes: int, dry_run: bool = False) -> int:
        """Take blocks of remote layers out of their cache, the coldest first, until they make `size_bytes`; returns the bytes freed.

        A blockd without such a cache, or of an earlier version that has run on, frees none. A dry run tells what would go.
        """
        body = {"bytes": min(size_bytes, _ALL)}
        try:
            if dry_run:
                return min(size_bytes, int((await self.remotes())["cache"]["used_bytes"]))
            return await self._call("POST", "/v1/remotes/shrink", lambda reply: int(reply["freed_bytes"]), body)
        except (errors.NotFound, errors.InvalidInput):
            return 0

    async def shutdown(self, force: bool = False) -> None:
        """Flush everything, unmount and exit. Conflict while devices are in use, unless `force`."""
        await self._call("POST", "/v1/shutdown", _nothing, {"force": force})

    async def close(self) -> None:
        """Close the client's connections."""
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, parse: Callable[[Any], T], body: dict[str, Any] | None = None, deadline_s: float = _DEADLINE_S
    ) -> T:
        content = b"" if body is None else json.dumps(body).encode()
        limits = {"timeout": all_within(deadline_s)}
        try:
            reply = await self._http.request(method, f"http://blockd{path}", headers=_HEADERS, content=content, extensions=limits)
        except httpcore.TimeoutException as error:
            raise errors.DeadlineExceeded(f"blockd did not answer {method} {path} within {deadline_s:g} s", "see blockd.log") from error
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise errors.Unavailable(
                f"blockd does not answer on {self.socket}: {error}",
                "the server starts it again: try again in a moment; if it repeats, see blockd.log",
            ) from error
        if reply.status >= 300:
            raise _error(reply)
        try:
            return parse(json.loads(reply.content) if reply.content else {})
        except (ValueError, KeyError, TypeError) as error:
            raise errors.Internal(
                f"blockd's answer to {method} {path} is not what this server expects: {_start(reply)}", "run both of one version"
            ) from error


def _start(reply: httpcore.Response) -> str:
    return reply.content[:200].decode(errors="replace")


def _error(reply: httpcore.Response) -> errors.AgentEnvError:
    try:
        body = json.loads(reply.content)
        cls = _BY_CODE.get(body["code"], errors.Internal)
        return cls(f"blockd: {body['message']}", body.get("hint", ""))
    except (ValueError, KeyError, TypeError):
        return errors.Internal(f"blockd answered {reply.status}: {_start(reply)}")


def _nothing(_reply: Any) -> None:
    """For calls whose answer says only that they worked."""


def _size(reply: dict[str, Any]) -> int:
    return int(reply["size_bytes"])


def _capture(reply: dict[str, Any]) -> Capture:
    return Capture(**{name: int(reply[name]) for name in Capture.__slots__})


def _stack(item: dict[str, Any]) -> Stack:
    return Stack(
        stack_id=item["id"],
        path=Path(item["path"]),
        virtual_size_bytes=int(item["virtual_size_bytes"]),
        open_handles=int(item["open_handles"]),
        upper_data_bytes=int(item["upper_data_bytes"] or 0),
        lowers=tuple(Path(path) for path in item["lowers"]),
        upper=Path(item["upper"]["data"]) if item["upper"] else None,
        waits_for_room=bool(item.get("waits_for_room")),  # a blockd from before an upgrade does not say
    )
