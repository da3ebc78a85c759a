"""Commands with deadlines, the TSC rate, and the table of requirements."""

import time
from pathlib import Path

import pytest

from agentenv.core.errors import DeadlineExceeded, HostNotReady, Internal
from agentenv.host import requirements, tsc
from agentenv.host.command import run_command
from agentenv.host.requirements import REQUIREMENTS, Finding, Requirement, check_host, mke2fs_version_problem, packages_to_install


def test_command_gives_its_output_and_environment() -> None:
    assert run_command(["sh", "-c", 'printf "$WORD"'], timeout_s=20, env={"WORD": "héllo"}) == "héllo".encode()


def test_command_failures_are_told_apart() -> None:
    with pytest.raises(Internal, match=r"sh failed with status 3: the cause$"):
        run_command(["sh", "-c", "echo the cause >&2; exit 3"], timeout_s=20)
    with pytest.raises(HostNotReady, match="cannot start no-such-program") as caught:
        run_command(["no-such-program"], timeout_s=20, hint="install it")
    assert caught.value.hint == "install it"
    with pytest.raises(Internal, match="more than the 100"):
        run_command(["head", "-c", "1000", "/dev/zero"], timeout_s=20, max_output_bytes=100)


def test_deadline_ends_the_whole_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(DeadlineExceeded, match=r"sh did not finish within 0\.3 s"):
        run_command(["sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"], timeout_s=0.3)
    child = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    end = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_watch_runs_while_the_command_does() -> None:
    seen = []
    run_command(["sleep", "0.7"], timeout_s=20, watch=lambda: seen.append(1))
    assert seen


def test_rate_from_kernel_factors() -> None:
    # Linux's own factors for a 2.1 GHz counter: ns = ticks * mult >> shift
    assert tsc.khz_of_factors(round((1 << 31) * 1e6 / 2_100_000), 31) == 2_100_000
    assert tsc.khz_of_factors(round((1 << 30) * 1e6 / 2_893_437), 30) == 2_893_437


def test_rate_from_cpuinfo() -> None:
    assert tsc.bogomips_khz("flags : tsc\nbogomips\t: 4200.00\n") == 2_100_000
    assert tsc.bogomips_khz("bogomips\t: 5786.87\nbogomips\t: 5786.87\n") == 2_893_435
    assert tsc.bogomips_khz("BogoMIPS\t: 50.00\n") is None


def test_listed_rate_counts_only_if_the_measurement_agrees() -> None:
    assert tsc.choose_khz(2_100_000, 2_100_003) == 2_100_000
    assert tsc.choose_khz(2_100_000, 2_400_000) == 2_400_000
    assert tsc.choose_khz(2_100_000, None) == 2_100_000
    assert tsc.choose_khz(None, 2_100_003) == 2_100_003
    assert tsc.choose_khz(None, None) is None


def test_same_rate_allows_for_calibration_only() -> None:
    assert tsc.same_tsc_rate(2_100_000, 2_100_500)
    assert not tsc.same_tsc_rate(2_100_000, 2_101_000)
    assert not tsc.same_tsc_rate(2_100_000, 2_899_000)


def test_measurement_survives_interruptions() -> None:
    """A clock and a counter that tell true, with long pauses between some readings: the tightest reading decides."""
    now_ns, reads = 1_000_000_000, 0

    def step() -> int:
        nonlocal now_ns, reads
        reads += 1
        now_ns += 3_000_000 if reads % 7 == 0 else 40
        return now_ns

    assert abs(tsc.measure_khz(lambda: step() * 21 // 10, step, duration_s=0.05) - 2_100_000) < 20


@pytest.mark.skipif(tsc.platform.machine() != "x86_64", reason="needs an x86-64 host")
def test_rate_of_this_host_is_steady_and_agrees_with_a_measurement() -> None:
    measured = tsc._measured_khz()
    assert measured is not None
    assert abs(tsc.tsc_khz() - measured) * 1_000_000 <= 100 * measured
    tsc.tsc_khz.cache_clear()
    assert tsc.same_tsc_rate(tsc.tsc_khz(), measured)


def test_no_source_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tsc, "_from_perf_page", lambda: None)
    monkeypatch.setattr(tsc, "_measured_khz", lambda: None)
    monkeypatch.setattr(tsc, "bogomips_khz", lambda _: None)
    tsc.tsc_khz.cache_clear()
    with pytest.raises(HostNotReady, match="time stamp counter") as caught:
        tsc.tsc_khz()
    assert caught.value.hint


def test_every_requirement_is_complete() -> None:
    names = [requirement.name for requirement in REQUIREMENTS]
    assert len(names) == len(set(names))
    assert {"root", "/dev/fuse", "/dev/net/tun", "ip", "nft", "mmdebstrap", "mke2fs", "zstd", "qemu"} <= set(names)
    for requirement in REQUIREMENTS:
        assert requirement.why, requirement.name
        assert requirement.hint, requirement.name
        assert isinstance(requirement.problem(), str), requirement.name


def test_findings_follow_the_table() -> None:
    findings = check_host()
    assert [finding.requirement for finding in findings] == list(REQUIREMENTS)


def test_packages_of_failed_required_entries_only() -> None:
    def entry(package: str, required: bool = True) -> Requirement:
        return Requirement("x", "why", lambda: "missing", package, "hint", required)

    findings = [
        Finding(entry("zstd"), "missing"),
        Finding(entry("apt"), ""),
        Finding(entry("lz4", False), "missing"),
        Finding(entry(""), "missing"),
    ]
    assert packages_to_install(findings) == ["zstd"]


def test_missing_things_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(requirements, "SYSTEM_PATH", str(tmp_path))
    problems = {finding.requirement.name: finding.problem for finding in check_host()}
    assert problems["nft"] == "no program nft"
    assert problems["mke2fs"] == "no program mke2fs"
    assert requirements._character_device(str(tmp_path / "none"))() == f"{tmp_path}/none: No such file or directory"
    assert "not a character device" in requirements._character_device(str(tmp_path))()


def test_mke2fs_versions() -> None:
    assert mke2fs_version_problem("mke2fs 1.47.0 (5-Feb-2023)\n") == ""
    assert mke2fs_version_problem("mke2fs 2.0\n") == ""
    assert "1.46" in mke2fs_version_problem("mke2fs 1.46.2 (28-Feb-2021)\n")
    assert mke2fs_version_problem("something else")
