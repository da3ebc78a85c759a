"""Stands in for `block.supervisor.BlockServer`: one server's view of the fake daemon, which ends and is started again."""

from __future__ import annotations

from collections.abc import Iterator

from agentenv.host.process import ProcessId
from agentenv.testing.failpoints import Failpoints
from agentenv.testing.fake_blocks import FakeBlocks, FakeDevices


class FakeBlockServer:
    """Point: `blockd.start`. `ticks` says when a daemon was started, on the clock of the other processes."""

    def __init__(self, devices: FakeDevices, client: FakeBlocks, ticks: Iterator[int], points: Failpoints) -> None:
        self.client = client
        self._devices, self._ticks, self._points = devices, ticks, points

    @property
    def process(self) -> ProcessId:
        """The newest daemon."""
        return self._devices.daemon

    def is_alive(self) -> bool:
        """Whether it runs."""
        return not self._devices.gone.is_set()

    async def ended(self) -> None:
        """Wait for its end."""
        await self._devices.gone.wait()
        await self._points.hit("blockd.ended", can_fail=False)

    async def ensure_running(self) -> None:
        """Start another if need be."""
        await self._points.hit("blockd.start")
        if not self.is_alive():
            ticks = next(self._ticks)
            self._devices.start(ProcessId(ticks, ticks))
