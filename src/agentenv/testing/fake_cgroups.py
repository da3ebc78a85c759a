"""Control groups in memory: stands in for `host.cgroup.Cgroups`. The machine's `groups` outlive a killed server."""

from __future__ import annotations

from collections.abc import Set

from agentenv.host.cgroup import Share


class FakeCgroups:
    """By name of a VM: its process, and its share. Tests say what a group holds (`held_bytes`) and whom the kernel killed (`oom_killed`).

    `reclaimed` is what was taken back.
    """

    def __init__(self, groups: dict[str, tuple[int, Share]]) -> None:
        self.groups = groups
        self.version = 2
        self.lacking: list[str] = []
        self.held_bytes: dict[str, int] = {}
        self.reclaimed: list[tuple[str, int]] = []
        self.oom_killed: set[str] = set()

    def open(self) -> None:
        """Nothing to make."""

    def put(self, vm: str, pid: int, share: Share) -> None:
        """Into a group."""
        self.groups[vm] = (pid, share)

    def remove(self, vm: str) -> None:
        """No error when there is none."""
        self.groups.pop(vm, None)

    def keep_only(self, vms: Set[str]) -> None:
        """Forget the others."""
        for vm in set(self.groups) - vms:
            del self.groups[vm]

    def memory_bytes(self, vm: str) -> int | None:
        """What a test has said."""
        return self.held_bytes.get(vm)

    def killed_for_memory(self, vm: str) -> bool:
        """What a test has said."""
        return vm in self.oom_killed

    def reclaim(self, vm: str, size_bytes: int) -> bool:
        """Take it back at once."""
        self.reclaimed.append((vm, size_bytes))
        self.held_bytes[vm] = max(0, self.held_bytes.get(vm, 0) - size_bytes)
        return True
