"""What one sandbox used in its life so far, in bounded memory: the last hour as read, a day before it thinned out.

Invariants: samples come out oldest first, also after a step of the wall clock; at most `FINE_SAMPLES + COARSE_SAMPLES` are
kept (112 kB), whatever happens; the newest sample is always there. A thinned sample is one as it was read, not an average.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from agentenv.core.model import MetricSample

FINE_SAMPLES = 720  # an hour at one each 5 s: what people look at while something runs
THINNING = 12  # of so many fine samples the oldest stays: one a minute
COARSE_SAMPLES = 1440  # a day of minutes, the longest timeout of a node by default
_RECORD = struct.Struct("<qHHqqqqq")  # 52 bytes; as objects they would take six times that, for thousands of sandboxes


class MetricHistory:
    """The samples of one sandbox. Made with the first one, so it is never empty."""

    def __init__(self, first: MetricSample) -> None:
        self._fine, self._coarse = bytearray(), bytearray()
        self._left_fine = 0  # how many samples have grown too old for `_fine`
        self.add(first)

    def add(self, sample: MetricSample) -> None:
        """Keep one more; older ones are thinned out to make room."""
        self._latest = sample
        self._fine += _pack(sample)
        if len(self._fine) > FINE_SAMPLES * _RECORD.size:
            if self._left_fine % THINNING == 0:
                self._coarse += self._fine[: _RECORD.size]
                del self._coarse[: -COARSE_SAMPLES * _RECORD.size]
            self._left_fine += 1
            del self._fine[: _RECORD.size]

    def latest(self) -> MetricSample:
        """The one added last."""
        return self._latest

    def between(self, start_ms: int, end_ms: int | None = None) -> list[MetricSample]:
        """The samples from `start_ms` to `end_ms`, both included, oldest first. Reads all: about 5 ms when full."""
        found = [s for s in self._all() if start_ms <= s.timestamp_ms and (end_ms is None or s.timestamp_ms <= end_ms)]
        return sorted(found, key=lambda sample: sample.timestamp_ms)

    def _all(self) -> Iterator[MetricSample]:
        for part in (self._coarse, self._fine):
            for timestamp_ms, cpu_count, cpu_used, *sizes_bytes in _RECORD.iter_unpack(part):
                yield MetricSample(timestamp_ms, cpu_count, cpu_used / 100, *sizes_bytes)


def _pack(sample: MetricSample) -> bytes:
    return _RECORD.pack(
        sample.timestamp_ms,
        sample.cpu_count,
        round(sample.cpu_used_percent * 100),  # envd gives two decimals
        sample.memory_used_bytes,
        sample.memory_total_bytes,
        sample.memory_cache_bytes,
        sample.disk_used_bytes,
        sample.disk_total_bytes,
    )
