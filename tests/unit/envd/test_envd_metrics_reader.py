"""The host's reader of metrics understands the real agent."""

import asyncio

import pytest

from agentenv.core.clock import SystemClock
from agentenv.core.errors import Internal
from agentenv.guest.metrics import HEAD_MAX_BYTES, MetricsReader


async def test_the_host_reads_the_agents_metrics(fresh):
    fresh.init(accessToken="tok")
    connections = 0

    async def connect():
        nonlocal connections
        connections += 1
        return await asyncio.open_connection("127.0.0.1", fresh.port, limit=HEAD_MAX_BYTES)

    reader = MetricsReader(connect, "tok", SystemClock())
    samples = [await reader.read(10) for _ in range(3)]
    assert connections == 1
    memory_kib = next(int(line.split()[1]) for line in fresh.path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    for sample in samples:
        assert abs(sample.timestamp_ms - SystemClock().now_ms()) < 30_000
        assert sample.cpu_count >= 1
        assert 0 <= sample.cpu_used_percent <= 100
        assert sample.memory_total_bytes == memory_kib * 1024
        assert 0 < sample.memory_used_bytes < sample.memory_total_bytes
        assert 0 < sample.disk_used_bytes < sample.disk_total_bytes
    reader.close()
    with pytest.raises(Internal, match="401"):
        await MetricsReader(connect, "another", SystemClock()).read(10)
