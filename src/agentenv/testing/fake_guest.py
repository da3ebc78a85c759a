"""The guest's side of a restore: takes its identity, or stays deaf."""

from __future__ import annotations

import asyncio

from agentenv.core.errors import NotFound
from agentenv.guest.client import GuestIdentity
from agentenv.testing.failpoints import Failpoints
from agentenv.testing.fake_slots import FakeNetwork
from agentenv.testing.fake_vmm import FakeProcesses

ENVD_VERSION = "0.6.13"


class FakeGuest:
    """Stands in for `guest.client.GuestClient`. Points: `guest.initialise`, `guest.initialise:done`."""

    def __init__(self, processes: FakeProcesses, network: FakeNetwork, points: Failpoints | None = None) -> None:
        self._processes, self._network = processes, network
        self._points = points or Failpoints()

    async def initialise(self, namespace: str, identity: GuestIdentity, deadline_s: float) -> str:
        """Give the guest in `namespace` its identity. Waits for ever when there is none that runs: the caller gives up."""
        await self._points.hit("guest.initialise")
        if int(namespace.rsplit("-", 1)[1]) not in self._network.present:
            raise NotFound(f"network namespace {namespace} does not exist")
        process = self._processes.in_namespace(namespace)
        if process is None or not process.running:
            await asyncio.get_running_loop().create_future()
        else:
            process.identity = identity
        await self._points.hit("guest.initialise:done")
        return ENVD_VERSION

    async def run(self, namespace: str, access_token: str, command: str, deadline_s: float) -> tuple[int, str]:
        """Every command works and says nothing."""
        await self._points.hit("guest.run")
        return 0, ""
