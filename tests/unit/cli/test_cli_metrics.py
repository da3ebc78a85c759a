"""`aenv metrics`: figures for people and for scripts, and following a life to its end."""

import asyncio
import json
import subprocess
import sys
import time

import pytest
from aenv_runner import process_environment, wait_for


def test_one_line_per_sample(aenv, server):
    sandbox_id = aenv.start()
    server.orchestrator.add_sample(sandbox_id, 0.0, timestamp_ms=1_800_000_000_000)
    server.orchestrator.add_sample(sandbox_id, 100.0, timestamp_ms=1_800_000_005_000)
    result = aenv("metrics", sandbox_id)
    assert (result.exit_code, result.stderr) == (0, "")
    first, second = result.stdout.splitlines()
    words = "2027-01-15 08:00:00 UTC CPU 0.0% of 1 memory 128.0 MiB of 512.0 MiB disk 1.0 GiB of 8.0 GiB"
    assert " ".join(first.split()) == words
    assert "CPU 100.0% of 1" in second
    assert len(first) == len(second), "columns do not stand below each other"
    assert len(first) < 100


def test_json_is_one_sample_per_line(aenv, server):
    sandbox_id = aenv.start()
    for number in range(3):
        server.orchestrator.add_sample(sandbox_id, float(number))
    samples = [json.loads(line) for line in aenv("metrics", sandbox_id[:9], "--json").stdout.splitlines()]
    assert [sample["cpuUsedPct"] for sample in samples] == [0.0, 1.0, 2.0]
    assert samples[0].keys() >= {"timestamp", "timestampUnix", "cpuCount", "memUsed", "memTotal", "memCache", "diskUsed", "diskTotal"}


def test_none_yet(aenv):
    result = aenv("metrics", aenv.start())
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no samples yet" in result.stderr


def test_of_a_sandbox_that_is_not_there(aenv):
    result = aenv("metrics", "i" + "0" * 20)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "hint: " in result.stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_followed_to_the_end_every_sample_is_shown_once(aenv, server, form):
    sandbox_id = aenv.start()
    orchestrator = server.orchestrator
    base_ms = int(time.time()) * 1000
    for number in range(2):
        orchestrator.add_sample(sandbox_id, float(number), timestamp_ms=base_ms + 100 * number)
    shown = []
    with subprocess.Popen(
        [sys.executable, "-m", "agentenv.cli", "metrics", sandbox_id, "--follow", *form],
        env=process_environment(server.environment),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        shown += [process.stdout.readline(), process.stdout.readline()]
        for number in range(2, 5):  # within the second of the last one, too
            orchestrator.add_sample(sandbox_id, float(number), timestamp_ms=base_ms + 200 * number)
        shown += [process.stdout.readline() for _ in range(3)]
        asyncio.run(orchestrator.kill(sandbox_id))
        shown += process.stdout.readlines()
        wait_for(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert [line.count("\n") for line in shown] == [1] * 5
    percents = [json.loads(line)["cpuUsedPct"] if form else float(line.split("CPU")[1].split("%")[0]) for line in shown]
    assert percents == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_paused_one_is_waited_for(aenv, server):
    sandbox_id = aenv.start()
    aenv("pause", sandbox_id)
    with subprocess.Popen(
        [sys.executable, "-m", "agentenv.cli", "metrics", sandbox_id, "--follow"],
        env=process_environment(server.environment),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(4)
        server.orchestrator.add_sample(sandbox_id)
        assert "CPU" in process.stdout.readline()
        asyncio.run(server.orchestrator.kill(sandbox_id))
        assert process.wait(30) == 0
