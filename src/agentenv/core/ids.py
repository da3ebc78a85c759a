"""Identifiers and secrets, and the only source of randomness.

Formats (contract sections 1.3, 1.6): sandbox ids are `i` and 20 lowercase alphanumerics, without dashes because the
host label is `<port>-<sandboxId>`; API keys are `e2b_` and 40 lowercase hex, which older SDKs insist on.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import uuid

SANDBOX_ID = re.compile(r"^[a-z0-9]{1,64}$")
TEMPLATE_NAME = re.compile(r"^[a-z0-9-_]+$")
TAG = re.compile(r"^[a-z0-9-_.]+$")
CHECKPOINT_ID = re.compile(r"^c[a-z0-9]{20}$")
SECRET_ID_PREFIX = "sec_"
_ALPHABET = string.ascii_lowercase + string.digits


def _random_word(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def new_sandbox_id() -> str:
    """A new sandbox id: `i` + 20 lowercase alphanumerics (103 bits)."""
    return "i" + _random_word(20)


def new_template_id() -> str:
    """A new template id: 20 lowercase alphanumerics."""
    return _random_word(20)


def new_snapshot_id() -> str:
    """A new snapshot id: `s` + 20 lowercase alphanumerics."""
    return "s" + _random_word(20)


def new_checkpoint_id() -> str:
    """A new checkpoint id: `c` + 20 lowercase alphanumerics; no checkpoint's name has that form."""
    return "c" + _random_word(20)


def new_volume_id() -> str:
    """A new volume id: `v` + 20 lowercase alphanumerics; it is also the name of its folder."""
    return "v" + _random_word(20)


def new_secret_id() -> str:
    """A new secret id: `sec_` + 20 lowercase alphanumerics; no secret's name may begin like that (contract section 2.9)."""
    return SECRET_ID_PREFIX + _random_word(20)


def new_layer_id() -> str:
    """A new layer file id, 32 hex digits."""
    return uuid.uuid4().hex


def new_build_id() -> str:
    """A new build id: a UUID in its usual text form (contract section 2.7)."""
    return str(uuid.uuid4())


def new_assignment_id() -> str:
    """Names one event of giving a tag to a build: a UUID (contract section 2.7)."""
    return str(uuid.uuid4())


def new_run_id() -> str:
    """Names one life of a VM (from restore to stop): 8 lowercase alphanumerics, unique among one sandbox's lives."""
    return _random_word(8)


def new_token() -> str:
    """A secret for one sandbox: 64 hex digits. Never shared between forks, never logged."""
    return secrets.token_hex(32)


def new_api_key() -> str:
    """A new API key in the form every E2B SDK release accepts."""
    return "e2b_" + secrets.token_hex(20)


def new_entropy(size_bytes: int = 64) -> bytes:
    """Random bytes for reseeding a guest after a restore."""
    return secrets.token_bytes(size_bytes)


def machine_id(sandbox_id: str) -> str:
    """What `/etc/machine-id` of a sandbox says: its own, and the same after every pause and rollback. 32 hex digits."""
    return hashlib.sha256(f"machine-id {sandbox_id}".encode()).hexdigest()[:32]


def same_secret(left: str, right: str) -> bool:
    """Compare two secrets in constant time."""
    return secrets.compare_digest(left.encode(), right.encode())
