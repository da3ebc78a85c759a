"""What VMs on a host need whose CPU QEMU emulates.

Guests that end interrupts by a flag in memory (KVM_FEATURE_PV_EOI) fell silent there far more often than those that end them by an exit,
also on a QEMU whose known faults are mended (`emulator.py`). Why is not known: they are told that there is no such flag.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TEMPLATE: dict[str, Any] = {
    "cpuid_modifiers": [
        {
            "leaf": "0x40000001",  # what KVM offers its guests
            "subleaf": "0x0",
            "flags": 0,
            "modifiers": [{"register": "eax", "bitmap": f"0b{'x' * 25}0{'x' * 6}"}],  # bit 6: KVM_FEATURE_PV_EOI
        }
    ],
    "msr_modifiers": [],
}


def is_emulated() -> bool:
    """Whether this machine's CPU is one that QEMU emulates."""
    return "QEMU TCG CPU" in Path("/proc/cpuinfo").read_text()


def cpu_template() -> dict[str, Any]:
    """Firecracker's CPU template for guests of this machine; empty where none is needed."""
    return _TEMPLATE if is_emulated() else {}
