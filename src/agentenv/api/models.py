"""Request bodies, by the exact JSON names of the contract (sections 2.2 and 2.4; network settings have their own module).

A field the contract knows and this node cannot honour is refused by name when it asks for something. A field nobody knows
is ignored, so that newer clients work; the log of a sandbox names those of its creation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from agentenv.api.bodies import Body
from agentenv.api.network_models import NetworkBody, to_settings
from agentenv.core.errors import InvalidInput, Unsupported
from agentenv.core.model import CreateRequest
from agentenv.core.quotas import Quotas
from agentenv.core.templates import TAGS_MAX

_NOT_BUILT = "leave it out; this node does not have the feature"
MAX_ENV_VAR_BYTES = 128 << 10  # the kernel's limit for one string of an environment (MAX_ARG_STRLEN)
MAX_ENV_VARS_BYTES = 1 << 20  # half of what a program with an 8 MiB stack can be given, so that its arguments fit, too
MAX_METADATA_BYTES = 64 << 10  # a list repeats it for each of 100 sandboxes
MAX_UNKNOWN_FIELDS = 20  # named in a sandbox's log


def _check_env_vars(variables: dict[str, str]) -> dict[str, str]:
    total_bytes = 0
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ValueError(f"{name[:80]!r} cannot be an environment variable: no =, no NUL, not empty")
        size_bytes = len(name.encode()) + len(value.encode()) + 2
        if size_bytes > MAX_ENV_VAR_BYTES:
            raise ValueError(f"{name[:80]!r} takes {size_bytes} bytes, more than the {MAX_ENV_VAR_BYTES} that a program can be given")
        total_bytes += size_bytes
    if total_bytes > MAX_ENV_VARS_BYTES:
        raise ValueError(f"together they take {total_bytes} bytes, more than {MAX_ENV_VARS_BYTES}")
    return variables


def _check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    total_bytes = sum(len(name.encode()) + len(value.encode()) for name, value in metadata.items())
    if total_bytes > MAX_METADATA_BYTES:
        raise ValueError(f"it takes {total_bytes} bytes, more than {MAX_METADATA_BYTES}")
    return metadata


class AutoResumeBody(Body):
    """`autoResume` of a creation."""

    enabled: bool = False


class IamTokenBody(Body):
    """One of `iam.tokens`."""

    audience: str = Field(min_length=1, max_length=1024)
    token_type: Literal["JWT-SVID"] = Field(alias="tokenType")


class IamBody(Body):
    """`iam` of a creation."""

    tokens: dict[str, IamTokenBody] = Field(default_factory=dict)


class VolumeMountBody(Body):
    """One of `volumeMounts` of a creation: a volume by name, and a path in the guest."""

    name: str
    path: str


class QuotasBody(Body):
    """`limits` of a creation: shares of the node; what is absent is the node's own limit."""

    cpu_percent: int = Field(0, alias="cpuPercent", ge=0, le=3200)
    disk_bytes_per_s: int = Field(0, alias="diskBytesPerSecond", ge=0, le=1 << 40)
    disk_operations_per_s: int = Field(0, alias="diskOperationsPerSecond", ge=0, le=10_000_000)
    network_bytes_per_s: int = Field(0, alias="networkBytesPerSecond", ge=0, le=1 << 37)


class CreateBody(Body, extra="allow"):
    """`POST /v2/sandboxes` (contract section 2.2)."""

    template_id: str = Field(alias="templateID")
    timeout_s: int = Field(300, alias="timeout")
    auto_pause: bool = Field(False, alias="autoPause")
    auto_pause_memory: bool = Field(True, alias="autoPauseMemory")
    auto_resume: AutoResumeBody = Field(AutoResumeBody(), alias="autoResume")
    allow_internet_access: bool | None = None
    network: NetworkBody = NetworkBody()
    metadata: Annotated[dict[str, str], AfterValidator(_check_metadata)] = Field(default_factory=dict)
    env_vars: Annotated[dict[str, str], AfterValidator(_check_env_vars)] = Field(default_factory=dict, alias="envVars")
    mcp: dict[str, Any] | None = None  # the client starts the gateway itself; there is nothing to do here
    iam: IamBody = IamBody()
    volume_mounts: list[VolumeMountBody] = Field(default_factory=list, alias="volumeMounts")
    pause_when_idle: bool | None = Field(None, alias="pauseWhenIdle")  # an extension: when the host is short of memory
    limits: QuotasBody = QuotasBody()  # an extension: what it may use of the node
    disk_mb: int | None = Field(None, alias="diskSizeMB", ge=1)  # an extension: a larger disk than the template's
    count: int | None = Field(None, ge=1, le=100)  # an extension: so many in one call, each with an outcome of its own


class CreateBodyV1(CreateBody):
    """`POST /sandboxes`: the default timeout is shorter, and a sandbox is secured only when `secure` asks for it.

    The oldest clients neither ask nor know the token, so their sandboxes answer whoever knows the sandbox's id.
    """

    timeout_s: int = Field(15, alias="timeout")
    secure: bool = False


class PauseBody(Body):
    """`POST /sandboxes/{id}/pause`; older clients send no body."""

    memory: bool = True
    require_healthy_guest: bool = Field(False, alias="requireHealthyGuest")
    durable: bool = False  # an extension: answer when it would survive a crash of the machine


