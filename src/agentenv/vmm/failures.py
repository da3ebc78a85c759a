"""What a failed start or save of a VM is to whoever asked: a fault of ours, no room, or a VMM that has ended meanwhile.

A VMM that ends (killed, out of memory, its files gone with `blockd`) is no fault of the request: the same call may be made again.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from agentenv.core.errors import AgentEnvError, Internal, StorageFull, Unavailable
from agentenv.core.tasks import unless
from agentenv.host import process
from agentenv.host.process import ProcessId

_STATE_ROOM_BYTES = 4 << 20
_LAST_LINES, _LINE_CHARS = 5, 200
_PANIC_LINES = 100  # registers, a trace of calls and what was loaded follow the reason
_PANIC = re.compile(r"Kernel panic - not syncing: (.+?)(?: \]---)?$")
#: What a kernel says on the console, whatever its log level, and what it means to a sandbox.
_FAREWELLS = {
    "reboot: Power down": "the guest powered off",
    "reboot: System halted": "the guest halted",
    "reboot: Restarting system": "the guest rebooted, which a sandbox does not outlive",
}
_END_SHOWS_S = 0.1  # until the kernel tells of the end of a process whose connections are closed already


def why_ended(log: Path) -> str:
    """The reason of a VMM's end, by the last that it and the guest's kernel said."""
    said: list[str] = []
    with contextlib.suppress(OSError):
        said = "".join(c if c.isprintable() else "\n" for c in log.read_text(errors="replace")).split("\n")
    lines = [line.strip()[:_LINE_CHARS] for line in said if line.strip()]
    last = lines[-_LAST_LINES:]
    for line in lines[-_PANIC_LINES:]:
        if panic := _PANIC.search(line):
            return f"the guest's kernel panicked: {panic[1]}"
    for line in last:
        for words, reason in _FAREWELLS.items():
            if words in line:
                return reason
    return f"its VMM ended: {' / '.join(last)}" if last else "the guest powered off or its VMM was killed"


async def started(ended: Coroutine[Any, Any, str], work: Coroutine[Any, Any, None], log: Path) -> None:
    """Wait for the work that starts a VM. Unavailable, with the VMM's last words, when the VMM `ended` before or because of that."""
    hint = f"try again; if it repeats, see {log}"
    await unless(ended, work, lambda why: Unavailable(f"the VM did not start: {why}", hint), _END_SHOWS_S)


def failed_save(state: Path, vmm: ProcessId, error: Exception) -> AgentEnvError:
    """What to raise for a state that could not be written to `state`, which is removed."""
    state.unlink(missing_ok=True)
    if not process.is_alive(vmm):
        return Unavailable(f"the VMM ended while its state was saved: {error}", "try again: the answer tells what became of the sandbox")
    if isinstance(error, Unavailable):
        return error
    if shutil.disk_usage(state.parent).free < _STATE_ROOM_BYTES:
        return StorageFull("no room for the VM's state", "free some space on the node's disk; the sandbox runs on")
    return Internal(f"the VM's state could not be saved: {error}")
