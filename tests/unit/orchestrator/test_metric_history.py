"""What is kept of a sandbox's past: bounded, thinned out with age, in order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core.model import MetricSample
from agentenv.orchestrator.metric_history import COARSE_SAMPLES, FINE_SAMPLES, THINNING, MetricHistory

_STEP_MS = 5_000
_SIZE = st.integers(0, 2**63 - 1)
_ANY_SAMPLE = st.builds(
    MetricSample,
    timestamp_ms=st.integers(0, 2**53),
    cpu_count=st.integers(0, 65535),
    cpu_used_percent=st.integers(0, 10_000).map(lambda hundredths: hundredths / 100),
    memory_used_bytes=_SIZE,
    memory_total_bytes=_SIZE,
    memory_cache_bytes=_SIZE,
    disk_used_bytes=_SIZE,
    disk_total_bytes=_SIZE,
)


def sample(at_ms: int) -> MetricSample:
    return MetricSample(at_ms, 1, 12.34, 2, 3, 4, 5, 6)


def history(count: int) -> MetricHistory:
    kept = MetricHistory(sample(0))
    for number in range(1, count):
        kept.add(sample(number * _STEP_MS))
    return kept


def times(kept: MetricHistory) -> list[int]:
    return [one.timestamp_ms // _STEP_MS for one in kept.between(0)]


@given(st.lists(_ANY_SAMPLE, min_size=1, max_size=20))
def test_samples_come_out_as_they_went_in_by_time(samples: list[MetricSample]) -> None:
    kept = MetricHistory(samples[0])
    for one in samples[1:]:
        kept.add(one)
    assert kept.between(0) == sorted(samples, key=lambda one: one.timestamp_ms)
    assert kept.latest() == samples[-1]


@pytest.mark.parametrize("count", [1, 2, FINE_SAMPLES - 1, FINE_SAMPLES])
def test_nothing_is_thinned_within_the_last_hour(count: int) -> None:
    assert times(history(count)) == list(range(count))


def test_older_ones_are_thinned_and_the_last_hour_stays_whole() -> None:
    count = FINE_SAMPLES + 10 * THINNING + 5
    cut = count - FINE_SAMPLES
    assert times(history(count)) == [*range(0, cut, THINNING), *range(cut, count)]


def test_a_day_at_a_sample_each_five_seconds_is_covered_and_more_is_not_kept() -> None:
    count = 2 * 17_280
    kept = times(history(count))
    assert len(kept) == FINE_SAMPLES + COARSE_SAMPLES
    assert kept[-1] == count - 1
    assert count - kept[0] >= 17_280
    assert {later - earlier for earlier, later in pairwise(kept[:COARSE_SAMPLES])} == {THINNING}


def test_a_range_includes_both_ends() -> None:
    kept = history(10)
    assert [one.timestamp_ms for one in kept.between(10_000, 20_000)] == [10_000, 15_000, 20_000]
    assert [one.timestamp_ms for one in kept.between(10_001, 19_999)] == [15_000]
    assert kept.between(45_001) == kept.between(0, -1) == []


def test_a_wall_clock_that_steps_back_keeps_the_order() -> None:
    kept = history(3)
    kept.add(sample(2_500))
    assert [one.timestamp_ms for one in kept.between(0)] == [0, 2_500, 5_000, 10_000]
    assert kept.latest().timestamp_ms == 2_500
