"""What the TLS listener shows to clients: one context whose certificate is replaced in place, so that no renewal needs a restart.

Invariants: connections made before a renewal go on; a new certificate that cannot be used leaves the old one in place, and the log
says so; HTTP/1.1 is preferred where a client offers both protocols, because it costs us least and loses no client anything.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from agentenv.core.errors import HostNotReady

log = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 3600.0
"""How often certificates are looked at: far below the days by which they are renewed early."""
ALPN = ("http/1.1", "h2")
_Mark = tuple[int, int]


class TlsIdentity:
    """A server context over a certificate chain and key in files; `renew`, if given, brings the files up to date first.

    Raises HostNotReady when they cannot be used.
    """

    def __init__(self, cert_file: Path, key_file: Path, renew: Callable[[], None] | None = None) -> None:
        self._cert_file = cert_file
        self._key_file = key_file
        self._renew = renew
        self._loaded: tuple[_Mark, _Mark] | None = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(list(ALPN))
        self.renew()
        self.load()

    def renew(self) -> None:
        """Bring the files up to date. Blocks for milliseconds. HostNotReady."""
        if self._renew is not None:
            try:
                self._renew()
            except OSError as error:
                raise HostNotReady(
                    f"cannot write the TLS certificate {self._cert_file}: {error.strerror}", "run aenv as root, or make room"
                ) from error

    def load(self) -> bool:
        """Take up the files if they have changed; true if they had. HostNotReady leaves all as it was.

        Call it where connections are accepted: a handshake beside it could find a certificate without its key.
        """
        try:
            marks = (_mark(self._cert_file), _mark(self._key_file))
            if marks == self._loaded:
                return False
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):  # the first is a trial
                context.load_cert_chain(self._cert_file, self._key_file, _no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise HostNotReady(
                f"the TLS certificate {self._cert_file} with the key {self._key_file} cannot be used: {error}",
                "both must be readable PEM files that belong together, the key without a password; see api.tls_cert and api.tls_key",
            ) from error
        self._loaded = marks
        return True


async def keep_fresh(identity: TlsIdentity, interval_s: float = REFRESH_INTERVAL_S) -> None:
    """Look after the certificate for ever; run it as a task on the loop that accepts."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await asyncio.to_thread(identity.renew)
            if identity.load():
                log.info("took up a new TLS certificate")
        except HostNotReady as error:
            log.error("%s; the old certificate stays in use", error.message)


def _mark(path: Path) -> _Mark:
    status = path.stat()
    return status.st_mtime_ns, status.st_ino


def _no_password() -> str:
    raise ValueError("the key is protected by a password")
