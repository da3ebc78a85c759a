"""The settings of section `limits`: what the node refuses to go beyond, and what one sandbox may use of it."""

from __future__ import annotations

from pydantic import Field

from agentenv.config.section import Section
from agentenv.core.quotas import Quotas


class LimitsConfig(Section):
    """What the node refuses to go beyond."""

    sandboxes_running: int = Field(200, ge=1, le=10000, description="Most sandboxes that run at once.")
    memory_reserve_mb: int = Field(512, ge=0, description="Host memory that must stay available when a sandbox starts, MiB.")
    starts_at_once: int = Field(4, ge=1, le=256, description="Restores that run at the same time; others wait their turn.")
    disk_reserve_mb: int = Field(256, ge=0, description="Free space a pause or create must leave on the node's disk, MiB.")
    templates: int = Field(10000, ge=1, le=100000, description="Most templates, snapshots of sandboxes included.")
    layers_in_chain: int = Field(32, ge=4, le=200, description="Layers of memory or disk a paused sandbox may have before they are merged.")
    checkpoints_of_sandbox: int = Field(100, ge=1, le=10000, description="Most checkpoints that one sandbox may have.")
    builds_at_once: int = Field(2, ge=1, le=64, description="Template builds that run at the same time; others wait their turn.")
    build_minutes: int = Field(60, ge=1, le=1440, description="Longest template build, minutes.")
    build_steps_cached: int = Field(
        1000, ge=0, le=100000, description="Disks of build steps that are kept for later builds; the one used longest ago goes first."
    )
    build_file_mb: int = Field(2048, ge=1, le=1048576, description="Largest archive that may be uploaded for a build's COPY step, MiB.")
    build_files_mb: int = Field(
        8192, ge=1, le=16777216, description="Uploaded archives that are kept, all together, MiB; the one used longest ago goes first."
    )
    build_caches_mb: int = Field(
        8192,
        ge=0,
        le=16777216,
        description="What cache mounts of RUN hold for later builds, all together, MiB; the one used longest ago goes first.",
    )
    build_downloads_mb: int = Field(
        4096, ge=0, le=16777216, description="What ADD has fetched and is kept, MiB; the one used longest ago goes first."
    )
    build_fetch_s: int = Field(600, ge=1, le=86400, description="Longest fetch of one source of ADD, seconds.")
    build_fetch_private: tuple[str, ...] = Field(
        (), description="Hosts (`host` or `host:port`) that ADD may fetch from although their address is in `network.denied_cidrs`."
    )
    killed_kept_s: int = Field(3600, ge=0, description="How long the row and log of a killed sandbox are kept, seconds.")
    vcpus_of_sandbox: int = Field(32, ge=1, le=32, description="Most virtual CPUs that a template may have.")
    memory_mb_of_sandbox: int = Field(65536, ge=128, le=65536, description="Most memory that a template may have, MiB.")
    disk_mb_of_sandbox: int = Field(
        65536, ge=1024, le=1048576, description="Largest disk that a build or a creation may ask for, MiB (only written blocks take space)."
    )
    vmm_overhead_mb: int = Field(
        256, ge=64, le=4096, description="Memory that a VMM may take beyond its guest's and the translation cache of an emulated one, MiB."
    )
    cpu_percent_of_sandbox: int = Field(
        0, ge=0, le=3200, description="Most CPU time of one sandbox, percent of one CPU; a creation may ask for less; 0: no limit."
    )
    disk_mb_per_s_of_sandbox: int = Field(0, ge=0, le=1_000_000, description="Most that one sandbox reads and writes, MiB/s; 0: no limit.")
    disk_operations_per_s_of_sandbox: int = Field(
        0, ge=0, le=10_000_000, description="Most disk operations of one sandbox in a second; 0: no limit."
    )
    network_mb_per_s_of_sandbox: int = Field(
        0, ge=0, le=100_000, description="Most that one sandbox sends, and most that it receives, MiB/s; 0: no limit."
    )

    @property
    def quotas(self) -> Quotas:
        """What the node gives to one sandbox."""
        return Quotas(
            cpu_percent=self.cpu_percent_of_sandbox,
            disk_bytes_per_s=self.disk_mb_per_s_of_sandbox << 20,
            disk_operations_per_s=self.disk_operations_per_s_of_sandbox,
            network_bytes_per_s=self.network_mb_per_s_of_sandbox << 20,
        )
