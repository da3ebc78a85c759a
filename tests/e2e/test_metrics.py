"""What real guests use, through the official SDK and the command line."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta

from e2b import Sandbox
from guest_programs import wait_for

FIRST_WITHIN_S = 30  # contract section 5.5
GIB = 1 << 30


def newest(sandbox):
    return sandbox.get_metrics()[-1]


def test_figures_are_plausible_and_come_in_time(node, sandbox):
    begun = time.monotonic()
    wait_for(sandbox.get_metrics, "a new sandbox has no metrics")
    assert time.monotonic() - begun < FIRST_WITHIN_S
    info = sandbox.get_info()
    for metric in sandbox.get_metrics():
        assert metric.cpu_count == info.cpu_count
        assert 0 <= metric.cpu_used_pct <= 100
        assert 0.8 * info.memory_mb < metric.mem_total / 2**20 <= info.memory_mb  # the kernel keeps some for itself
        assert 0 < metric.mem_used < metric.mem_total
        assert 0 < metric.mem_cache < metric.mem_total
        assert 7 * GIB < metric.disk_total <= 8 * GIB
        assert 0 < metric.disk_used < metric.disk_total
        assert info.started_at <= metric.timestamp <= datetime.now(UTC)


def test_ranges(sandbox):
    wait_for(lambda: len(sandbox.get_metrics()) >= 2, "no second sample comes")
    first, second = sandbox.get_metrics()[:2]
    assert timedelta(seconds=1) <= second.timestamp - first.timestamp < timedelta(seconds=30)  # a slow answer bears a late time
    assert [metric.timestamp for metric in sandbox.get_metrics(end=first.timestamp)] == [first.timestamp]
    assert second.timestamp in [metric.timestamp for metric in sandbox.get_metrics(start=second.timestamp)]
    assert first.timestamp not in [metric.timestamp for metric in sandbox.get_metrics(start=second.timestamp)]
    long_ago = first.timestamp - timedelta(days=1)
    assert sandbox.get_metrics(start=long_ago, end=long_ago + timedelta(hours=1)) == []


def test_load_shows(sandbox):
    wait_for(sandbox.get_metrics, "a new sandbox has no metrics")
    disk_before = newest(sandbox).disk_used
    sandbox.commands.run("while :; do :; done", background=True, timeout=0)
    sandbox.commands.run("head -c 50000000 /dev/zero > big; sync", timeout=120)
    wait_for(lambda: newest(sandbox).cpu_used_pct > 50, "a busy loop does not show")
    wait_for(lambda: newest(sandbox).disk_used > disk_before + 40_000_000, "a large file does not show")


def test_samples_outlive_a_pause_and_come_again_after_it(sandbox):
    wait_for(sandbox.get_metrics, "a new sandbox has no metrics")
    sandbox.pause()
    before = [metric.timestamp for metric in sandbox.get_metrics()]
    time.sleep(7)  # more than one interval
    assert [metric.timestamp for metric in sandbox.get_metrics()] == before
    sandbox.connect(timeout=600)
    wait_for(lambda: len(sandbox.get_metrics()) > len(before), "no metrics after a resume")
    assert [metric.timestamp for metric in sandbox.get_metrics()][: len(before)] == before


def test_a_fork_has_its_own(sandbox):
    wait_for(sandbox.get_metrics, "a new sandbox has no metrics")
    (child,) = sandbox.fork(count=1, timeout=600)
    try:
        wait_for(child.get_metrics, "a fork has no metrics")
        assert child.get_metrics()[0].timestamp >= child.get_info().started_at
        before = len(sandbox.get_metrics())
        wait_for(lambda: len(sandbox.get_metrics()) > before, "the source of a fork has no metrics any more")
    finally:
        child.kill()


def test_the_command_line(node):
    made = Sandbox.create("base", timeout=600, **node.options)
    try:
        wait_for(made.get_metrics, "a new sandbox has no metrics")
        samples = [json.loads(line) for line in node.aenv("metrics", made.sandbox_id, "--json").stdout.splitlines()]
        assert samples[0]["cpuCount"] == made.get_info().cpu_count
        assert "memory" in node.aenv("metrics", made.sandbox_id).stdout
    finally:
        made.kill()
    assert node.aenv("metrics", made.sandbox_id, "--json").stdout, "an ended sandbox has lost its metrics"
