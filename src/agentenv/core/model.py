"""The nouns everything speaks of: templates, snapshots, sandboxes. Plain frozen values, no I/O.

A snapshot is `(vm state file, memory stack, disk stack, identity)`; build, paused sandbox and fork all point at one.
Times are wall-clock milliseconds since the epoch, sizes say their unit in the name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentenv.core import ids
from agentenv.core.lifecycle import State
from agentenv.core.network import Egress, NetworkSettings, addresses
from agentenv.core.quotas import Quotas

OnTimeout = Literal["kill", "pause"]
TemplateKind = Literal["builtin", "built", "snapshot"]  # made by the node itself, by a build, from a sandbox
Purpose = Literal["sandbox", "build"]  # a build's VM is nobody's sandbox: no caller can see it
PauseMode = Literal["full", "filesystem"]
LogLevel = Literal["debug", "info", "warn", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warn", "error")


@dataclass(frozen=True, slots=True)
class VmIdentity:
    """What a restored VM must find unchanged; a mismatch is refused by name before anything starts."""

    driver: str
    accelerator: str
    cpu_model: str
    vmm_version: str
    kernel_sha256: str
    initramfs_sha256: str
    tsc_khz: int
    machine_type: str = ""  # what the VMM emulates; empty in records of older versions, which do not say


@dataclass(frozen=True, slots=True)
class Machine:
    """Size of a guest."""

    vcpu_count: int
    memory_mb: int
    disk_mb: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable point to start from. Layers are file names in the layer store, bottom first.

    Without memory layers it is a disk alone: whatever is started from it boots.
    """

    snapshot_id: str
    machine: Machine
    identity: VmIdentity
    memory_layers: tuple[str, ...]
    disk_layers: tuple[str, ...]
    created_at_ms: int
    state_sha256: str = ""  # of its device state; empty without memory, and in records of older versions
    seal: str = ""  # over what must stay together, see `core.seals`; empty in records of older versions

    @property
    def has_memory(self) -> bool:
        """Whether a guest can go on from where it was, instead of booting."""
        return bool(self.memory_layers)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An instant that a sandbox can be rolled back to. `parent_id` is the one it descends from; empty: from its start.

    It lives as long as its sandbox. `name` is unique among the sandbox's, or empty.
    """

    checkpoint_id: str
    sandbox_id: str
    snapshot_id: str
    name: str
    parent_id: str
    has_memory: bool
    created_at_ms: int


@dataclass(frozen=True, slots=True)
class Service:
    """What a template keeps running: part of its memory, and to be started again in a guest that boots, and in templates made from it."""

    start: str  # a shell command that starts it
    ready: str  # a shell command that succeeds once it answers; empty: it is given a while
    user: str = "root"
    workdir: str = ""
    env_vars: dict[str, str] = field(default_factory=dict)
    stays: bool = False  # `start` is the service itself and does not return; it runs in a login shell


@dataclass(frozen=True, slots=True)
class Context:
    """What commands start with where nothing else is said, and the service that runs beside them."""

    user: str = "user"
    workdir: str = "/home/user"
    env_vars: dict[str, str] = field(default_factory=dict)
    service: Service | None = None


@dataclass(frozen=True, slots=True)
class Build:
    """One version of a template: a snapshot and what sandboxes made from it start with."""

    build_id: str
    snapshot_id: str
    machine: Machine
    envd_version: str
    created_at_ms: int
    env_vars: dict[str, str] = field(default_factory=dict)
    sandbox_id: str | None = None  # which sandbox it is a snapshot of
    service: Service | None = None
    user: str = "user"
    workdir: str = "/home/user"
    labels: dict[str, str] = field(default_factory=dict)  # what its Dockerfile says of it

    @property
    def context(self) -> Context:
        """What commands in it start with."""
        return Context(self.user, self.workdir, dict(self.env_vars), self.service)


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag and the build it names since `assigned_at_ms`. The build's own time is kept here since builds go before the history."""

    tag: str
    build_id: str
    assignment_id: str
    assigned_at_ms: int
    build_created_at_ms: int


