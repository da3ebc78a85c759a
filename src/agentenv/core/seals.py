"""The seal of a snapshot: one digest over all that must stay together, so that memory never meets another disk than its own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from agentenv.core.model import Snapshot


def sealed(snapshot: Snapshot) -> Snapshot:
    """`snapshot` with its seal. For whoever makes one, or lawfully gives it other layers of the same content."""
    return replace(snapshot, seal=_digest(snapshot))


def is_broken(snapshot: Snapshot) -> bool:
    """Whether it says something else than when it was sealed. A record of an older version has no seal that could be broken."""
    return bool(snapshot.seal) and snapshot.seal != _digest(snapshot)


def _digest(snapshot: Snapshot) -> str:
    together = (snapshot.snapshot_id, snapshot.memory_layers, snapshot.disk_layers, snapshot.state_sha256)
    return hashlib.sha256(json.dumps(together).encode()).hexdigest()
