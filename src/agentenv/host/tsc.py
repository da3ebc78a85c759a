"""The rate of this host's time stamp counter (TSC).

An emulated guest reads the host's TSC and has nothing to calibrate it with, so it is told the rate on its kernel
command line (`tsc_early_khz=`); a wrong one makes guest time run at the wrong speed, and the rate is part of a
snapshot's identity. No file of Linux gives the rate, so three sources are asked, best first:

1. the kernel's own conversion factors in a perf event's memory page (perf_event_open(2), `cap_user_time`):
   the kernel's value to 1 kHz. Not offered where the kernel keeps time by a hypervisor's clock.
2. "bogomips" in /proc/cpuinfo, which on x86 is the calibrated rate / 500 kHz cut to two decimals: at most 5 kHz low
   (2 ppm at 2.1 GHz), the same at each call. Believed only if source 3 agrees, for kernels that measure it otherwise.
3. a measurement against CLOCK_MONOTONIC_RAW over 100 ms: within about 2 ppm on a busy machine, and a little
   different at each call.

Invariant: two calls on one booted host give the same value wherever source 1 or 2 is usable.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import struct
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from agentenv.core.errors import HostNotReady

MEASURE_S = 0.1
AGREEMENT_PPM = 50
"""How far bogomips and the measurement may differ and still be called the same: far above their errors, far below
what another way of computing bogomips would give."""

SAME_RATE_PPM = 250
"""Two hosts, or two boots of one, whose rates differ by less count as equal for a snapshot: calibration at boot
differs by tens of ppm, and 250 ppm is 0.9 s in an hour of guest time, mended by the clock step after a restore."""

_PERF_EVENT_OPEN = 298  # system call number, x86-64
_PERF_TYPE_SOFTWARE, _PERF_COUNT_SW_DUMMY = 1, 9
_PERF_ATTR_BYTES = 112
_CAP_USER_TIME = 1 << 3
_RDTSC = bytes.fromhex("0f3148c1e2204809d0c3")
"""rdtsc; shl rdx, 32; or rax, rdx; ret"""


@cache
def tsc_khz() -> int:
    """The host's TSC rate in kHz, found once per process (100 ms at most). Raises HostNotReady if nothing tells it."""
    if platform.machine() != "x86_64":
        raise HostNotReady(f"a {platform.machine()} host has no time stamp counter", "use an x86-64 host")
    if exact := _from_perf_page():
        return exact
    listed = bogomips_khz(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"))
    rate = choose_khz(listed, _measured_khz())
    if rate is None:
        raise HostNotReady(
            "cannot tell the rate of the time stamp counter",
            "use a host whose /proc/cpuinfo tells bogomips, or whose policy allows executable memory",
        )
    return rate


def same_tsc_rate(one_khz: int, other_khz: int) -> bool:
    """Whether a snapshot made at one rate may run at the other."""
    return abs(one_khz - other_khz) * 1_000_000 <= SAME_RATE_PPM * max(one_khz, other_khz)


def choose_khz(listed_khz: int | None, measured_khz: int | None) -> int | None:
    """The listed rate when the measurement agrees or is impossible (it is steadier), else the measured one."""
    if listed_khz is None or measured_khz is None:
        return listed_khz or measured_khz
    agree = abs(listed_khz - measured_khz) * 1_000_000 <= AGREEMENT_PPM * measured_khz
    return listed_khz if agree else measured_khz


def bogomips_khz(cpuinfo: str) -> int | None:
    """The TSC rate that /proc/cpuinfo implies, in kHz, or None."""
    match = re.search(r"^bogomips\s*:\s*(\d+)\.(\d\d)$", cpuinfo, re.MULTILINE)
    return (int(match.group(1)) * 100 + int(match.group(2))) * 5 if match else None


def khz_of_factors(multiplier: int, shift: int) -> int:
    """The rate for which `ns = ticks * multiplier >> shift`, rounded to 1 kHz."""
    return ((1_000_000 << shift) + multiplier // 2) // multiplier


def measure_khz(read_ticks: Callable[[], int], read_ns: Callable[[], int], duration_s: float = MEASURE_S) -> int:
    """The rate of `read_ticks` against `read_ns`, in kHz.

    Both ends are read several times and the tightest reading is kept: being scheduled away between two clocks then
    costs a retry, not accuracy.
    """

    def reading() -> tuple[int, int]:
        best: tuple[int, int, int] | None = None
        for _ in range(50):
            before = read_ns()
            ticks = read_ticks()
            after = read_ns()
            if best is None or after - before < best[0]:
                best = (after - before, ticks, (before + after) // 2)
        assert best is not None
        return best[1], best[2]

    start_ticks, start_ns = reading()
    end_ns = start_ns + int(duration_s * 1e9)
    while (left_ns := end_ns - read_ns()) > 0:
        time.sleep(left_ns / 1e9)
    stop_ticks, stop_ns = reading()
    return round((stop_ticks - start_ticks) * 1e6 / (stop_ns - start_ns))


def _measured_khz() -> int | None:
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None  # a host policy may forbid executable memory
    code.write(_RDTSC)
    anchor = ctypes.c_char.from_buffer(code)
    read_ticks = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(anchor))
    try:
        return measure_khz(read_ticks, lambda: time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW))
    finally:
        del read_ticks, anchor  # the mapping cannot be closed while they point into it
        code.close()


def _from_perf_page() -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(
        struct.pack("<IIQ", _PERF_TYPE_SOFTWARE, _PERF_ATTR_BYTES, _PERF_COUNT_SW_DUMMY), _PERF_ATTR_BYTES
    )
    descriptor = libc.syscall(_PERF_EVENT_OPEN, attributes, 0, -1, -1, 0)
    if descriptor < 0:
        return None  # forbidden by perf_event_paranoid or a seccomp filter
    try:
        with mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ) as page:
            # struct perf_event_mmap_page: capabilities at 40, time_shift (u16) at 50, time_mult (u32) at 52
            (capabilities,) = struct.unpack_from("<Q", page, 40)
            shift, multiplier = struct.unpack_from("<HI", page, 50)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return khz_of_factors(multiplier, shift) if capabilities & _CAP_USER_TIME and multiplier else None
