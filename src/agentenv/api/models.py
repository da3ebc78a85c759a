"""Request bodies, by the exact JSON names of the contract (sections 2.2, 2.4 and 2.6).

Unknown fields are ignored and null means absent. Types are strict: a number in quotes is an error, not a guess. A field the
contract knows and this node cannot honour yet is refused by name when it asks for something, never silently dropped.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from agentenv.core.errors import InvalidInput, Unsupported
from agentenv.core.model import CreateRequest
from agentenv.core.templates import TAGS_MAX

_NOT_BUILT = "leave it out; this node does not have the feature"


def _check_env_vars(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ValueError(f"{name[:80]!r} cannot be an environment variable: no =, no NUL, not empty")
    return variables


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, populate_by_name=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        return {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values


class AutoResumeBody(_Body):
    """`autoResume` of a creation."""

    enabled: bool = False


class NetworkBody(_Body):
    """`network` of a creation (contract section 2.6)."""

    allow_public_traffic: bool = Field(True, alias="allowPublicTraffic")
    allow_out: Any = Field(None, alias="allowOut")
    deny_out: Any = Field(None, alias="denyOut")
    dns_servers: Any = Field(None, alias="dnsServers")
    egress_proxy: Any = Field(None, alias="egressProxy")
    mask_request_host: Any = Field(None, alias="maskRequestHost")
    https_ports: Any = Field(None, alias="httpsPorts")
    rules: Any = Field(None)


class CreateBody(_Body):
    """`POST /v2/sandboxes` (contract section 2.2)."""

    template_id: str = Field(alias="templateID")
    timeout_s: int = Field(300, alias="timeout")
    auto_pause: bool = Field(False, alias="autoPause")
    auto_pause_memory: bool = Field(True, alias="autoPauseMemory")
    auto_resume: AutoResumeBody = Field(AutoResumeBody(), alias="autoResume")
    allow_internet_access: bool = True
    network: NetworkBody = NetworkBody()
    metadata: dict[str, str] = Field(default_factory=dict)
    env_vars: Annotated[dict[str, str], AfterValidator(_check_env_vars)] = Field(default_factory=dict, alias="envVars")
    mcp: Any = None
    iam: Any = None
    volume_mounts: Any = Field(None, alias="volumeMounts")


class CreateBodyV1(CreateBody):
    """`POST /sandboxes`: the default timeout is shorter, and `secure` exists. Every sandbox is secured, so it changes nothing."""

    timeout_s: int = Field(15, alias="timeout")
    secure: bool = True


class PauseBody(_Body):
    """`POST /sandboxes/{id}/pause`; older clients send no body."""

    memory: bool = True
    require_healthy_guest: bool = Field(False, alias="requireHealthyGuest")


class ConnectBody(_Body):
    """`POST /v2/sandboxes/{id}/connect`."""

    timeout_s: int = Field(300, alias="timeout")
    memory: bool = True


class ConnectBodyV1(_Body):
    """`POST /sandboxes/{id}/connect`: the timeout is required."""

    timeout_s: int = Field(alias="timeout")


class ResumeBody(_Body):
    """`POST /sandboxes/{id}/resume`."""

    timeout_s: int = Field(15, alias="timeout")
    auto_pause: bool | None = Field(None, alias="autoPause")
    memory: bool = True


class TimeoutBody(_Body):
    """`POST /sandboxes/{id}/timeout`; 0 acts now."""

    timeout_s: int = Field(alias="timeout")


class RefreshBody(_Body):
    """`POST /sandboxes/{id}/refreshes`."""

    duration_s: int = Field(15, alias="duration", ge=0, le=3600)


class ForkBody(_Body):
    """`POST /sandboxes/{id}/fork`."""

    timeout_s: int = Field(15, alias="timeout")
    count: int = Field(1, ge=1, le=100)


class NewVolumeBody(_Body):
    """`POST /volumes`."""

    name: str


class VolumeAttributesBody(_Body):
    """`PATCH /volumecontent/{id}/path`."""

    uid: int | None = None
    gid: int | None = None
    mode: int | None = None


class NewSecretBody(_Body):
    """`POST /secrets`."""

    name: str
    value: str = Field(repr=False)
    metadata: dict[str, str] = Field(default_factory=dict)


class SecretUpdateBody(_Body):
    """`POST /secrets/{id}`; metadata that is absent is kept."""

    value: str = Field(repr=False)
    metadata: dict[str, str] | None = None


class SnapshotBody(_Body):
    """`POST /sandboxes/{id}/snapshots`."""

    name: str | None = None
    memory: bool = True


class AssignTagsBody(_Body):
    """`POST /templates/tags`: the tags to give to the build that `target` names."""

    target: str
    tags: list[str] = Field(min_length=1, max_length=TAGS_MAX)


class RemoveTagsBody(_Body):
    """`DELETE /templates/tags`."""

    name: str
    tags: list[str] = Field(min_length=1, max_length=TAGS_MAX)


class UpdateTemplateBody(_Body):
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
        auto_resume=body.auto_resume.enabled,
        allow_public_traffic=body.network.allow_public_traffic,
        allow_internet_access=body.allow_internet_access,
        metadata=body.metadata,
        env_vars=body.env_vars,
    )


def require_memory(memory: bool) -> None:
    """Unsupported when a call asks for a pause or resume of the disk alone."""
    if not memory:
        raise Unsupported("memory: filesystem-only pause and resume are not supported", _NOT_BUILT)


def require_memory_of_snapshot(memory: bool) -> None:
    """Unsupported when a snapshot is to hold the disk alone."""
    if not memory:
        raise Unsupported("memory: snapshots of the filesystem alone are not supported", _NOT_BUILT)


def refuse_healthy_guest(require_healthy_guest: bool) -> None:
    """Unsupported when a pause is to depend on the guest's health."""
    if require_healthy_guest:
        raise Unsupported("requireHealthyGuest: checking the guest before a pause is not supported", _NOT_BUILT)


def _check_auto_pause_memory(body: CreateBody) -> None:
    if body.auto_pause_memory:
        return
    if not body.auto_pause:
        raise InvalidInput("autoPauseMemory: false needs autoPause: true")
    if body.auto_resume.enabled:
        raise InvalidInput("autoPauseMemory: false cannot be combined with autoResume")
    raise Unsupported("autoPauseMemory: filesystem-only pause is not supported", _NOT_BUILT)


def _refuse_unbuilt(body: CreateBody) -> None:
    network = {NetworkBody.model_fields[name].alias or name: getattr(body.network, name) for name in NetworkBody.model_fields}
    network.pop("allowPublicTraffic")
    asked = {f"network.{name}": value for name, value in network.items()}
    asked |= {"mcp": body.mcp, "volumeMounts": body.volume_mounts}
    asked["iam"] = body.iam.get("tokens") if isinstance(body.iam, dict) else body.iam
    for name, value in asked.items():
        if value:
            raise Unsupported(f"{name}: not supported", _NOT_BUILT)
