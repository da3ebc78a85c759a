"""The QEMU of the lab's own machine: Debian's, with three faults mended that break VMs on an emulated host, or that host.

- VMRUN leaves the vector of an interrupt that it injects in `exception_index`. When the host's CPU is kicked before the guest's next exit,
  the vector is delivered once more, wherever the guest is by then, also with interrupts off: a timer interrupt within a timer interrupt
  waits for ever for a lock that its own CPU holds, and one on the way into the kernel finds no stack it could use.
- VMRUN sets a bit of `interrupt_request` without the lock that all others take for it. An interrupt that another thread raises at that
  moment is lost, and its CPU may sleep for ever.
- A store into a page of code first discards what was translated of it, and then stores. A CPU that translates it anew in between keeps
  the old code. A kernel that patches its own code while it runs on the other CPU, as it does when KVM starts and ends VMs, leaves a
  breakpoint there for good. Such a store is now done while all other CPUs stand still.

Seen in 10.0 and 11.1. It is built once from Debian's source, with no more than the lab needs, and kept in the node's cache. Sandboxes
that run no VMs of their own do not meet the first two, and the third hardly ever: nodes take the packaged QEMU.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from payload import say

from agentenv.host.asset_cache import AssetCache
from agentenv.host.debian import PrivateApt
from agentenv.vmm.qemu_install import PROGRAM, ensure_qemu

_SUITE = "trixie"
_VMRUN, _STORE = "target/i386/tcg/system/svm_helper.c", "accel/tcg/cputlb.c"
#: Files, what is there once, and what is to be there.
_MENDED = (
    (_VMRUN, "do_interrupt_x86_hardirq(env, vector, 1);", "do_interrupt_x86_hardirq(env, vector, 1);\n cs->exception_index = -1;"),
    (_VMRUN, "cs->interrupt_request |= CPU_INTERRUPT_VIRQ;", "bql_lock();\n cs->interrupt_request |= CPU_INTERRUPT_VIRQ;\n bql_unlock();"),
    (_VMRUN, '#include "qemu/osdep.h"', '#include "qemu/osdep.h"\n#include "qemu/main-loop.h"'),
    (
        _STORE,
        "tb_invalidate_phys_range_fast(ram_addr, size, retaddr);",
        "if (retaddr && !cpu_in_exclusive_context(cpu)) {\n cpu_loop_exit_atomic(cpu, retaddr);\n }\n"
        " tb_invalidate_phys_range_fast(ram_addr, size, retaddr);",
    ),
)
_DEVICES = "".join(f"CONFIG_{name}=y\n" for name in ("MICROVM", "VIRTIO_BLK", "VIRTIO_NET", "VIRTIO_RNG"))
_OPTIONS = (
    *("--target-list=x86_64-softmmu", "--without-default-features", "--without-default-devices", "--with-devices-x86_64=lab"),
    *("--enable-system", "--enable-tcg", "--enable-seccomp", "--enable-fdt=system", "--disable-install-blobs", "--disable-docs"),
)
_MESON = "meson>=1.5,<2"


def ensure_emulator(cache: Path) -> Path:
    """The program, with its firmware where it looks for it; built if the cache has none that was made so. SystemExit when it cannot be."""
    made_from = repr((_SUITE, _MENDED, _DEVICES, _OPTIONS, _MESON))
    name = f"lab-qemu-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"
    asset = AssetCache(cache).ensure(name, lambda folder: _make(cache, folder))
    return asset.path / "bin" / PROGRAM


def _make(cache: Path, folder: Path) -> dict[str, Any]:
    say("build the lab's QEMU from Debian's source (some minutes, once)")
    with tempfile.TemporaryDirectory(dir=cache) as work:
        source = _source(PrivateApt.for_suite(cache / "apt", _SUITE), Path(work))
        _mend(source)
        (source / "configs/devices/x86_64-softmmu/lab.mak").write_text(_DEVICES)
        build = source / "build"
        build.mkdir()
        tools = Path(work) / "tools"
        venv.create(tools, with_pip=True)
        _run([tools / "bin/pip", "install", "--quiet", "--disable-pip-version-check", _MESON], build)
        _run(["../configure", f"--python={tools}/bin/python", *_OPTIONS], build)
        _run(["ninja", PROGRAM], build)
        _run(["strip", PROGRAM], build)
        (folder / "bin").mkdir()
        shutil.copy2(build / PROGRAM, folder / "bin")
    firmware = Path(ensure_qemu(cache, prefer="package").argv[0]).parents[1] / "share"
    shutil.copytree(firmware, folder / "share/qemu")
    return {"suite": _SUITE}


def _source(apt: PrivateApt, work: Path) -> Path:
    """Debian's source of QEMU with Debian's changes, fetched and checked by apt."""
    sources = work / "sources.d"
    sources.mkdir()
    (sources / "source.sources").write_text(apt.source_stanzas().replace("Types: deb\n", "Types: deb-src\n"))
    (work / "lists/partial").mkdir(parents=True)
    options = ["-o", f"Dir::Etc::sourceparts={sources}", "-o", f"Dir::State::lists={work}/lists"]
    environment = {"APT_CONFIG": str(apt.folder / "apt.conf")}
    _run(["apt-get", *options, "update", "-qq"], work, environment)
    _run(["apt-get", *options, "source", "-qq", "--download-only", f"qemu/{_SUITE}"], work, environment)
    [described] = work.glob("*.dsc")
    _run(["dpkg-source", "--no-check", "--extract", described, "source"], work)
    return work / "source"


def _mend(source: Path) -> None:
    for name, old, new in _MENDED:
        file = source / name
        text = file.read_text()
        if text.count(old) != 1:
            sys.exit(f"lab: the QEMU of {_SUITE} is not the one this was written for: {old!r} is {text.count(old)} times in {name}")
        file.write_text(text.replace(old, new))


def _run(command: Sequence[str | Path], folder: Path, environment: dict[str, str] | None = None) -> None:
    """SystemExit with the end of what it has said when it fails."""
    variables, output = os.environ | (environment or {}), subprocess.PIPE
    try:
        done = subprocess.run(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT, text=True, check=False)
    except FileNotFoundError:
        sys.exit(f"lab: {command[0]} is missing; `tools/setup.sh lab` installs what the build needs")
    if done.returncode != 0:
        sys.exit(f"lab: cannot build its QEMU: {command[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}")
