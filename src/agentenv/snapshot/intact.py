"""Whether a snapshot is what it was when it was made. Looked at before each start, without reading what may be gigabytes.

Its record against its seal (memory and disk belong together), its device state by digest, its layers by size and time of
their last change. What the file system or the disk below it changes by itself is not found here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from agentenv.core.errors import DataCorrupt
from agentenv.core.model import Snapshot
from agentenv.core.paths import NodePaths
from agentenv.core.seals import is_broken
from agentenv.snapshot.capture import state_file
from agentenv.snapshot.layers import LayerStore

_NEXT_STEP = (
    "what was made of it can only be deleted, unless you have a copy of that file; "
    "if a copy without times is all that happened, give the file its time back with touch -d @SECONDS.NANOSECONDS"
)


def require_intact(snapshot: Snapshot, layers: LayerStore, paths: NodePaths, *, disk_alone: bool) -> None:
    """DataCorrupt, naming the file, when something that a start would use is damaged or gone. Blocks, for about 0.1 ms."""
    if is_broken(snapshot):
        raise DataCorrupt(
            f"the record of snapshot {snapshot.snapshot_id} names other layers or another state than it was made with",
            "memory and disk would not fit; delete what was made of it, or restore the node's database from a copy",
        )
    used = snapshot.disk_layers if disk_alone else (*snapshot.memory_layers, *snapshot.disk_layers)
    if damage := layers.damage(used):
        raise DataCorrupt(f"a layer of snapshot {snapshot.snapshot_id} is damaged: {damage}", _NEXT_STEP)
    if not disk_alone and snapshot.state_sha256:
        _require_state(state_file(paths, snapshot.snapshot_id), snapshot.state_sha256)


def _require_state(state: Path, sha256: str) -> None:
    hint = "start it from its disk alone (resume or connect with memory false), or delete it"
    try:
        found = hashlib.sha256(state.read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise DataCorrupt(f"the device state of a snapshot is missing: {state}", hint) from error
    if found != sha256:
        raise DataCorrupt(f"the device state of a snapshot is damaged: {state}", hint)
