"""A node on Firecracker and ublk devices: our wheel is installed, brought up, and tried by a part of the end-to-end tests.

Under emulation the whole suite takes an hour; `CHOSEN` is what about ten minutes allow, one file for each thing that is done
otherwise here. `LAB_SUITE=full` runs all but `ELSEWHERE`, `LAB_SUITE=test_many.py,test_cli.py` those. Run by `inside.py`; needs what
`run.py` brings along.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from emulated import cpu_template, is_emulated

SUITE_TIMEOUT_S = 4 * 3600
TEST_TIMEOUT_S = 600
UP_TIMEOUT_S = 1200
ALL_DESELECTED = 5  # what pytest ends with then
ATTEMPTS = 3  # of a test on an emulated machine
PASSED_BEFORE = "passed.json"  # beside this script: identifiers of tests
OUTCOME = re.compile(r"(tests/.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")
RUN = Path("/run/agentenv-lab")
CHOSEN = {
    "test_lifecycle.py": "commands, files, ports, pause, forks, timeouts, a guest that powers off: each verb once",
    "test_snapshots.py::test_two_go_on_from_a_running_one": "a capture of a VM that goes on, and VMs from it",
    "test_checkpoints.py::test_a_paused_one_a_fork_and_a_new_server": "captures one upon the other, rollbacks, a fork of one",
    "test_filesystem_pause.py::test_kinds_of_pause_and_of_resume_may_alternate": "boots of disks, captures of booted VMs",
    "test_restart.py::test_kill_of_the_server_loses_nothing": "jailed VMs are taken over",
    "test_restart.py::test_down_pauses_and_up_brings_back": "nothing is left of devices and jails, and all comes back",
    "test_network.py::test_host_services_are_out_of_reach": "the policy of a slot holds for its tap",
    "test_warm.py": "VMs that stand ready, loaded and paused",
}
#: Files that the whole suite leaves to the machine outside, and why.
ELSEWHERE = {
    "test_blockd_kill.py": "is about disks that are files; of devices `check_ublk` and `check_firecracker` kill blockd",
    "test_from_image_to_template.py": "needs a registry",
    "test_images.py": "needs a registry",
    "test_interpreter.py": "its template has half a gigabyte of packages, which are not brought along",
    "test_lazy_images.py": "needs a registry",
    "test_limit.py": "measures a bare QEMU; `check_figures` measures a bare Firecracker",
    "test_service.py": "needs systemd",
}


def main(here: Path, results: Path) -> None:
    """Install the wheel, and run the tests on its node. AssertionError with their last lines when one fails."""
    python = install(here)
    environment = node_environment(here)
    doctor = subprocess.run([str(python.with_name("aenv")), "doctor"], env=environment, capture_output=True, text=True, check=False)
    print(doctor.stdout, flush=True)
    assert "Firecracker" in doctor.stdout, doctor.stdout + doctor.stderr
    try:
        run_tests(here, python, environment, results)
    finally:
        keep_logs(here, results)


def figures(here: Path, results: Path) -> None:
    """Install the wheel, and measure its node. AssertionError when a bound is not held."""
    python = install(here)
    try:
        measure(here, python, node_environment(here), results)
    finally:
        keep_logs(here, results)


def peers(here: Path, results: Path) -> None:
    """Install the wheel, and measure it beside others of its kind. AssertionError when ours does not work."""
    python, environment = install(here), node_environment(here)
    arguments = [here / "peers.py", here, results, here / "home/cache/assets", python.with_name("aenv")]
    try:
        done = subprocess.run([python, "-u", *arguments], env=environment, timeout=SUITE_TIMEOUT_S, check=False)
    finally:
        keep_logs(here, results)
    assert done.returncode == 0, "our own sandboxes did not work"


def keep_logs(here: Path, results: Path) -> None:
    """The node's logs become results."""
    for log in (here / "home/log").glob("*.log"):
        shutil.copy2(log, results / f"node-{log.name}")


