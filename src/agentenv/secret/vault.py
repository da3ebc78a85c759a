"""The secrets of a node: named values, encrypted at rest, write-only for callers (contract section 2.9).

Values are sealed with AES-256-GCM under the node's key file, bound to their secret and version, so that no stored value
can be passed off as another. A value is in clear only in `reveal`, for whoever fills it in on a sandbox's behalf, and is
never logged. Only the newest version is kept.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from agentenv.core.clock import Clock
from agentenv.core.errors import Conflict, DataCorrupt, InvalidInput, LimitReached, NotFound
from agentenv.core.ids import SECRET_ID_PREFIX, new_entropy, new_secret_id
from agentenv.core.model import Secret
from agentenv.host import files
from agentenv.store.shelf import Shelf

SECRETS_MAX = 10_000
NAME_MAX_BYTES = 256
VALUE_MAX_BYTES = 8192  # what a header can carry, which is where values go
METADATA_ENTRIES_MAX = 32
METADATA_KEY_MAX_BYTES = 128
METADATA_VALUE_MAX_BYTES = 1024
METADATA_MAX_BYTES = 8192
_UNUSABLE = re.compile(r"[{}\x00-\x1f\x7f-\x9f]")  # a name stands in `${e2b.secrets.<name>}`
_KEY_BYTES, _NONCE_BYTES = 32, 12


class Vault:
    """All secrets of one node. The key file is made with the first secret."""

    def __init__(self, shelf: Shelf[Secret], key_file: Path, clock: Clock) -> None:
        self._shelf = shelf
        self._key_file = key_file
        self._clock = clock
        self._changing = asyncio.Lock()  # names stay unique, versions grow by one

    def all(self) -> list[Secret]:
        """Every secret, oldest first."""
        return self._shelf.all()

    def find(self, reference: str) -> Secret:
        """A secret by id or name. NotFound."""
        found = self._shelf.get(reference) or self._named(_canonical(reference))
        if found is None:
            raise NotFound(f"secret '{reference[:80]}' not found", "`aenv secret ls` lists them")
        return found

    async def create(self, name: str, value: str, metadata: Mapping[str, str]) -> Secret:
        """A new secret, version 1. InvalidInput, Conflict (the name is taken), LimitReached."""
        name = _checked_name(name)
        _check_value(value)
        _check_metadata(metadata)
        async with self._changing:
            if self._named(name) is not None:
                raise Conflict(f"secret '{name}' exists already", "update it, or choose another name")
            if len(self._shelf.all()) >= SECRETS_MAX:
                raise LimitReached(f"the node has {SECRETS_MAX} secrets", "delete some that nobody needs")
            now_ms = self._clock.now_ms()
            secret = Secret(new_secret_id(), name, 1, "", dict(metadata), now_ms, now_ms)
            return await self._store(secret, value)

    async def update(self, reference: str, value: str, metadata: Mapping[str, str] | None) -> Secret:
        """Another value under the next version; `metadata` None keeps what is stored. NotFound, InvalidInput."""
        _check_value(value)
        if metadata is not None:
            _check_metadata(metadata)
        async with self._changing:
            old = self.find(reference)
            kept = old.metadata if metadata is None else dict(metadata)
            return await self._store(replace(old, version=old.version + 1, metadata=kept, updated_at_ms=self._clock.now_ms()), value)

    async def delete(self, reference: str) -> None:
        """Forget a secret and its value. NotFound."""
        async with self._changing:
            await self._shelf.remove(self.find(reference).secret_id)

    async def reveal(self, reference: str) -> str:
        """The newest value in clear, to be filled in where no caller sees it. NotFound, DataCorrupt."""
        secret = self.find(reference)
        key = await asyncio.to_thread(self._key, False)
        try:
            sealed = base64.b64decode(secret.sealed, validate=True)
            return AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _bound_to(secret)).decode()
        except (InvalidTag, binascii.Error, ValueError) as error:
            raise DataCorrupt(
                f"the value of secret '{secret.name}' cannot be read with the key in {self._key_file}",
                "restore the key, or update the secret",
            ) from error

    async def _store(self, secret: Secret, value: str) -> Secret:
        key = await asyncio.to_thread(self._key, not self._shelf.all())
        nonce = new_entropy(_NONCE_BYTES)
        sealed = nonce + AESGCM(key).encrypt(nonce, value.encode(), _bound_to(secret))
        secret = replace(secret, sealed=base64.b64encode(sealed).decode())
        await self._shelf.put(secret)
        return secret

    def _key(self, make: bool) -> bytes:
        """The node's key; made only when no secret depends on an older one."""
        try:
            key = self._key_file.read_bytes()
        except FileNotFoundError as error:
            if not make:
                raise DataCorrupt(
                    f"{self._key_file}, which the secrets are encrypted with, is missing", "restore it from a copy"
                ) from error
            key = AESGCM.generate_key(8 * _KEY_BYTES)
            files.write_atomic(self._key_file, key, 0o600)
        if len(key) != _KEY_BYTES:
            raise DataCorrupt(f"{self._key_file} holds {len(key)} bytes, a key has {_KEY_BYTES}", "restore it from a copy")
        return key

    def _named(self, name: str) -> Secret | None:
        return next((secret for secret in self._shelf.all() if secret.name == name), None)


def _canonical(name: str) -> str:
    """Names are kept, and found, in lower case."""
    return name.lower()


def _checked_name(name: str) -> str:
    if not name or _UNUSABLE.search(name):
        raise InvalidInput("name: must not be empty or hold {, } or control characters", "it stands in ${e2b.secrets.<name>}")
    canonical = _canonical(name)
    if canonical.startswith(SECRET_ID_PREFIX):
        raise InvalidInput(f"name: must not begin with {SECRET_ID_PREFIX}", "ids of secrets begin so")
    if len(canonical.encode()) > NAME_MAX_BYTES:
        raise InvalidInput(f"name: longer than {NAME_MAX_BYTES} bytes")
    return canonical


def _check_value(value: str) -> None:
    if not value:
        raise InvalidInput("value: must not be empty", "delete the secret to be rid of it")
    if (size_bytes := len(value.encode())) > VALUE_MAX_BYTES:
        raise InvalidInput(f"value: {size_bytes} bytes are more than {VALUE_MAX_BYTES}")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > METADATA_ENTRIES_MAX:
        raise InvalidInput(f"metadata: {len(metadata)} entries are more than {METADATA_ENTRIES_MAX}")
    total_bytes = 0
    for key, value in metadata.items():
        key_bytes, value_bytes = len(key.encode()), len(value.encode())
        total_bytes += key_bytes + value_bytes
        if not key or key_bytes > METADATA_KEY_MAX_BYTES:
            raise InvalidInput(f"metadata: key {key[:40]!r} must have 1 to {METADATA_KEY_MAX_BYTES} bytes")
        if value_bytes > METADATA_VALUE_MAX_BYTES:
            raise InvalidInput(f"metadata: the value of {key!r} has {value_bytes} bytes, more than {METADATA_VALUE_MAX_BYTES}")
    if total_bytes > METADATA_MAX_BYTES:
        raise InvalidInput(f"metadata: {total_bytes} bytes in total are more than {METADATA_MAX_BYTES}")


def _bound_to(secret: Secret) -> bytes:
    return f"{secret.secret_id}:{secret.version}".encode()
