"""What template builds have a guest's agent do to its disk, so that nothing of it depends on programs of the image.

Host-internal calls of envd below `/provision` (see `native/crates/envd/src/provision`); a guest with a token takes them, too, from
the host alone.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

from agentenv.core.errors import Internal, InvalidInput, StorageFull, Unsupported

_DEADLINE_S = 120.0  # of a call that moves no files; a guest under emulation with a cold disk takes a second


class Post(Protocol):
    """One POST to a guest's agent: content, or a file of the host. Returns status and body."""

    def __call__(self, namespace: str, target: str, content: bytes | Path, deadline_s: float) -> Awaitable[tuple[int, bytes]]:
        """DeadlineExceeded, Internal (the guest was lost)."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """The numbers of an owner in a guest, and whether a path is a folder there."""

    uid: int
    gid: int
    is_folder: bool


class Provision:
    """Calls of the host to guests that builds run in. What the guest refuses is InvalidInput in its words; a full disk is StorageFull."""

    def __init__(self, post: Post) -> None:
        self._post = post

    async def look(self, namespace: str, owner: str, path: str) -> Place:
        """The numbers of `user` or `user:group`, each a name or a number, and what `path` is."""
        reply = json.loads(await self._call(namespace, "look", {"owner": owner, "path": path}))
        return Place(int(reply["uid"]), int(reply["gid"]), bool(reply["isFolder"]))

    async def grow_disk(self, namespace: str, size_bytes: int) -> None:
        """Have the root file system take a disk that has that size now. Idempotent."""
        await self._call(namespace, "disk", {"sizeBytes": size_bytes})

    async def make_user(self, namespace: str, name: str) -> None:
        """Make a user with a home and a group of its own, unless there is one of that name."""
        await self._call(namespace, "user", {"name": name})

    async def make_folder(self, namespace: str, path: str, uid: int, gid: int) -> None:
        """Make a folder, and those above it that are missing, for that owner. One that is there stays as it is."""
        await self._call(namespace, "folder", {"path": path, "uid": uid, "gid": gid})

    async def unpack(
        self, namespace: str, archive: Path, folder: str, uid: int, gid: int, deadline_s: float, *, is_apart: bool = False
    ) -> None:
        """Unpack an archive of the host below `folder`, which is made like `make_folder` does if it is missing.

        `is_apart`: what is on the disk gives way, and no link of it is followed.
        """
        query = urlencode({"path": folder, "uid": uid, "gid": gid, **({"apart": "true"} if is_apart else {})})
        check(*await self._post(namespace, f"/provision/unpack?{query}", archive, deadline_s))

    async def mount(self, namespace: str, source: str, target: str, *, is_read_only: bool, size_bytes: int, mode: int) -> str:
        """Mount a file or folder of the guest's disk, or an empty folder in memory (no source). Returns what was made for the target."""
        body = {"source": source, "target": target, "isReadOnly": is_read_only, "sizeBytes": size_bytes, "mode": mode}
        return str(json.loads(await self._call(namespace, "mount", body))["made"])

    async def unmount(self, namespace: str, target: str, made: str, folder: str) -> None:
        """Take a mount away, what was `made` for it, and the `folder` of its content. Idempotent."""
        await self._call(namespace, "unmount", {"target": target, "made": made, "folder": folder})

    async def _call(self, namespace: str, call: str, body: dict[str, Any]) -> bytes:
        return check(*await self._post(namespace, f"/provision/{call}", json.dumps(body).encode(), _DEADLINE_S))


def check(status: int, content: bytes) -> bytes:
    """What the agent answered, if it is no failure. InvalidInput, StorageFull, Unsupported, Internal."""
    if 200 <= status < 300:
        return content
    said = message_of(content)
    if status == HTTPStatus.INSUFFICIENT_STORAGE:
        raise StorageFull(f"no room in the guest: {said}", "free some space in it, or make its disk larger")
    if status == HTTPStatus.BAD_REQUEST:
        raise InvalidInput(said)
    if status == HTTPStatus.NOT_FOUND:
        raise Unsupported("the guest's agent is of an older version, which cannot do this", "build the template it starts from again")
    raise Internal(f"the guest's agent answered {status}: {said}")


def message_of(content: bytes) -> str:
    """The message of an error of envd."""
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return repr(content[:200])
