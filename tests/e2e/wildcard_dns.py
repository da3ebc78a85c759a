"""A name server for one domain, and programs that use it: what a wildcard record does, for the length of a test."""

from __future__ import annotations

import contextlib
import shlex
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ADDRESS = "127.83.66.88"
"""Of its own, so that no other name server of the machine is in the way; resolvers ask port 53 only."""
_A = 1


class WildcardDns:
    """Answers every name under `domain` with 127.0.0.1, all others with NXDOMAIN."""

    def __init__(self, domain: str, folder: Path) -> None:
        self._suffix = f".{domain}"
        self._resolv = folder / "resolv.conf"
        self._resolv.write_text(f"nameserver {ADDRESS}\noptions timeout:2 attempts:5\n")
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((ADDRESS, 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                query, peer = self._socket.recvfrom(4096)
                self._socket.sendto(self._answer(query), peer)

    def _answer(self, query: bytes) -> bytes:
        labels, pos = [], 12
        while query[pos]:
            labels.append(query[pos + 1 : pos + 1 + query[pos]])
            pos += 1 + query[pos]
        question = query[12 : pos + 5]
        kind = struct.unpack("!H", query[pos + 1 : pos + 3])[0]
        known = b".".join(labels).decode().lower().endswith(self._suffix)
        record = b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, 60, 4) + bytes((127, 0, 0, 1)) if known and kind == _A else b""
        flags = 0x8580 if known else 0x8583
        return query[:2] + struct.pack("!HHHHH", flags, 1, 1 if record else 0, 0, 0) + question + record

    def close(self) -> None:
        """Stop answering."""
        self._socket.close()

    def python(self, script: str, environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a Python script that asks this name server, in a mount namespace of its own."""
        return self.run([sys.executable, "-c", script], env=environment, timeout=timeout)

    def run(self, command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a program that asks this name server."""
        inside = f"mount --bind {shlex.quote(str(self._resolv))} /etc/resolv.conf && exec {shlex.join(command)}"
        return subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside], capture_output=True, text=True, check=False, **more
        )


@contextlib.contextmanager
def wildcard_dns(domain: str, folder: Path) -> Iterator[WildcardDns]:
    """A name server for the length of a block."""
    server = WildcardDns(domain, folder)
    try:
        yield server
    finally:
        server.close()
