"""Reply bodies, by the exact JSON names of the contract (sections 2.2, 2.3 and 2.7). Pure functions of the model."""

from __future__ import annotations

import json
from typing import NotRequired, cast

from typing_extensions import TypedDict  # the document's models are made from these, which `typing`'s own allows from 3.12 on

from agentenv.api.errors import error_body
from agentenv.core.builds import BuildJob
from agentenv.core.clock import rfc3339
from agentenv.core.lifecycle import VISIBLE, State
from agentenv.core.model import Build, Checkpoint, LogEntry, Machine, MetricSample, Sandbox, Secret, StartOutcome, Tag, Template, Volume
from agentenv.core.network import EgressProxy, HeaderRule
from agentenv.core.references import NAMESPACE
from agentenv.core.templates import snapshot_name
from agentenv.template.build_log import BuildEntry
from agentenv.template.builds import BuildReport
from agentenv.volume.tree import Entry

CLIENT_ID = "local"  # the contract demands the field; it named a host once and means nothing to the SDKs


class MachineView(TypedDict):
    """The size of a guest."""

    cpuCount: int
    memoryMB: int
    diskSizeMB: int


class SandboxView(TypedDict):
    """`Sandbox`: the reply of create, connect, resume and fork. Holds secrets."""

    templateID: str
    sandboxID: str
    clientID: str
    envdVersion: str
    alias: str
    envdAccessToken: NotRequired[str]
    trafficAccessToken: str | None
    domain: str


class ListedSandboxView(MachineView):
    """`ListedSandbox`: one sandbox of a list, without secrets."""

    templateID: str
    alias: str
    sandboxID: str
    clientID: str
    startedAt: str
    endAt: str
    state: str
    envdVersion: str
    metadata: dict[str, str]
    volumeMounts: list[dict[str, str]]


class LifecycleView(TypedDict):
    """What happens at the timeout and on traffic afterwards."""

    autoResume: bool
    onTimeout: str


class NetworkView(TypedDict):
    """Network settings in the shape of the creation; what was never said is left out."""

    allowPublicTraffic: bool
    allowOut: NotRequired[list[str]]
    denyOut: NotRequired[list[str]]
    dnsServers: NotRequired[list[str]]
    egressProxy: NotRequired[dict[str, object]]
    maskRequestHost: NotRequired[str]
    httpsPorts: NotRequired[list[int]]
    rules: NotRequired[dict[str, list[dict[str, object]]]]


class SandboxDetailView(ListedSandboxView):
    """`SandboxDetail`: one sandbox asked for by id. Holds its access token."""

    envdAccessToken: NotRequired[str]
    allowInternetAccess: bool | None
    domain: str
    network: NetworkView
    lifecycle: LifecycleView


class PausedSandboxDetailView(SandboxDetailView):
    """`SandboxDetail` of a sandbox whose pause has finished."""

    pauseMode: str
    envdUnresponsiveAtPause: NotRequired[bool]


class TemplateView(MachineView):
    """`Template`: every field is required by the command line client."""

    templateID: str
    buildID: str
    public: bool
    aliases: list[str]
    names: list[str]
    createdAt: str
    updatedAt: str
    createdBy: None
    lastSpawnedAt: str | None
    spawnCount: int
    buildCount: int
    envdVersion: str
    buildStatus: str


class CheckpointView(TypedDict):
    """A checkpoint of a sandbox (an extension)."""

    checkpointID: str
    sandboxID: str
    name: str | None
    parentID: str | None
    memory: bool
    current: bool
    createdAt: str


class SnapshotView(TypedDict):
    """`SnapshotInfo`: what a snapshot is called."""

    snapshotID: str
    names: list[str]


class TagView(TypedDict):
    """`TemplateTag`: a tag and the build it names."""

    tag: str
    buildID: str
    createdAt: str


class AssignmentView(TypedDict):
    """`TemplateTagAssignment`: the event of giving a tag to a build. Its `Id` differs from the `ID` of all other bodies."""

    assignmentId: str
    buildId: str
    assignedAt: str
    buildCreatedAt: str
    buildFinishedAt: str


class RequestedBuildView(TypedDict):
    """`TemplateRequestResponseV3`: a build that was requested."""

    templateID: str
    buildID: str
    public: bool
    names: list[str]
    tags: list[str]
    aliases: list[str]


class UploadView(TypedDict):
    """`TemplateBuildFileUpload`: whether files are here, and where to put them."""

    present: bool
    url: str


class BuildLogView(TypedDict):
    """`BuildLogEntry`: one line of a build."""

    timestamp: str
    message: str
    level: str
    step: NotRequired[str]