def install(here: Path) -> Path:
    """An environment whose `aenv` is that of our wheel; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(here / "venv")], check=True)
    [packages] = (here / "venv/lib").glob("python3.*/site-packages")
    (packages / "lab.pth").write_text(f"{here / 'site'}\n")
    python, program = here / "venv/bin/python", here / "venv/bin/aenv"
    program.write_text(f"#!{python}\nimport sys\nfrom agentenv.cli.main import main\nsys.exit(main())\n")
    program.chmod(0o755)
    return python


def node_environment(here: Path) -> dict[str, str]:
    """A node of its own that runs on Firecracker, with what was brought along in its cache."""
    home = here / "home"
    (home / "cache").mkdir(parents=True, exist_ok=True)
    if (here / "assets").is_dir():
        (here / "assets").rename(home / "cache/assets")
    cpu: dict[str, str] = {}
    if template := cpu_template():
        (here / "cpu.json").write_text(json.dumps(template))
        cpu["AENV_VMM_CPU_TEMPLATE"] = str(here / "cpu.json")
    return os.environ | {
        "AENV_TEST_HOME": str(home),
        "AENV_TEST_RUN": str(RUN),
        "AENV_TEST_POOL_CIDR": "10.152.0.0/16",
        "AENV_TEST_BUSYBOX": str(here / "busybox"),
        "AENV_NODE_HOME": str(home),
        "AENV_NODE_RUN": str(RUN),
        "AENV_VMM_DRIVER": "firecracker",
        "AENV_VMM_FIRECRACKER": str(here / "firecracker"),
        "AENV_VMM_JAILER": str(here / "jailer"),
        "PYTHONDONTWRITEBYTECODE": "",
        **cpu,
    }


def measure(here: Path, python: Path, environment: dict[str, str], results: Path) -> None:
    """Figures of the same node with the settings that a node has by default."""
    aenv = str(python.with_name("aenv"))
    subprocess.run([aenv, "up", "--detach"], env=environment, check=True, timeout=UP_TIMEOUT_S)
    try:
        client = json.loads(subprocess.run([aenv, "env", "--json"], env=environment, capture_output=True, check=True).stdout)
        command = [str(python), "-u", str(here / "figures.py"), str(here), str(results)]
        done = subprocess.run(command, env=environment | client, timeout=SUITE_TIMEOUT_S, check=False)
    finally:
        subprocess.run([aenv, "down", "--kill"], env=environment, check=True, timeout=UP_TIMEOUT_S)
    assert done.returncode == 0, "a bound is not held, or a figure could not be taken"


def run_tests(here: Path, python: Path, environment: dict[str, str], results: Path) -> None:
    """The chosen end-to-end tests, or all of them, less those that an earlier machine of this run has seen pass.

    On an emulated machine what fails is tried again, and told: the emulation itself breaks a VM now and then (docs/production.md).
    """
    suite = os.environ.get("LAB_SUITE", "")
    names = whole(here) if suite == "full" else suite.split(",") if suite else list(CHOSEN)
    passed = json.loads((here / PASSED_BEFORE).read_text()) if (here / PASSED_BEFORE).exists() else []
    wanted = [*(f"tests/e2e/{name}" for name in names), *(word for test in passed for word in ("--deselect", test))]
    for attempt in range(ATTEMPTS if is_emulated() else 1):
        code, failed, words = pytest_run(here, python, environment, results, f"node-tests-{attempt + 1}", wanted)
        if code == 0 or (passed and code == ALL_DESELECTED):
            print(f"    {words[-1].strip(' =')}", flush=True)
            return
        if not failed:
            break
        print("    failed, to be tried again: " + ", ".join(failed), flush=True)
        wanted = failed
    raise AssertionError("the tests failed:\n" + "\n".join(words[-120:]))


def whole(here: Path) -> list[str]:
    """The files of the suite that apply here."""
    found = sorted(path.name for path in (here / "checkout/tests/e2e").glob("test_*.py"))
    assert not ELSEWHERE.keys() - {*found}, "ELSEWHERE names files that are not there"
    return [name for name in found if name not in ELSEWHERE]


def pytest_run(
    here: Path, python: Path, environment: dict[str, str], results: Path, name: str, wanted: list[str]
) -> tuple[int, list[str], list[str]]:
    """Run tests and say at once which have passed; the exit code, those that did not, and all lines. What they write becomes results."""
    report = ["--junitxml", str(results / f"{name}.xml"), "--durations=0", "--durations-min=1", f"--timeout={TEST_TIMEOUT_S}"]
    command = [str(python), "-u", "-m", "pytest", "-v", "--color=no", *report, *wanted]
    lines: list[str] = []
    failed: list[str] = []
    with (
        (results / f"{name}.log").open("w") as log,
        subprocess.Popen(
            command, cwd=here / "checkout", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as run,
    ):
        limit = threading.Timer(SUITE_TIMEOUT_S, run.kill)
        limit.daemon = True
        limit.start()
        assert run.stdout is not None
        for line in run.stdout:
            log.write(line)
            lines.append(line.rstrip("\n"))
            if outcome := OUTCOME.match(line):
                test, word = outcome.groups()
                if word == "PASSED":
                    print(f"    passed: {test}", flush=True)
                elif word in ("FAILED", "ERROR"):
                    failed.append(test)
        limit.cancel()
    return run.returncode, list(dict.fromkeys(failed)), lines