@dataclass(frozen=True, slots=True)
class Template:
    """What sandboxes are created from: builds under tags. `templates` keeps what must hold between the fields.

    `history` are former assignments of the present tags, newest first, bounded. `build_count` counts builds ever made.
    """

    template_id: str
    aliases: tuple[str, ...]
    kind: TemplateKind
    builds: tuple[Build, ...]
    tags: tuple[Tag, ...]
    created_at_ms: int
    updated_at_ms: int
    build_count: int = 1
    public: bool = False
    history: tuple[Tag, ...] = ()
    spawn_count: int = 0
    last_spawned_at_ms: int | None = None

    @property
    def name(self) -> str:
        """What people call it: its first alias, or its id."""
        return self.aliases[0] if self.aliases else self.template_id


@dataclass(frozen=True, slots=True)
class RunningVm:
    """The resources of one life of a VM, recorded before they are acquired so that a restart can find or undo them.

    `memory_layers` and `disk_layers` are what the next snapshot builds on. They name the same bytes as the open stacks, but
    of memory not always the same files: chains are merged while a VM runs. `held_layers` are the files it still reads then.
    `pid` is 0 until the VMM has been started; `(pid, pid_start_ticks)` names the process for good.
    """

    run_id: str
    slot: int
    memory_stack: str
    disk_stack: str
    memory_layers: tuple[str, ...]
    disk_layers: tuple[str, ...]
    upper_layer: str
    pid: int = 0
    pid_start_ticks: int = 0
    held_layers: tuple[str, ...] = ()
    identity: VmIdentity | None = None  # of the snapshot it was restored from, or of the host that booted it; its snapshots have the same
    grown_disk_mb: int = 0  # the size its disk was given at its start, larger than the snapshot's; 0: the same
    needs_whole_memory: bool = False  # a capture broke off: what a VMM that tracks changes has told of them then is lost

    @property
    def layer_ids(self) -> tuple[str, ...]:
        """Every layer that it reads, writes, or that its next snapshot builds on."""
        return (*self.memory_layers, *self.disk_layers, *self.held_layers, self.upper_layer)


@dataclass(frozen=True, slots=True)
class Volume:
    """A named directory tree of the node that sandboxes mount and that outlives them. Whoever has `token` may change its content."""

    volume_id: str
    name: str
    token: str = field(repr=False)
    created_at_ms: int


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """A volume and where a sandbox has it. `name` is what the volume was called when the sandbox was made."""

    volume_id: str
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Secret:
    """A named value that is stored encrypted and never given back to callers. `sealed` is the newest version, base64."""

    secret_id: str
    name: str
    version: int
    sealed: str = field(repr=False)
    metadata: dict[str, str]
    created_at_ms: int
    updated_at_ms: int


@dataclass(frozen=True, slots=True)
class Creation:
    """What a caller may repeat to get the same sandbox again: its key, and a fingerprint of what it asked for with it."""

    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One sandbox as the store knows it."""

    sandbox_id: str
    template_id: str
    template_name: str
    state: State
    machine: Machine
    envd_version: str
    started_at_ms: int
    end_at_ms: int
    timeout_s: int  # asked for at its creation; later changes move `end_at_ms` only
    on_timeout: OnTimeout = "kill"
    auto_pause_memory: bool = True  # what a pause at the timeout saves: memory and disk, or the disk alone
    auto_resume: bool = False
    allow_public_traffic: bool = True
    allow_internet_access: bool | None = None  # None: not said, which means yes
    network: NetworkSettings = field(default_factory=NetworkSettings)
    metadata: dict[str, str] = field(default_factory=dict)
    env_vars: dict[str, str] = field(default_factory=dict)
    volume_mounts: tuple[VolumeMount, ...] = ()
    access_token: str = field(default="", repr=False)  # of the guest agent; empty: it asks for none
    traffic_token: str | None = field(default=None, repr=False)
    snapshot_id: str | None = None  # where it starts from: set while paused, and while a start is under way
    pause_mode: PauseMode = "full"  # what its last pause saved; of use while it is paused
    guest_unresponsive: bool = False  # its agent did not answer when it was paused: its memory must not come back
    vm: RunningVm | None = None
    reason: str = ""  # why it ended, for logs and late questions
    updated_at_ms: int = 0
    build_id: str = ""  # of the template; empty in rows of older versions
    creation: Creation | None = None  # set in the commit that says it runs: a creation that failed may be repeated
    service: Service | None = None  # the template's: a cold boot starts it again
    purpose: Purpose = "sandbox"
    default_user: str = "user"
    default_workdir: str = "/home/user"
    checkpoint_id: str = ""  # the newest checkpoint that its present state descends from
    pause_when_idle: bool | None = None  # when the host is short of memory; None: as the node has it
    quotas: Quotas = field(default_factory=Quotas)  # asked for at its creation; the node's own hold as well

    @property
    def egress(self) -> Egress:
        """What the packet filter of its slot enforces."""
        return addresses(self.network, self.allow_internet_access)


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What a caller asks for when creating a sandbox. Already validated; defaults are the contract's (section 2.2)."""

    template: str
    timeout_s: int = 300
    on_timeout: OnTimeout = "kill"
    auto_pause_memory: bool = True
    auto_resume: bool = False
    allow_public_traffic: bool = True
    allow_internet_access: bool | None = None
    network: NetworkSettings = field(default_factory=NetworkSettings)
    metadata: dict[str, str] = field(default_factory=dict)
    env_vars: dict[str, str] = field(default_factory=dict)
    volume_mounts: tuple[tuple[str, str], ...] = ()  # name of a volume, path in the guest
    secure: bool = True  # whether the guest agent asks for the sandbox's token
    unknown_fields: tuple[str, ...] = ()  # asked for, and ignored: the sandbox's log says so
    creation: Creation | None = None
    pause_when_idle: bool | None = None
    quotas: Quotas = field(default_factory=Quotas)
    disk_mb: int | None = None  # of its disk; None: as the template has


