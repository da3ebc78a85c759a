"""Telling a service manager how far we are: the datagrams of sd_notify(3). Without one, nothing happens."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Sequence

_DEADLINE_S = 1.0


def notify(*lines: str, descriptors: Sequence[int] = ()) -> bool:
    """Send `NAME=value` lines, with open files to be kept if there are any; False when nobody asked for it or listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(_DEADLINE_S)
        sender.connect("\0" + address[1:] if address.startswith("@") else address)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        sender.sendmsg(["\n".join(lines).encode()], rights)
        return True
    return False
