"""What Firecracker is asked for, request by request: machines, loads, saves. Pure, but for reading a CPU template."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.core.errors import InvalidInput
from agentenv.vmm.driver import BootSpec, VmSpec
from agentenv.vmm.jail import CAPTURE

Request = tuple[str, str, dict[str, Any]]
"""Method, path and body."""
_TRACK_DIRTY_PAGES_SINCE = (1, 13)
_REFILL_MS = 1000
_DRIVE, _NETWORK = "root", "net"
_BUILT_IN_TEMPLATES = ("C3", "T2", "T2A", "T2CL", "T2S")


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Most a guest may do in a second; 0 is no limit. A burst of one second's worth is let through at once."""

    disk_bytes: int = 0
    disk_operations: int = 0
    network_bytes: int = 0
    network_packets: int = 0


@dataclass(frozen=True, slots=True)
class CpuTemplate:
    """What guests see of the CPU, alike on all hosts: one of Firecracker's own by `name`, or a `content`. Neither: the host's CPU."""

    name: str = ""
    content: dict[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """What snapshots depend on instead of the host's CPU; empty without a template."""
        if self.name:
            return f"template {self.name}"
        text = json.dumps(self.content, sort_keys=True).encode()
        return f"template sha256:{hashlib.sha256(text).hexdigest()[:16]}" if self.content else ""


def cpu_template(setting: str) -> CpuTemplate:
    """The template a setting names: one of Firecracker's own, or a JSON file. InvalidInput."""
    if not setting or setting in _BUILT_IN_TEMPLATES:
        return CpuTemplate(setting)
    hint = f"name one of {', '.join(_BUILT_IN_TEMPLATES)}, or a file as cpu-template-helper writes it"
    try:
        content = json.loads(Path(setting).read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"vmm.cpu_template names {setting}, which cannot be read: {error}", hint) from error
    if not isinstance(content, dict) or not content:
        raise InvalidInput(f"vmm.cpu_template names {setting}, which is no CPU template", hint)
    return CpuTemplate(content=content)


def numbers(version: str) -> tuple[int, ...]:
    """Major and minor number of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def boot_requests(spec: VmSpec, boot: BootSpec, limits: RateLimits, template: CpuTemplate) -> list[Request]:
    """What a machine is made of, request by request. Pure."""
    cmdline = f"console=ttyS0 reboot=k panic=-1 quiet mitigations=off aenv.exit=reboot {boot.cmdline}"
    machine = {"vcpu_count": spec.machine.vcpu_count, "mem_size_mib": spec.machine.memory_mb, "track_dirty_pages": True}
    drive = {"drive_id": _DRIVE, "path_on_host": "/disk", "is_root_device": False, "is_read_only": False, "cache_type": "Writeback"}
    network = {"iface_id": _NETWORK, "host_dev_name": spec.tap, "guest_mac": spec.guest_mac}
    return [
        ("PUT", "/machine-config", machine | ({"cpu_template": template.name} if template.name else {})),
        *([("PUT", "/cpu-config", template.content)] if template.content else []),
        ("PUT", "/boot-source", {"kernel_image_path": "/kernel", "initrd_path": "/initramfs", "boot_args": cmdline}),
        ("PUT", f"/drives/{_DRIVE}", drive | _drive_limits(spec, limits)),
        ("PUT", f"/network-interfaces/{_NETWORK}", network | _network_limits(limits)),
        ("PUT", "/entropy", {}),
        ("PUT", "/actions", {"action_type": "InstanceStart"}),
    ]


def save_request(is_whole: bool) -> dict[str, Any]:
    """How a state is saved, with all of the memory or what changed of it. Pure."""
    return {"snapshot_type": "Full" if is_whole else "Diff", "snapshot_path": "/state-out", "mem_file_path": CAPTURE}


def disk_request() -> Request:
    """How the disk is looked at again, at the size it has now. Pure."""
    return "PATCH", f"/drives/{_DRIVE}", {"drive_id": _DRIVE, "path_on_host": "/disk"}


def load_requests(spec: VmSpec, version: str, limits: RateLimits) -> list[Request]:
    """How a state is loaded and set going, with this node's limits instead of those in the state. Pure."""
    tracking = "track_dirty_pages" if numbers(version) >= _TRACK_DIRTY_PAGES_SINCE else "enable_diff_snapshots"
    load = {
        "snapshot_path": "/state",
        "mem_backend": {"backend_type": "File", "backend_path": "/memory"},
        tracking: True,
        "network_overrides": [{"iface_id": _NETWORK, "host_dev_name": spec.tap}],
    }
    return [
        ("PUT", "/snapshot/load", load),
        ("PATCH", f"/drives/{_DRIVE}", {"drive_id": _DRIVE} | _drive_limits(spec, limits)),
        ("PATCH", f"/network-interfaces/{_NETWORK}", {"iface_id": _NETWORK} | _network_limits(limits)),
        ("PATCH", "/vm", {"state": "Resumed"}),
    ]


def _drive_limits(spec: VmSpec, limits: RateLimits) -> dict[str, Any]:
    """The sandbox's own, else the node's."""
    asked = spec.quotas
    found = _limiter(asked.disk_bytes_per_s or limits.disk_bytes, asked.disk_operations_per_s or limits.disk_operations)
    return {"rate_limiter": found}


def _network_limits(limits: RateLimits) -> dict[str, Any]:
    found = _limiter(limits.network_bytes, limits.network_packets)
    return {"rx_rate_limiter": found, "tx_rate_limiter": found}


def _limiter(size_bytes: int, operations: int) -> dict[str, Any]:
    """Both buckets: one that is left out keeps what the state has of it, and one of size 0 is no limit (Firecracker's own words)."""
    buckets = {"bandwidth": size_bytes, "ops": operations}
    return {name: {"size": size, "refill_time": _REFILL_MS} for name, size in buckets.items()}
