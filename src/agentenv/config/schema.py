"""The one configuration schema: every setting with its default, unit, meaning and environment variable.

`default.toml` and the reference page are generated from it (`config.reference`), and nothing else reads the environment.
The variable of setting `section.key` is `AENV_SECTION_KEY`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from agentenv.config.limits import LimitsConfig
from agentenv.config.memory import MemoryConfig
from agentenv.config.section import Section

Port = Annotated[int, Field(ge=1, le=65535)]
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DOMAIN = re.compile(rf"(?=[^:]{{1,200}}(?::|\Z)){_LABEL}(?:\.{_LABEL})*(?::([0-9]{{1,5}}))?")


class NodeConfig(Section):
    """Where the node keeps its things."""

    home: Path = Field(Path("/var/lib/agentenv"), description="Layers, snapshots, database, keys, caches.")
    run: Path = Field(Path("/run/agentenv"), description="Sockets, pid files and mounts; gone after a reboot.")


class ApiConfig(Section):
    """The listeners for API and sandbox traffic, and the names clients know them by."""

    host: str = Field("127.0.0.1", description="Address to listen on. Beyond loopback a key is always required.")
    port: Port = Field(3000, description="TCP port for API and sandbox traffic, without TLS.")
    domain: str = Field(
        "",
        description="Domain for `<port>-<sandboxId>.<domain>` and `api.<domain>` hosts, with the port clients use when it is not 443; "
        "empty means `localhost:<port>` is reported to clients.",
    )
    tls_port: Literal["auto", "off"] | Port = Field(
        "auto",
        description="TCP port of the TLS listener. `auto`: none without a domain, else the domain's port, else 443 "
        "(none when the domain's port is `port`).",
    )
    tls_cert: str = Field(
        "", description="PEM file with the certificate chain for `<domain>` and `*.<domain>`; empty: the node's own CA makes one."
    )
    tls_key: str = Field("", description="PEM file with the private key of `tls_cert`.")
    drain_minutes: int = Field(
        60, ge=0, le=1440, description="How long a server that was replaced (`aenv reload`) serves the streams it has, minutes."
    )
    max_timeout_hours: int = Field(24, ge=1, le=8760, description="Longest timeout a caller may ask for, hours.")

    @field_validator("domain")
    @classmethod
    def _is_domain(cls, value: str) -> str:
        value = value.strip().lower()
        match = _DOMAIN.fullmatch(value)
        if value and (match is None or not 1 <= int(match[1] or 443) <= 65535 or value.partition(":")[0].rpartition(".")[2].isdigit()):
            raise ValueError("not a domain name, with or without a port (such as sandbox.example.com or sbx.localhost:8443)")
        return value

    @model_validator(mode="after")
    def _tls_is_possible(self) -> ApiConfig:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: set both or none")
        if self.tls_listen_port is not None and "." not in self.domain_name and not self.tls_cert:
            raise ValueError(
                f"TLS for *.{self.domain_name} is not possible, because clients accept no such certificate; "
                f"use a domain of two or more labels (such as sbx.{self.domain_name}), or tls_port off"
            )
        if self.tls_port != "off" and self.tls_port == self.port:
            raise ValueError("tls_port and port must differ")
        return self

    @property
    def domain_name(self) -> str:
        """The domain without its port; empty in single-host mode."""
        return self.domain.partition(":")[0]

    @property
    def tls_listen_port(self) -> int | None:
        """Where to listen with TLS; None for nowhere."""
        if self.tls_port == "off" or not self.domain:
            return None
        if self.tls_port != "auto":
            return self.tls_port
        wanted = int(self.domain.partition(":")[2] or 443)
        return None if wanted == self.port else wanted

    @property
    def client_domain(self) -> str:
        """What clients put after `<port>-<sandboxId>.`, with a port where they must say one (contract section 1.2)."""
        if not self.domain:
            return f"localhost:{self.port}"
        port = self.tls_listen_port
        return self.domain if ":" in self.domain or port in (None, 443) else f"{self.domain}:{port}"


class GuestConfig(Section):
    """What guests are made of."""

    vcpu_count: int = Field(1, ge=1, le=32, description="Virtual CPUs of a template that names no other number.")
    memory_mb: int = Field(512, ge=128, le=65536, description="Guest memory of a template that names no other size, MiB.")
    disk_mb: int = Field(8192, ge=1024, le=1048576, description="Size of the root disk, MiB (only written blocks take space).")
    kernel: str = Field("", description="Path of a vmlinux to boot instead of Debian's cloud kernel.")
    kernel_suite: str = Field("bookworm-backports", description="Debian suite of the guest kernel package.")
    rootfs_suite: str = Field("bookworm", description="Debian suite of the base template.")
    dns_servers: tuple[str, ...] = Field(("8.8.8.8", "1.1.1.1"), description="Name servers guests are told to use.")
    boot_deadline_s: int = Field(
        120,
        ge=5,
        le=3600,
        description="Longest cold boot (template build, resume without memory) up to the first answer, seconds.",
    )
    answer_deadline_s: int = Field(10, ge=1, le=600, description="How long a pause waits for the guest's agent to answer, seconds.")
    freeze_deadline_s: int = Field(
        60, ge=1, le=3600, description="How long a pause without memory waits for the guest to write its files out, seconds."
    )
    service_deadline_s: int = Field(
        900,
        ge=1,
        le=3600,
        description="How long a template's start command may take until its ready command succeeds (template build, cold boot), seconds.",
    )
    restore_deadline_s: int = Field(30, ge=1, le=600, description="Longest restore up to the guest's first answer, seconds.")


class TemplatesConfig(Section):
    """The built-in templates."""

    built_in: tuple[Literal["base", "code-interpreter-v1"], ...] = Field(
        ("base",), description="Built-in templates that `aenv up` makes and keeps current, beside `base` and those made before."
    )


class WarmConfig(Section):
    """VMs that stand ready, so that a create only has to wake one."""

    sandboxes: int = Field(
        1, ge=0, le=64, description="Kept ready of each template that sandboxes were created from more than once, and lately; 0: none."
    )
    memory_mb: int = Field(2048, ge=0, description="Most host memory for them, MiB; each counts for a quarter of its guest's memory.")
    idle_s: int = Field(600, ge=1, description="How long after the last create from a template, seconds.")


class ImagesConfig(Section):
    """OCI images: where they come from, and what the node takes in."""

    default_registry: str = Field("docker.io", description="Registry of image names that name none.")
    allow: tuple[str, ...] = Field(
        (), description="Images that may be used, as `registry/repository` with `*` for any text; empty: all but those in `deny`."
    )
    deny: tuple[str, ...] = Field((), description="Images that may not be used; stronger than `allow`.")
    mirrors: tuple[str, ...] = Field(
        (),
        description="Mirrors to ask first, in order: `<registry>=<mirror host[:port]>[/prefix]`, such as `docker.io=mirror.lan:5000/hub`.",
    )
    insecure_registries: tuple[str, ...] = Field(
        (), description="Registries (`host[:port]`) that may be asked without TLS, or whose certificate nobody checks."
    )
    docker_config: str = Field(
        "",
        description="Docker's `config.json` with credentials for registries; empty: `.docker/config.json` in the home of the node's user.",
    )
    certs_dir: Path = Field(
        Path("/etc/docker/certs.d"), description="Certificates of registries' own authorities: `<host[:port]>/*.crt` in this folder."
    )
    cache_mb: int = Field(20480, ge=0, description="Downloaded blobs that are kept for later pulls, MiB; the longest unused go first.")
    lazy: bool = Field(
        True,
        description="Start from overlaybd-native images while their layers are still in the registry; false: download them whole first.",
    )
    twins: tuple[str, ...] = Field(
        (), description="Registries (`host[:port]`) that are asked whether an ordinary image has an overlaybd-native twin (its referrers)."
    )
    block_cache_mb: int = Field(
        10240, ge=0, le=1 << 22, description="Blocks of layers in registries that are kept on the node's disk, MiB."
    )
    block_connections: int = Field(16, ge=1, le=256, description="Connections to one registry at a time for such blocks.")
    download_mb_per_s: int = Field(
        32, ge=0, le=100_000, description="Rate at which layers in use are downloaded whole in the background, MiB/s; 0: they are not."
    )
    download_delay_s: int = Field(60, ge=0, le=86400, description="How long a layer is in use before its download begins, seconds.")
    trace_s: int = Field(
        30,
        ge=0,
        le=3600,
        description="How long the first start from layers in a registry is watched, seconds: what it reads is fetched ahead for the next.",
    )
    pull_deadline_s: int = Field(3600, ge=10, le=86400, description="Longest download of one image, seconds.")
    convert_deadline_s: int = Field(3600, ge=10, le=86400, description="Longest conversion of one layer, seconds.")
    conversions_at_once: int = Field(2, ge=1, le=64, description="Layers converted at the same time; others wait their turn.")
    layer_max_mb: int = Field(65536, ge=1, description="Largest layer, decompressed, MiB.")
    layer_max_entries: int = Field(2_000_000, ge=1, description="Most files of one layer.")
    layer_max_ratio: int = Field(
        2000, ge=10, description="Most decompressed bytes for each compressed one, from 64 MiB on; ordinary layers stay below 100."
    )

    @field_validator("mirrors")
    @classmethod
    def _are_mirrors(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for mirror in value:
            registry, equals, place = mirror.partition("=")
            if not (registry and equals and place) or "://" in place:
                raise ValueError(f"{mirror!r} is not `<registry>=<host[:port]>[/prefix]`")
        return value

    @property
    def docker_config_file(self) -> Path:
        """Where credentials are looked for."""
        return Path(self.docker_config) if self.docker_config else Path.home() / ".docker" / "config.json"


class VmmConfig(Section):
    """The virtual machine monitor."""

    driver: Literal["auto", "qemu", "firecracker"] = Field(
        "auto", description="What VMs run on. `auto`: Firecracker where KVM and its programs are there, else QEMU."
    )
    firecracker: str = Field("", description="Path of a firecracker, 1.12 or newer; empty: the one in PATH.")
    jailer: str = Field("", description="Path of the jailer of the same release; empty: the one in PATH.")
    cpu_template: str = Field(
        "",
        description="CPU that Firecracker shows to guests, for snapshots that move between hosts: one of its own by name, or a JSON file.",
    )
    virtualization: Literal["kvm", "pvm"] = Field(
        "kvm", description="What Firecracker runs on; `pvm` needs a firecracker, a jailer and a `guest.kernel` that are made for it."
    )
    accelerator: Literal["auto", "kvm", "tcg"] = Field("auto", description="`auto`: KVM where ordinary guests run on it, else emulation.")
    qemu: str = Field("", description="Path of a qemu-system-x86_64 to use instead of the packaged one.")
    code_cache_mb: int = Field(64, ge=16, le=1024, description="Translation cache of an emulated VM, MiB; filled as the guest runs.")
    own_memory_copied_mb: int = Field(
        16, ge=0, le=1024, description="What a sandbox alone has of its memory is copied when it comes back, up to so many MiB; 0: never."
    )


class NetworkConfig(Section):
    """Guest networks."""

    pool_cidr: str = Field("10.119.0.0/16", description="Addresses of the links between host and sandbox namespaces; two each.")
    slots_ready: int = Field(4, ge=0, le=256, description="Network slots kept ready for the next sandboxes.")
    denied_cidrs: tuple[str, ...] = Field(
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "224.0.0.0/4",
            "240.0.0.0/4",
        ),
        description="Ranges no guest reaches, whatever its own policy says.",
    )


class StorageConfig(Section):
    """How full the node's disk may get before caches give way."""

    high_percent: int = Field(
        85, ge=1, le=100, description="Use of the disk with the node's home above which caches give up what was used longest ago, percent."
    )
    low_percent: int = Field(75, ge=0, le=99, description="Use at which they stop giving up, percent.")
    images_unused_days: int = Field(
        0,
        ge=0,
        le=36500,
        description="Days after its last use from which an image from a registry that nothing uses gives way, too; 0: never.",
    )
    verify_mb_per_s: int = Field(
        4, ge=0, le=10_000, description="Rate at which layers are compared with their checksums in the background, MiB/s; 0: they are not."
    )
    verify_days: int = Field(30, ge=1, le=3650, description="How often each layer is compared in the background, days.")

    @model_validator(mode="after")
    def _low_is_lower(self) -> StorageConfig:
        if self.low_percent >= self.high_percent:
            raise ValueError(f"low_percent ({self.low_percent}) must be less than high_percent ({self.high_percent})")
        return self


class Config(Section):
    """All settings of a node."""

    node: NodeConfig = NodeConfig()
    api: ApiConfig = ApiConfig()
    guest: GuestConfig = GuestConfig()
    templates: TemplatesConfig = TemplatesConfig()
    warm: WarmConfig = WarmConfig()
    images: ImagesConfig = ImagesConfig()
    vmm: VmmConfig = VmmConfig()
    network: NetworkConfig = NetworkConfig()
    limits: LimitsConfig = LimitsConfig()
    memory: MemoryConfig = MemoryConfig()
    storage: StorageConfig = StorageConfig()
