"""What a host needs whose CPU QEMU emulates, for the VMs on it to live.

QEMU's VMRUN (seen in 10.0 and 11.1) leaves the vector of an interrupt that it injects in `exception_index`. When the host's CPU is
kicked before the guest's next exit, the vector is delivered once more, wherever the guest is by then, also with interrupts off: a timer
interrupt within a timer interrupt waits for ever for a lock that its own CPU holds. Guests that end interrupts by an exit rather than by
a flag in memory have exited before they take any lock, so they are told that there is no such flag.
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