class ConnectBody(Body):
    """`POST /v2/sandboxes/{id}/connect`. Without a timeout: 300 s, and a paused one at least what it was created with."""

    timeout_s: int | None = Field(None, alias="timeout")
    memory: bool = True


class ConnectBodyV1(Body):
    """`POST /sandboxes/{id}/connect`: the timeout is required."""

    timeout_s: int = Field(alias="timeout")
    memory: bool = True


class ResumeBody(Body):
    """`POST /sandboxes/{id}/resume`."""

    timeout_s: int = Field(15, alias="timeout")
    auto_pause: bool | None = Field(None, alias="autoPause")
    memory: bool = True


class TimeoutBody(Body):
    """`POST /sandboxes/{id}/timeout`; 0 acts now."""

    timeout_s: int = Field(alias="timeout")


class RefreshBody(Body):
    """`POST /sandboxes/{id}/refreshes`."""

    duration_s: int = Field(15, alias="duration", ge=0, le=3600)


class ForkBody(Body):
    """`POST /sandboxes/{id}/fork`."""

    timeout_s: int = Field(15, alias="timeout")
    count: int = Field(1, ge=1, le=100)


class NewVolumeBody(Body):
    """`POST /volumes`."""

    name: str


class VolumeAttributesBody(Body):
    """`PATCH /volumecontent/{id}/path`."""

    uid: int | None = None
    gid: int | None = None
    mode: int | None = None


class NewSecretBody(Body):
    """`POST /secrets`."""

    name: str
    value: str = Field(repr=False)
    metadata: dict[str, str] = Field(default_factory=dict)


class SecretUpdateBody(Body):
    """`POST /secrets/{id}`; metadata that is absent is kept."""

    value: str = Field(repr=False)
    metadata: dict[str, str] | None = None


class SnapshotBody(Body):
    """`POST /sandboxes/{id}/snapshots`."""

    name: str | None = None
    memory: bool = True
    durable: bool = False  # an extension, as with a pause


class CheckpointBody(Body):
    """`POST /sandboxes/{id}/checkpoints`."""

    name: str | None = None
    memory: bool = True
    durable: bool = False


class RollbackBody(Body):
    """`POST /sandboxes/{id}/rollback`: a checkpoint's id or name; none is the one that the sandbox's state descends from."""

    checkpoint_id: str | None = Field(None, alias="checkpointID")


class AssignTagsBody(Body):
    """`POST /templates/tags`: the tags to give to the build that `target` names."""

    target: str
    tags: list[str] = Field(min_length=1, max_length=TAGS_MAX)


class RemoveTagsBody(Body):
    """`DELETE /templates/tags`."""

    name: str
    tags: list[str] = Field(min_length=1, max_length=TAGS_MAX)


class UpdateTemplateBody(Body):
    """`PATCH /templates/{id}`; without `public` nothing changes."""

    public: bool | None = None


def check_timeout(timeout_s: int, max_timeout_hours: int, *, lowest_s: int = 1) -> int:
    """`timeout_s` when it is legal. InvalidInput naming the field and the legal range (contract section 2.2)."""
    if timeout_s < lowest_s:
        raise InvalidInput(f"timeout: must be {lowest_s} to {max_timeout_hours * 3600} seconds, not {timeout_s}")
    if timeout_s > max_timeout_hours * 3600:
        raise InvalidInput(
            f"Timeout cannot be greater than {max_timeout_hours} hours", f"timeout is in seconds; the most is {max_timeout_hours * 3600}"
        )
    return timeout_s


def to_create_request(body: CreateBody, template: str, max_timeout_hours: int) -> CreateRequest:
    """What the orchestrator is asked for. InvalidInput or Unsupported naming the field that stands in the way."""
    timeout_s = check_timeout(body.timeout_s, max_timeout_hours)
    _check_auto_pause_memory(body)
    _refuse_unbuilt(body)
    return CreateRequest(
        template=template,
        timeout_s=timeout_s,
        on_timeout="pause" if body.auto_pause else "kill",
        auto_pause_memory=body.auto_pause_memory,
        auto_resume=body.auto_resume.enabled,
        allow_public_traffic=body.network.allow_public_traffic,
        allow_internet_access=body.allow_internet_access,
        network=to_settings(body.network),
        metadata=body.metadata,
        env_vars=body.env_vars,
        volume_mounts=tuple((mount.name, mount.path) for mount in body.volume_mounts),
        unknown_fields=tuple(name[:80] for name in sorted(body.model_extra or ())[:MAX_UNKNOWN_FIELDS]),
        secure=not isinstance(body, CreateBodyV1) or body.secure,
        pause_when_idle=body.pause_when_idle,
        quotas=Quotas(**body.limits.model_dump()),
        disk_mb=body.disk_mb,
    )


def _check_auto_pause_memory(body: CreateBody) -> None:
    if body.auto_pause_memory:
        return
    if not body.auto_pause:
        raise InvalidInput("autoPauseMemory: false needs autoPause: true")
    if body.auto_resume.enabled:
        raise InvalidInput("autoPauseMemory: false cannot be combined with autoResume")


def _refuse_unbuilt(body: CreateBody) -> None:
    asked = {"iam.tokens": body.iam.tokens}
    for name, value in asked.items():
        if value:
            raise Unsupported(f"{name}: not supported", _NOT_BUILT)