class BuildReasonView(TypedDict):
    """`BuildStatusReason`: why a build has failed. `step` is `base`, `finalize` or a number from 1 on.

    `onBuild`, an extension: instructions of base images that need files of the context, by the line of their FROM.
    """

    message: str
    step: NotRequired[str]
    onBuild: NotRequired[dict[str, list[str]]]
    logEntries: list[BuildLogView]


class BuildStatusView(TypedDict):
    """`TemplateBuildInfo`: how far a build is. `logs` is empty as the contract has it since the first builder went."""

    templateID: str
    buildID: str
    status: str
    logs: list[str]
    logEntries: list[BuildLogView]
    reason: NotRequired[BuildReasonView]


class BuildLogsView(TypedDict):
    """`TemplateBuildLogsResponse`: a part of a build's log."""

    logs: list[BuildLogView]


class MetricView(TypedDict):
    """`SandboxMetric`: one sample; sizes in bytes."""

    timestamp: str
    timestampUnix: int
    cpuCount: int
    cpuUsedPct: float
    memUsed: int
    memTotal: int
    memCache: int
    diskUsed: int
    diskTotal: int


class LogEntryView(TypedDict):
    """One structured log entry."""

    timestamp: str
    message: str
    level: str
    fields: dict[str, str]


class VolumeView(TypedDict):
    """`Volume`: one of a list."""

    volumeID: str
    name: str


class VolumeWithTokenView(VolumeView):
    """`VolumeAndToken`: one volume made or asked for. `domain` is left out: content is reached where the API is."""

    token: str


class SecretView(TypedDict):
    """`Secret`: everything but the value."""

    secretID: str
    name: str
    currentVersion: int
    metadata: dict[str, str]
    createdAt: str
    updatedAt: str


def sandbox_view(sandbox: Sandbox, domain: str) -> SandboxView:
    """The reply that gives a client what it needs to reach `sandbox`."""
    view: SandboxView = {
        "templateID": sandbox.template_id,
        "sandboxID": sandbox.sandbox_id,
        "clientID": CLIENT_ID,
        "envdVersion": sandbox.envd_version,
        "alias": sandbox.template_name,
        "trafficAccessToken": sandbox.traffic_token,
        "domain": domain,
    }
    if sandbox.access_token:
        view["envdAccessToken"] = sandbox.access_token
    return view


def listed_sandbox_view(sandbox: Sandbox) -> ListedSandboxView:
    """`sandbox` as a list shows it. Its state must be a visible one."""
    return {
        "templateID": sandbox.template_id,
        "alias": sandbox.template_name,
        "sandboxID": sandbox.sandbox_id,
        "clientID": CLIENT_ID,
        "startedAt": rfc3339(sandbox.started_at_ms),
        "endAt": rfc3339(sandbox.end_at_ms),
        **_machine(sandbox.machine),
        "state": VISIBLE[sandbox.state],
        "envdVersion": sandbox.envd_version,
        "metadata": sandbox.metadata,
        "volumeMounts": [{"name": mount.name, "path": mount.path} for mount in sandbox.volume_mounts],
    }


def sandbox_detail_view(sandbox: Sandbox, domain: str) -> SandboxDetailView | PausedSandboxDetailView:
    """`sandbox` as `GET /sandboxes/{id}` shows it; `pauseMode` appears once the pause has finished."""
    view: SandboxDetailView = {
        **listed_sandbox_view(sandbox),  # type: ignore[typeddict-item]  # mypy wants the key that need not be there
        "allowInternetAccess": sandbox.allow_internet_access,
        "domain": domain,
        "network": network_view(sandbox),
        "lifecycle": {"autoResume": sandbox.auto_resume, "onTimeout": sandbox.on_timeout},
    }
    if sandbox.access_token:
        view["envdAccessToken"] = sandbox.access_token
    if sandbox.state is not State.PAUSED:
        return view
    paused: dict[str, object] = {**view, "pauseMode": sandbox.pause_mode}
    if sandbox.guest_unresponsive:
        paused["envdUnresponsiveAtPause"] = True
    return cast(PausedSandboxDetailView, paused)


def network_view(sandbox: Sandbox) -> NetworkView:
    """The network settings of `sandbox`. Holds the credentials they were given with."""
    network = sandbox.network
    view: NetworkView = {"allowPublicTraffic": sandbox.allow_public_traffic}
    if network.allow_out is not None:
        view["allowOut"] = list(network.allow_out)
    if network.deny_out is not None:
        view["denyOut"] = list(network.deny_out)
    if network.dns_servers is not None:
        view["dnsServers"] = list(network.dns_servers)
    if network.egress_proxy is not None:
        view["egressProxy"] = _egress_proxy(network.egress_proxy)
    if network.mask_request_host is not None:
        view["maskRequestHost"] = network.mask_request_host
    if network.https_ports is not None:
        view["httpsPorts"] = list(network.https_ports)
    if network.rules is not None:
        view["rules"] = {domain: [_rule(rule) for rule in rules] for domain, rules in network.rules.items()}
    return view


