"""Who may call: the keys of this node and the check that every route but `/health` starts with.

A key arrives as `X-API-KEY`, or else as `Authorization: Bearer` (contract section 1.4). Keys are found by their SHA-256
and compared in constant time, so neither a wrong key nor its first characters can be told by the clock. Keys are never logged;
a caller is named by `Caller`, the start of that digest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from starlette.requests import Request

from agentenv.api.context import context_of
from agentenv.core.errors import InvalidInput, Unauthenticated
from agentenv.core.ids import same_secret

_log = logging.getLogger(__name__)

Caller = str  # the first 16 hex digits of a key's SHA-256: enough to tell callers apart, useless as a credential
MAX_KEYS = 10_000  # a key file beyond this is a mistake, not a list of people
_KEY_LENGTHS = range(16, 257)
_NEXT_STEP = "put one key per line, `e2b_` and 40 hex digits; lines starting with # are comments"


class KeyRing:
    """The keys that are valid now. Made from a file, it follows changes of that file; a broken change keeps the old keys."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._file: Path | None = None
        self._file_stamp: tuple[int, int, int] | None = None
        self._by_digest = _index(keys)

    @classmethod
    def from_file(cls, file: Path) -> KeyRing:
        """Keys from `file`, one per line. InvalidInput when it is missing, holds no key or a malformed one."""
        ring = cls(_read(file))
        ring._file, ring._file_stamp = file, _stamp(file)
        return ring

    def caller(self, key: str) -> Caller | None:
        """Who presents `key`; None when it is not one of ours."""
        self._follow_file()
        digest = _digest(key)
        known = self._by_digest.get(digest)
        return digest[:16] if known is not None and same_secret(known, key) else None

    def _follow_file(self) -> None:
        if self._file is None:
            return
        stamp = _stamp(self._file)
        if stamp == self._file_stamp:
            return
        self._file_stamp = stamp
        try:
            self._by_digest = _index(_read(self._file))
        except InvalidInput as error:
            _log.error("key file changed but cannot be used, the old keys stay valid: %s", error)
        else:
            _log.info("key file changed, %d keys are valid now", len(self._by_digest))


async def require_key(request: Request) -> Caller:
    """The caller of this request. Unauthenticated without a valid key."""
    key = presented_key(request)
    if not key:
        raise Unauthenticated("no API key in the request", "send it as X-API-KEY, or set E2B_API_KEY for the SDKs")
    caller = context_of(request).keys.caller(key)
    if caller is None:
        raise Unauthenticated("the API key is not valid on this node", "use a key from the node's key file")
    request.state.caller = caller
    return caller


def presented_key(request: Request) -> str:
    """The key in a request's headers, checked by nobody yet; empty when there is none."""
    if key := request.headers.get("x-api-key", "").strip():
        return key
    return bearer_token(request)


def bearer_token(request: Request) -> str:
    """What the request carries as `Authorization: Bearer`, or an empty text."""
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _index(keys: Iterable[str]) -> dict[str, str]:
    return {_digest(key): key for key in keys}


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _read(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise InvalidInput(f"key file {file} cannot be read: {error.strerror}", _NEXT_STEP) from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"key file {file} holds bytes that no key may have", _NEXT_STEP) from error
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) not in _KEY_LENGTHS or not key.isprintable() or " " in key:
            raise InvalidInput(f"key file {file} line {number}: a key is 16 to 256 printable characters without spaces", _NEXT_STEP)
        keys.append(key)
    if not keys:
        raise InvalidInput(f"key file {file} holds no key", _NEXT_STEP)
    if len(keys) > MAX_KEYS:
        raise InvalidInput(f"key file {file} holds {len(keys)} keys, more than {MAX_KEYS}", "remove the ones nobody uses")
    return keys