def new_sandbox(request: CreateRequest, template: Template, build: Build, now_ms: int) -> Sandbox:
    """A sandbox about to be created, with an identity of its own; what the caller sets wins over what the build brings."""
    return Sandbox(
        sandbox_id=ids.new_sandbox_id(),
        template_id=template.template_id,
        template_name=template.name,
        state=State.CREATING,
        machine=build.machine,
        envd_version=build.envd_version,
        started_at_ms=now_ms,
        end_at_ms=now_ms + 1000 * request.timeout_s,
        timeout_s=request.timeout_s,
        on_timeout=request.on_timeout,
        auto_pause_memory=request.auto_pause_memory,
        auto_resume=request.auto_resume,
        allow_public_traffic=request.allow_public_traffic,
        allow_internet_access=request.allow_internet_access,
        network=request.network,
        metadata=dict(request.metadata),
        env_vars={**build.env_vars, **request.env_vars},
        access_token=ids.new_token() if request.secure else "",
        traffic_token=None if request.allow_public_traffic else ids.new_token(),
        snapshot_id=build.snapshot_id,
        updated_at_ms=now_ms,
        build_id=build.build_id,
        service=build.service,
        default_user=build.user,
        default_workdir=build.workdir,
        pause_when_idle=request.pause_when_idle,
        quotas=request.quotas,
    )


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """One of several sandboxes that were asked for in one call: it, or the error that it alone met."""

    sandbox: Sandbox | None = None
    error_status: int = 0
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class SandboxFilter:
    """Which sandboxes to list (contract section 2.3). Empty fields do not filter."""

    states: frozenset[str] = frozenset({"running", "paused"})
    metadata: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    started_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list: `after` is the opaque position the last part ended at."""

    limit: int = 100
    after: str | None = None
    ascending: bool = False


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of a sandbox's own log (its life on this node)."""

    timestamp_ms: int
    level: LogLevel
    logger: str
    message: str
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which part of a log to read: from `cursor_ms` on, or back from it (both included); at least `level`; holding `search`."""

    cursor_ms: int | None = None
    backward: bool = False
    level: LogLevel = "debug"
    search: str = ""
    limit: int = 1000

    def matches(self, entry: LogEntry) -> bool:
        """Whether an entry is of that level and holds the text; its place in time is not looked at."""
        return LOG_LEVELS.index(entry.level) >= LOG_LEVELS.index(self.level) and self.search in entry.message


@dataclass(frozen=True, slots=True)
class MetricSample:
    """What a guest used at one moment, as its envd says (contract section 3.2); the time is the host's.

    `cpu_used_percent` is 0 to 100 of all its CPUs together, since the reading before; memory "used" is what is not available.
    """

    timestamp_ms: int
    cpu_count: int
    cpu_used_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    memory_cache_bytes: int
    disk_used_bytes: int
    disk_total_bytes: int