def _egress_proxy(proxy: EgressProxy) -> dict[str, object]:
    tls = proxy.tls and _said(enabled=proxy.tls.enabled, serverName=proxy.tls.server_name, caCert=proxy.tls.ca_cert)
    return _said(address=proxy.address, username=proxy.username, password=proxy.password, tls=tls)


def _rule(rule: HeaderRule) -> dict[str, object]:
    return {} if rule.headers is None else {"transform": {"headers": rule.headers}}


def _said(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def outcome_view(outcome: StartOutcome, domain: str) -> dict[str, object]:
    """One child of a fork, or one of many created at once: `{"sandbox": ...}` or `{"error": {"code", "message"}}`."""
    if outcome.sandbox is not None:
        return {"sandbox": sandbox_view(outcome.sandbox, domain)}
    body = error_body(outcome.error_status, outcome.error_message, "")
    return {"error": {"code": body["code"], "message": body["message"]}}


def checkpoint_view(checkpoint: Checkpoint, is_current: bool) -> CheckpointView:
    """A checkpoint. The current one is the newest that the sandbox's present state descends from."""
    return {
        "checkpointID": checkpoint.checkpoint_id,
        "sandboxID": checkpoint.sandbox_id,
        "name": checkpoint.name or None,
        "parentID": checkpoint.parent_id or None,
        "memory": checkpoint.has_memory,
        "current": is_current,
        "createdAt": rfc3339(checkpoint.created_at_ms),
    }


def template_view(template: Template) -> TemplateView:
    """`template` as lists show it, by its newest build."""
    newest = template.builds[0]
    return {
        "templateID": template.template_id,
        "buildID": newest.build_id,
        **_machine(newest.machine),
        "public": template.public,
        "aliases": list(template.aliases),
        "names": template_names(template),
        "createdAt": rfc3339(template.created_at_ms),
        "updatedAt": rfc3339(template.updated_at_ms),
        "createdBy": None,
        "lastSpawnedAt": None if template.last_spawned_at_ms is None else rfc3339(template.last_spawned_at_ms),
        "spawnCount": template.spawn_count,
        "buildCount": template.build_count,
        "envdVersion": newest.envd_version,
        "buildStatus": "ready",
    }


def template_names(template: Template) -> list[str]:
    """What it may be called in full. The node's own templates stand outside the team's namespace."""
    return [alias if template.kind == "builtin" else f"{NAMESPACE}/{alias}" for alias in template.aliases]


def snapshot_view(template: Template, tag: str) -> SnapshotView:
    """A snapshot: one tag of a template. It has names only when it was given one."""
    name = snapshot_name(template, tag)
    return {"snapshotID": name, "names": [name] if template.aliases else []}


def tag_view(tag: Tag) -> TagView:
    """A tag as the list of a template's tags shows it."""
    return {"tag": tag.tag, "buildID": tag.build_id, "createdAt": rfc3339(tag.assigned_at_ms)}


def assignment_view(tag: Tag) -> AssignmentView:
    """An assignment, present or former; builds are finished when they are made."""
    built_at = rfc3339(tag.build_created_at_ms)
    return {
        "assignmentId": tag.assignment_id,
        "buildId": tag.build_id,
        "assignedAt": rfc3339(tag.assigned_at_ms),
        "buildCreatedAt": built_at,
        "buildFinishedAt": built_at,
    }


def build_view(build: Build) -> dict[str, object]:
    """One build of a template; a build that is kept is always a finished one."""
    return {
        "buildID": build.build_id,
        "status": "ready",
        "createdAt": rfc3339(build.created_at_ms),
        "updatedAt": rfc3339(build.created_at_ms),
        "finishedAt": rfc3339(build.created_at_ms),
        **_machine(build.machine),
        "envdVersion": build.envd_version,
        "labels": build.labels,
    }


def requested_build_view(job: BuildJob, template: Template | None) -> RequestedBuildView:
    """A build that was requested, of a template that exists already or not."""
    aliases = [job.name] if template is None else list(template.aliases)
    return {
        "templateID": job.template_id,
        "buildID": job.build_id,
        "public": template is not None and template.public,
        "names": [f"{NAMESPACE}/{alias}" for alias in aliases],
        "tags": list(job.tags),
        "aliases": aliases,
    }


def requested_template_view(job: BuildJob, machine: Machine, template: Template | None) -> TemplateView:
    """The same as the older answer has it: the template with the new build in the place of its newest."""
    requested = requested_build_view(job, template)
    at = rfc3339(job.created_at_ms)
    return {
        "templateID": job.template_id,
        "buildID": job.build_id,
        **_machine(machine),
        "public": requested["public"],
        "aliases": requested["aliases"],
        "names": requested["names"],
        "createdAt": at if template is None else rfc3339(template.created_at_ms),
        "updatedAt": at,
        "createdBy": None,
        "lastSpawnedAt": None if template is None or template.last_spawned_at_ms is None else rfc3339(template.last_spawned_at_ms),
        "spawnCount": 0 if template is None else template.spawn_count,
        "buildCount": 1 if template is None else template.build_count + 1,
        "envdVersion": "" if template is None else template.builds[0].envd_version,
        "buildStatus": job.status,
    }


class BuildView(TypedDict):
    """A build, as `GET /builds` lists them; an extension."""

    buildID: str
    templateID: str
    name: str
    tags: list[str]
    status: str
    createdAt: str
    updatedAt: str


def build_job_view(job: BuildJob) -> BuildView:
    """A build in that list."""
    return {
        "buildID": job.build_id,
        "templateID": job.template_id,
        "name": job.name,
        "tags": list(job.tags),
        "status": job.status,
        "createdAt": rfc3339(job.created_at_ms),
        "updatedAt": rfc3339(job.updated_at_ms),
    }


def build_status_view(report: BuildReport) -> BuildStatusView:
    """How far a build is, with a part of its log."""
    job = report.job
    view: BuildStatusView = {
        "templateID": job.template_id,
        "buildID": job.build_id,
        "status": job.status,
        "logs": [],
        "logEntries": [build_log_view(entry) for entry in report.entries],
    }
    if job.failure is not None:
        view["reason"] = {"message": job.failure.message, "logEntries": []}
        if job.failure.step:
            view["reason"]["step"] = job.failure.step
        if job.failure.on_build:
            view["reason"]["onBuild"] = job.failure.on_build
    return view


def build_log_view(entry: BuildEntry) -> BuildLogView:
    """One line of a build."""
    view: BuildLogView = {"timestamp": rfc3339(entry.timestamp_ms), "message": entry.message, "level": entry.level}
    if entry.step:
        view["step"] = entry.step
    return view


def volume_view(volume: Volume) -> VolumeView:
    """`volume` as lists show it."""
    return {"volumeID": volume.volume_id, "name": volume.name}


def volume_with_token_view(volume: Volume) -> VolumeWithTokenView:
    """`volume` with the token for its content."""
    return {**volume_view(volume), "token": volume.token}


def entry_view(entry: Entry) -> dict[str, object]:
    """`VolumeEntryStat`: what a volume has at one path."""
    view: dict[str, object] = {
        "name": entry.path.rpartition("/")[2],
        "type": entry.kind,
        "path": entry.path,
        "size": entry.size_bytes,
        "mode": entry.mode,
        "uid": entry.uid,
        "gid": entry.gid,
        "atime": rfc3339(entry.accessed_ms),
        "mtime": rfc3339(entry.modified_ms),
        "ctime": rfc3339(entry.changed_ms),
    }
    return view if entry.target is None else {**view, "target": entry.target}


def secret_view(secret: Secret) -> SecretView:
    """`secret` without its value."""
    return {
        "secretID": secret.secret_id,
        "name": secret.name,
        "currentVersion": secret.version,
        "metadata": secret.metadata,
        "createdAt": rfc3339(secret.created_at_ms),
        "updatedAt": rfc3339(secret.updated_at_ms),
    }


def metric_view(sample: MetricSample) -> MetricView:
    """One sample of what a sandbox used."""
    return {
        "timestamp": rfc3339(sample.timestamp_ms),
        "timestampUnix": sample.timestamp_ms // 1000,
        "cpuCount": sample.cpu_count,
        "cpuUsedPct": sample.cpu_used_percent,
        "memUsed": sample.memory_used_bytes,
        "memTotal": sample.memory_total_bytes,
        "memCache": sample.memory_cache_bytes,
        "diskUsed": sample.disk_used_bytes,
        "diskTotal": sample.disk_total_bytes,
    }


def log_entry_view(entry: LogEntry) -> LogEntryView:
    """One entry of a sandbox's log."""
    return {
        "timestamp": rfc3339(entry.timestamp_ms),
        "message": entry.message,
        "level": entry.level,
        "fields": {"logger": entry.logger, **entry.fields},
    }


def log_line_view(entry: LogEntry) -> dict[str, str]:
    """The older form: `line` is JSON text and must hold `level` and `logger`, or the command line client fails."""
    line = {
        **entry.fields,
        "timestamp": rfc3339(entry.timestamp_ms),
        "level": entry.level,
        "logger": entry.logger,
        "message": entry.message,
    }
    return {"timestamp": rfc3339(entry.timestamp_ms), "line": json.dumps(line)}


def _machine(machine: Machine) -> MachineView:
    return {"cpuCount": machine.vcpu_count, "memoryMB": machine.memory_mb, "diskSizeMB": machine.disk_mb}
