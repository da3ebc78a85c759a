"""Signed file URLs that name no sandbox: with `E2B_SANDBOX_URL` the SDKs build them from that address alone, and whoever follows one sends
no E2B header (contract section 1.2). The signature itself tells the sandbox, because it is keyed by the sandbox's access token.

Invariants:
- Finding a sandbox grants nothing: envd checks the signature again, and its expiry.
- The search takes the same time whether a sandbox is found or not and whichever it is; it looks at no more than
  `SIGNED_CANDIDATES_MAX` sandboxes, a microsecond each, and a node that runs more answers such URLs by host names only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl

from agentenv.proxy.heads import RequestHead

SIGNED_CANDIDATES_MAX: Final = 2000
"""Two milliseconds of work at most, for a request that anyone may send."""
_TARGET_BYTES_MAX: Final = 16 * 1024  # a path of PATH_MAX bytes, each escaped
_FIELDS_MAX: Final = 16
_OPERATIONS = {b"GET": "read", b"HEAD": "read", b"POST": "write"}


@dataclass(frozen=True, slots=True)
class SignedFile:
    """What a signature was made over, but for the token (contract section 3.1)."""

    path: str
    operation: str
    user: str
    signature: str
    expiration: str | None


def parse_signed(head: RequestHead) -> SignedFile | None:
    """What a request's signature speaks of; None if it is no signed request for a file."""
    if not head.target.startswith(b"/files?") or len(head.target) > _TARGET_BYTES_MAX or b"signature=" not in head.target:
        return None
    operation = _OPERATIONS.get(head.method)
    if operation is None:
        return None
    try:
        pairs = parse_qsl(head.target.partition(b"?")[2].decode("ascii"), keep_blank_values=True, max_num_fields=_FIELDS_MAX)
    except ValueError:
        return None
    query: dict[str, str] = {}
    for name, value in pairs:
        query.setdefault(name, value)
    signature = query.get("signature")
    if not signature:
        return None
    return SignedFile(query.get("path", ""), operation, query.get("username", ""), signature, query.get("signature_expiration"))


def signer_of(file: SignedFile, candidates: Iterable[tuple[str, str]]) -> str | None:
    """The id among `candidates` (ids with their tokens) whose token has made the signature, or None."""
    begun = hashlib.sha256(f"{file.path}:{file.operation}:{file.user}:".encode("utf-8", "surrogatepass"))
    end = "" if file.expiration is None else f":{file.expiration}"
    given = file.signature.encode("utf-8", "surrogatepass")
    found: str | None = None
    for sandbox_id, token in candidates:
        digest = begun.copy()
        digest.update(f"{token}{end}".encode("utf-8", "surrogatepass"))
        if hmac.compare_digest(b"v1_" + base64.b64encode(digest.digest()).rstrip(b"="), given):
            found = sandbox_id  # and on, so that the time says nothing about which
    return found
