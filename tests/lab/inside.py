"""Runs where production runs: on a host with KVM and ublk, which `run.py` makes. Needs root and Python alone.

Each check is a function that raises when it fails; all run, and the last line counts them. Results and logs go to `results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
FINIT_MODULE = 313  # system call number on x86-64
TEST_TIMEOUT_S = 900


def load_modules() -> None:
    """Load the modules beside this script, in their order; those that are there already are fine."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = HERE / "modules"
    for name in (folder / "load").read_text().split():
        with (folder / name).open("rb") as module:
            if libc.syscall(FINIT_MODULE, module.fileno(), b"", 0) != 0 and ctypes.get_errno() != 17:
                raise OSError(ctypes.get_errno(), f"cannot load {name}: {os.strerror(ctypes.get_errno())}")


def check_host() -> None:
    """What production needs of a host is there."""
    missing = [path for path in ("/dev/kvm", "/dev/ublk-control", "/dev/net/tun", "/dev/fuse") if not Path(path).exists()]
    assert not missing, f"missing: {', '.join(missing)}; `aenv doctor` names what brings them"
    print(f"    {os.uname().release}, {os.cpu_count()} CPUs, {Path('/proc/meminfo').read_text().split()[1]} kB")


def check_ublk() -> None:
    """blockd's own tests of ublk devices: I/O, kills, limits."""
    command = ["./blockd-tests", "device", "--test-threads=1", "--nocapture"]
    environment = os.environ | {"BLOCKD_PROGRAM": str(HERE / "blockd"), "RUST_BACKTRACE": "0"}
    log = RESULTS / "ublk-tests.log"
    with log.open("w") as output:
        done = subprocess.run(command, cwd=HERE, env=environment, stdout=output, stderr=output, timeout=TEST_TIMEOUT_S, check=False)
    text = log.read_text(errors="replace")
    summary = [line for line in text.splitlines() if line.startswith("test result")]
    assert done.returncode == 0, f"blockd's tests ended with {done.returncode}:\n{text[-6000:]}"
    assert summary, f"blockd's tests did not count themselves:\n{text[-6000:]}"
    assert "skipped:" not in text, text[-2000:]
    print(f"    {summary[0]}")


def check_firecracker() -> None:
    """The Firecracker driver on ublk devices: boot, save, load, and a killed blockd."""
    run_story("firecracker_check")


def check_qemu() -> None:
    """The portable driver on KVM with a ublk device."""
    run_story("qemu_check")


def run_story(name: str) -> None:
    """Run `main` of a script beside this one, which uses our package; its logs go to the results."""
    sys.path[:0] = [str(HERE / "site"), str(HERE)]
    folder = HERE / "node"
    try:
        asyncio.run(importlib.import_module(name).main(HERE, folder))
    finally:
        for log in (*folder.glob("*.log"), *folder.glob("vms/*/*.log")):
            shutil.copy2(log, RESULTS / "-".join((name, *log.relative_to(folder).parts)))


def check_node() -> None:
    """A node of our wheel on Firecracker and ublk devices, tried by the end-to-end tests."""
    sys.path[:0] = [str(HERE / "site"), str(HERE)]
    importlib.import_module("node_check").main(HERE, RESULTS)


def check_figures() -> None:
    """What such a node costs, against what it is bounded by."""
    sys.path[:0] = [str(HERE / "site"), str(HERE)]
    importlib.import_module("node_check").figures(HERE, RESULTS)


def check_peers() -> None:
    """Other sandboxes of microVMs beside ours; whatever they do is a result. Only when it is asked for by name."""
    sys.path[:0] = [str(HERE / "site"), str(HERE)]
    importlib.import_module("node_check").peers(HERE, RESULTS)


CHECKS: tuple[Callable[[], None], ...] = (check_host, check_ublk, check_qemu, check_firecracker, check_node, check_figures, check_peers)
ASKED_FOR = (check_peers,)


def chosen(names: list[str]) -> list[Callable[[], None]]:
    """The checks of these names, in their order; without names all but those to be asked for. SystemExit at an unknown one."""
    known = [check.__name__ for check in CHECKS]
    if unknown := set(names) - set(known):
        sys.exit(f"there is no check {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [check for check in CHECKS if check.__name__ in names or not (names or check in ASKED_FOR)]


def main() -> None:
    """Run the checks, or those whose names were given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-modules", action="store_true", help="load the kernel modules beside this script first")
    parser.add_argument("checks", nargs="*", help="names of checks; all when there are none")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if options.load_modules:
        Path("/proc/sys/kernel/printk").write_text("8")  # all goes to the console: its last lines are the reason when this machine ends
        load_modules()
    outcomes: dict[str, dict[str, object]] = {}
    for check in chosen(options.checks):
        print(f"--- {check.__name__}: {(check.__doc__ or '').strip()}", flush=True)
        began = time.monotonic()
        error = ""
        try:
            check()
        except Exception:  # noqa: BLE001 - whatever a check fails with is its result
            error = traceback.format_exc()
            print(error)
        took_s = round(time.monotonic() - began, 1)
        outcomes[check.__name__] = {"passed": not error, "took_s": took_s, "error": error}
        print(f"    {'FAILED' if error else 'ok'}: {check.__name__} in {took_s} s", flush=True)
    (RESULTS / "outcomes.json").write_text(json.dumps(outcomes, indent=2))
    passed = sum(bool(outcome["passed"]) for outcome in outcomes.values())
    print(f"{passed} passed, {len(outcomes) - passed} failed")
    sys.exit(passed != len(outcomes) or not outcomes)


if __name__ == "__main__":
    main()
