"""Volume servers in memory. `FakeVolumeMachine` survives a killed node server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentenv.core.model import Volume
from agentenv.testing.failpoints import Failpoints


@dataclass
class FakeVolumeMachine:
    """What runs: the names of the volumes served, by life; and in which namespace."""

    serving: dict[str, tuple[str, ...]] = field(default_factory=dict)
    namespaces: dict[str, str] = field(default_factory=dict)


class FakeVolumeServers:
    """Stands in for `volume.server.VolumeServers`. Points: `volumes.ensure`, `volumes.ensure:done`, `volumes.stop`."""

    def __init__(self, machine: FakeVolumeMachine, points: Failpoints) -> None:
        self._machine = machine
        self._points = points

    async def adopt(self, kept: set[str]) -> None:
        """End all but `kept`."""
        for life in set(self._machine.serving) - kept:
            del self._machine.serving[life]

    async def ensure(self, life: str, namespace: str, volumes: Sequence[Volume]) -> bool:
        """Serve; True when it was not served."""
        await self._points.hit("volumes.ensure")
        fresh = life not in self._machine.serving
        self._machine.serving[life] = tuple(volume.name for volume in volumes)
        self._machine.namespaces[life] = namespace
        await self._points.hit("volumes.ensure:done")
        return fresh

    async def stop(self, life: str) -> None:
        """Serve no more."""
        if life in self._machine.serving:
            await self._points.hit("volumes.stop")
            del self._machine.serving[life]
