"""The settings of section `memory`: how far the node goes beyond its memory, and what gives way."""

from __future__ import annotations

from pydantic import Field

from agentenv.config.section import Section


class MemoryConfig(Section):
    """How far the node goes beyond its memory, and what gives way."""

    overcommit_percent: int = Field(
        1000,
        ge=0,
        le=100_000,
        description="Most memory that the running sandboxes' machines may have together, percent of the host's; 0: no bound.",
    )
    tight_mb: int = Field(
        1024, ge=0, description="Available host memory (beyond limits.memory_reserve_mb) below which idle sandboxes give some back, MiB."
    )
    tight_some_percent: int = Field(
        10, ge=1, le=100, description="So does the share of the last ten seconds in which some task waited for memory, percent."
    )
    critical_full_percent: int = Field(
        10,
        ge=1,
        le=100,
        description="Share in which all tasks waited, from which none is started and idle ones are paused if that is allowed, percent.",
    )
    idle_s: int = Field(60, ge=1, le=86400, description="Idle is who has used less than `idle_cpu_percent` for so long, seconds.")
    idle_cpu_percent: int = Field(5, ge=1, le=100, description="CPU time of the VMM of an idle sandbox, percent of one CPU.")
    pause_idle: bool = Field(
        False,
        description="Pause the sandbox that is idle for longest when memory is critical, unless its creation said `pauseWhenIdle: false`; "
        "those that said `true` may be paused in any case.",
    )
