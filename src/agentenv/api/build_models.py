"""Request bodies of template builds, by the exact JSON names of the contract (section 2.7)."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import Field

from agentenv.api.bodies import Body
from agentenv.core.builds import BuildPlan, DockerfileSource, MachineSize, Registry, Step
from agentenv.core.errors import InvalidInput
from agentenv.core.templates import TAGS_MAX
from agentenv.template.dockerfile.document import TEXT_MAX_CHARS
from agentenv.template.dockerfile.mounting import SECRET_MAX_BYTES

SECRET_ID = r"^[A-Za-z0-9._-]{1,200}$"
_SECRET_CHARS = 4 * SECRET_MAX_BYTES // 3 + 4  # in base64
_COMMAND_CHARS = 100_000  # a program cannot be given more than 128 KiB in one argument


class NewBuildBody(Body):
    """`POST /v3/templates`. `alias` is the older word for `name`; `teamID` is ignored: a node is one team."""

    name: str | None = None
    alias: str | None = None
    tags: list[str] = Field(default_factory=list, max_length=TAGS_MAX)
    cpu_count: int | None = Field(None, alias="cpuCount")
    memory_mb: int | None = Field(None, alias="memoryMB")
    disk_mb: int | None = Field(None, alias="diskSizeMB", ge=1)  # an extension
    min_free_disk_mb: int | None = Field(None, alias="minFreeDiskMb", ge=0)  # best effort: disks of this node grow as they are written

    def size(self) -> MachineSize:
        """How large a machine it asks for."""
        return MachineSize(self.cpu_count, self.memory_mb, self.disk_mb)

    def wanted_name(self) -> str:
        """InvalidInput when there is none."""
        name = self.name or self.alias
        if not name:
            raise InvalidInput("name: Field required")
        return name


class NewBuildBodyV2(Body):
    """`POST /v2/templates`."""

    alias: str
    cpu_count: int | None = Field(None, alias="cpuCount")
    memory_mb: int | None = Field(None, alias="memoryMB")


class StepBody(Body):
    """One of `steps`."""

    type: Literal["RUN", "COPY", "ENV", "WORKDIR", "USER"]
    args: list[Annotated[str, Field(max_length=_COMMAND_CHARS)]] = Field(default_factory=list)
    files_hash: str = Field("", alias="filesHash")
    force: bool = False


class RegistryBody(Body, extra="allow"):
    """`fromImageRegistry`: `registry{username,password}`, `aws{...}` or `gcp{...}`."""

    type: Literal["registry", "aws", "gcp"]


class DockerfileBody(Body):
    """`dockerfile`, an extension: what is built in place of `fromImage`, `fromTemplate` and `steps`.

    `files` has the hash of an uploaded archive for every line that copies from the context. `start` false: ENTRYPOINT and CMD are not run.
    `secrets` by id are in base64, `registries` are accounts by registry; neither is kept.
    """

    text: str = Field(max_length=TEXT_MAX_CHARS)
    name: str = Field("Dockerfile", max_length=200)
    build_args: dict[str, Annotated[str, Field(max_length=_COMMAND_CHARS)]] = Field(
        default_factory=dict, alias="buildArgs", max_length=1000
    )
    target: str = Field("", max_length=200)
    files: dict[Annotated[str, Field(pattern="^[1-9][0-9]{0,6}$")], str] = Field(default_factory=dict, max_length=1000)
    start: bool = True
    secrets: dict[Annotated[str, Field(pattern=SECRET_ID)], Annotated[str, Field(max_length=_SECRET_CHARS)]] = Field(
        default_factory=dict, max_length=100
    )
    registries: dict[Annotated[str, Field(max_length=300)], RegistryBody] = Field(default_factory=dict, max_length=100)


class StartBuildBody(Body):
    """`POST /v2/templates/{id}/builds/{buildID}`."""

    from_image: str = Field("", alias="fromImage", max_length=1024)
    from_template: str = Field("", alias="fromTemplate", max_length=512)
    from_image_registry: RegistryBody | None = Field(None, alias="fromImageRegistry")
    force: bool = False
    steps: list[StepBody] = Field(default_factory=list, max_length=1000)
    start_cmd: str = Field("", alias="startCmd", max_length=_COMMAND_CHARS)
    ready_cmd: str = Field("", alias="readyCmd", max_length=_COMMAND_CHARS)
    dockerfile: DockerfileBody | None = None


class PullImageBody(Body):
    """`POST /images/pull`."""

    name: str = Field(min_length=1, max_length=1024)
    registry: RegistryBody | None = None


class PushImageBody(Body):
    """`POST /templates/{template}/push`."""

    name: str = Field(min_length=1, max_length=1024)
    registry: RegistryBody | None = None


_REGISTRY_FIELDS = {
    "registry": ("username", "password"),
    "aws": ("awsAccessKeyId", "awsSecretAccessKey", "awsRegion"),
    "gcp": ("serviceAccountJson",),
}


def to_plan(body: StartBuildBody) -> BuildPlan:
    """What the build does. InvalidInput when the credentials are not what their type needs."""
    return BuildPlan(
        from_image=body.from_image.strip(),
        from_template=body.from_template.strip(),
        registry=to_account(body.from_image_registry, "fromImageRegistry"),
        steps=tuple(Step(step.type, tuple(step.args), step.files_hash, step.force) for step in body.steps),
        start_command=body.start_cmd.strip(),
        ready_command=body.ready_cmd.strip(),
        force=body.force,
        dockerfile=None if body.dockerfile is None else _source(body.dockerfile),
    )


def _source(body: DockerfileBody) -> DockerfileSource:
    files = {int(line): files_hash for line, files_hash in body.files.items()}
    secrets = {name: _decoded(name, text) for name, text in body.secrets.items()}
    accounts = {name: account for name, one in body.registries.items() if (account := to_account(one, f"registries.{name}"))}
    return DockerfileSource(body.text, body.name, body.build_args, body.target, files, body.start, secrets, accounts)


def _decoded(name: str, text: str) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidInput(f"secrets.{name}: it is not base64") from error
    if len(content) > SECRET_MAX_BYTES:
        raise InvalidInput(f"secrets.{name}: a secret may have {SECRET_MAX_BYTES >> 10} KiB at most")
    return content


def to_account(body: RegistryBody | None, field: str = "registry") -> Registry | None:
    """Credentials for one registry. InvalidInput when they are not what their type needs."""
    if body is None:
        return None
    given: dict[str, Any] = body.model_extra or {}
    settings = {}
    for name in _REGISTRY_FIELDS[body.type]:
        if not isinstance(given.get(name), str):
            raise InvalidInput(f"{field}.{name}: a text is required for type {body.type}")
        settings[name] = given[name]
    return Registry(body.type, settings)
