"""How large a machine a build may ask for."""

from __future__ import annotations

from agentenv.config.limits import LimitsConfig
from agentenv.core.builds import MachineSize
from agentenv.core.disk_size import check_most
from agentenv.core.errors import InvalidInput

_LEAST_MEMORY_MB = 128


def check_size(asked: MachineSize, limits: LimitsConfig) -> None:
    """InvalidInput naming the field and what it may be. Whether the disk is large enough is known once its base is."""
    _check_range("cpuCount", asked.vcpu_count, range(1, limits.vcpus_of_sandbox + 1))
    _check_range("memoryMB", asked.memory_mb, range(_LEAST_MEMORY_MB, limits.memory_mb_of_sandbox + 1))
    check_most(asked.disk_mb, limits.disk_mb_of_sandbox)


def _check_range(field: str, value: int | None, allowed: range) -> None:
    if value is not None and value not in allowed:
        raise InvalidInput(f"{field}: must be {allowed.start} to {allowed.stop - 1}, not {value}")
