"""The official Python SDK against the API: what only needs the control plane."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from e2b import AsyncSandbox, Sandbox, SandboxQuery, SandboxState, Template
from e2b.exceptions import (
    AuthenticationException,
    GuestUnresponsiveException,
    RateLimitException,
    SandboxException,
    SandboxNotFoundException,
    ServiceBusyException,
    TemplateException,
)

from agentenv.core.errors import LimitReached, Unavailable
from agentenv.testing.fake_orchestrator import FakeOrchestrator

Options = dict[str, Any]


@pytest.fixture
def options(live_port: int, key: str) -> Options:
    url = f"http://127.0.0.1:{live_port}"
    return {"api_key": key, "api_url": url, "sandbox_url": url}


def test_create_and_info(options: Options, live_orchestrator: FakeOrchestrator, live_port: int):
    sandbox = Sandbox.create("base", timeout=60, metadata={"a b": "c&d"}, envs={"A": "1"}, lifecycle={"on_timeout": "pause"}, **options)
    stored = live_orchestrator.peek(sandbox.sandbox_id)
    assert (stored.timeout_s, stored.on_timeout, stored.metadata, stored.env_vars) == (60, "pause", {"a b": "c&d"}, {"A": "1"})
    assert sandbox.get_host(8000) == f"8000-{sandbox.sandbox_id}.localhost:{live_port}"
    assert sandbox.traffic_access_token is None
    info = sandbox.get_info()
    assert (info.sandbox_id, info.name, info.state, info.metadata) == (sandbox.sandbox_id, "base", SandboxState.RUNNING, {"a b": "c&d"})
    assert (info.cpu_count, info.memory_mb, info.envd_version) == (1, 512, stored.envd_version)
    assert info.end_at - info.started_at == timedelta(seconds=60)


def test_default_timeout(options: Options, live_orchestrator: FakeOrchestrator):
    assert live_orchestrator.peek(Sandbox.create("base", **options).sandbox_id).timeout_s == 300


def test_private_traffic_gives_a_token(options: Options):
    sandbox = Sandbox.create("base", network={"allow_public_traffic": False}, **options)
    assert sandbox.traffic_access_token


def test_list_pages_and_filters(options: Options):
    mark = str(uuid4())
    created = [Sandbox.create("base", metadata={"mark": mark, "odd key": f"{n}&="}, **options).sandbox_id for n in range(5)]
    paginator = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}), limit=2, order="asc", **options)
    seen: list[str] = []
    while paginator.has_next:
        items = paginator.next_items()
        assert len(items) <= 2
        seen += [item.sandbox_id for item in items]
    assert sorted(seen) == sorted(created)
    assert len(seen) == 5
    (one,) = Sandbox.list(query=SandboxQuery(metadata={"odd key": "3&="}), **options).next_items()
    assert one.sandbox_id == created[3]
    both = SandboxQuery(state=[SandboxState.RUNNING, SandboxState.PAUSED], template="base", started_after=one.started_at)
    assert one.sandbox_id in {item.sandbox_id for item in Sandbox.list(query=both, **options).next_items()}
    assert Sandbox.list(query=SandboxQuery(template="unknown"), **options).next_items() == []


def test_kill(options: Options):
    sandbox = Sandbox.create("base", **options)
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert Sandbox.kill("nonexistingsandbox", **options) is False
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()


def test_pause_and_connect(options: Options, live_orchestrator: FakeOrchestrator):
    sandbox = Sandbox.create("base", timeout=600, **options)
    token = live_orchestrator.peek(sandbox.sandbox_id).access_token
    sandbox.pause()
    assert sandbox.get_info().state == SandboxState.PAUSED
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect("nonexistingsandbox", **options)
    again = Sandbox.connect(sandbox.sandbox_id, timeout=700, **options)
    assert again.get_info().state == SandboxState.RUNNING
    assert live_orchestrator.peek(sandbox.sandbox_id).access_token == token
    end_at = again.get_info().end_at
    sandbox.connect(timeout=5)
    assert again.get_info().end_at == end_at


def test_pause_twice_is_false(options: Options):
    sandbox = Sandbox.create("base", **options)
    assert Sandbox.pause(sandbox.sandbox_id, **options) is not False
    assert Sandbox.pause(sandbox.sandbox_id, **options) is False


def test_set_timeout(options: Options):
    sandbox = Sandbox.create("base", timeout=600, **options)
    sandbox.set_timeout(5)
    info = sandbox.get_info()
    assert timedelta(0) < info.end_at - info.started_at < timedelta(seconds=30)
    sandbox.set_timeout(0)
    with pytest.raises(SandboxNotFoundException):
        sandbox.set_timeout(10)


def test_fork(options: Options, live_orchestrator: FakeOrchestrator):
    sandbox = Sandbox.create("base", **options)
    live_orchestrator.fail_next("fork_child", LimitReached("no room"))
    results = sandbox.fork(count=3, timeout=30)
    failed = [result for result in results if isinstance(result, Exception)]
    children = [result for result in results if not isinstance(result, Exception)]
    assert [type(error) for error in failed] == [RateLimitException]
    assert len({child.sandbox_id for child in children} | {sandbox.sandbox_id}) == 3


def test_fork_of_nothing(options: Options):
    sandbox = Sandbox.create("base", **options)
    sandbox.kill()
    with pytest.raises(SandboxNotFoundException, match="doesn't exist"):
        sandbox.fork()


def test_errors_have_the_sdks_classes(options: Options, live_orchestrator: FakeOrchestrator):
    with pytest.raises(AuthenticationException, match="not valid on this node"):
        Sandbox.create("base", **{**options, "api_key": "e2b_" + "f" * 40})
    with pytest.raises(SandboxException, match="404: template 'nothing' not found"):
        Sandbox.create("nothing", **options)
    with pytest.raises(SandboxException, match="400: Timeout cannot be greater than 24 hours"):
        Sandbox.create("base", timeout=10**6, **options)
    with pytest.raises(SandboxException, match="400: When specifying allowed domains"):
        Sandbox.create("base", network={"allow_out": ["example.com"]}, **options)
    with pytest.raises(SandboxException, match="501: iam"):
        Sandbox.create("base", iam={"tokens": {"a": {"audience": "x", "token_type": "JWT-SVID"}}}, **options)
    live_orchestrator.sandboxes_running = 0
    with pytest.raises(RateLimitException, match="limit of this node"):
        Sandbox.create("base", retries=0, **options)


def test_the_sdk_repeats_what_may_work_later(options: Options, live_orchestrator: FakeOrchestrator):
    live_orchestrator.fail_next("create", Unavailable("starting"))
    assert Sandbox.create("base", **options).sandbox_id


def test_idempotency_key(options: Options):
    key = str(uuid4())
    first = Sandbox.create("base", idempotency_key=key, **options)
    assert Sandbox.create("base", idempotency_key=key, **options).sandbox_id == first.sandbox_id
    with pytest.raises(SandboxException, match="422"):
        Sandbox.create("python", idempotency_key=key, **options)


def test_network_settings(options: Options):
    network = {"allow_out": lambda ctx: ["1.1.1.1", *ctx.rules], "deny_out": lambda ctx: [ctx.all_traffic], "rules": {"a.test": []}}
    sandbox = Sandbox.create("base", network=network, **options)
    shown = sandbox.get_info().network
    assert (shown["allow_out"], shown["deny_out"], shown["rules"]) == (["1.1.1.1", "a.test"], ["0.0.0.0/0"], {"a.test": []})
    sandbox.update_network({"deny_out": ["9.9.9.9"]})
    shown = sandbox.get_info().network
    assert ("allow_out" in shown, shown["deny_out"]) == (False, ["9.9.9.9"])
    sandbox.pause()
    with pytest.raises(SandboxException):
        sandbox.update_network({})


def test_modes_of_pause_and_resume(options: Options, live_orchestrator: FakeOrchestrator):
    sandbox = Sandbox.create("base", lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}}, **options)
    assert live_orchestrator.peek(sandbox.sandbox_id).auto_pause_memory is False
    assert sandbox.pause(mode="filesystem") is True
    assert sandbox.pause(mode="filesystem") is False
    assert live_orchestrator.peek(sandbox.sandbox_id).pause_mode == "filesystem"
    sandbox.connect(on_resume="reboot")
    live_orchestrator.hung.add(sandbox.sandbox_id)
    with pytest.raises(ServiceBusyException):
        sandbox.pause(strict=True, retries=0)
    sandbox.pause()
    assert sandbox.get_info().envd_unresponsive_at_pause is True
    with pytest.raises(GuestUnresponsiveException):
        sandbox.connect()
    sandbox.connect(on_resume="reboot")
    assert sandbox.get_info().envd_unresponsive_at_pause is None


def test_snapshots(options: Options):
    sandbox = Sandbox.create("base", envs={"A": "1"}, **options)
    plain, named = sandbox.create_snapshot(), Sandbox.create_snapshot(sandbox.sandbox_id, name="mine:v1", **options)
    assert (plain.names, named.snapshot_id, named.names) == ([], "local/mine:v1", ["local/mine:v1"])
    made = [Sandbox.create(snapshot.snapshot_id, **options) for snapshot in (plain, named)]
    assert len({one.sandbox_id for one in made} | {sandbox.sandbox_id}) == 3
    paginator = Sandbox.list_snapshots(limit=1, **options)
    seen = []
    while paginator.has_next:
        seen += [item.snapshot_id for item in paginator.next_items()]
    assert sorted(seen) == sorted([plain.snapshot_id, named.snapshot_id])
    assert [item.snapshot_id for item in sandbox.list_snapshots(name="mine").next_items()] == [named.snapshot_id]
    assert Sandbox.list_snapshots(sandbox_id="inothere", **options).next_items() == []
    with pytest.raises(SandboxException, match="400: cannot delete"):
        Sandbox.delete_snapshot(named.snapshot_id, **options)
    for one in made:
        one.kill()
    for snapshot in (plain, named):
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **options) is True
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **options) is False
    sandbox.kill()
    with pytest.raises(SandboxNotFoundException):
        sandbox.create_snapshot()


def test_tags(options: Options):
    api = {name: options[name] for name in ("api_key", "api_url")}
    sandbox = Sandbox.create("base", **options)
    sandbox.create_snapshot(name="mine:v1")
    assert Template.exists("mine", **api)
    assert Template.exists("local/mine", **api)
    assert not Template.exists("other", **api)
    assigned = Template.assign_tags("mine:v1", ["production", "latest"], **api)
    assert assigned.tags == ["production", "latest"]
    found = Template.get_tags("mine", **api)
    assert {tag.tag: tag.build_id for tag in found} == dict.fromkeys(("v1", "production", "latest"), assigned.build_id)
    Template.remove_tags("mine", "production", **api)
    with pytest.raises(TemplateException):
        Template.remove_tags("mine", "production", **api)
    with pytest.raises(TemplateException):
        Template.assign_tags("mine:nothing", "x", **api)
    Template.remove_tags("mine", ["v1", "latest"], **api)
    assert not Template.exists("mine", **api)


async def test_async_client(options: Options):
    sandbox = await AsyncSandbox.create("base", **options)
    assert (await sandbox.get_info()).state == SandboxState.RUNNING
    await sandbox.pause()
    assert (await (await AsyncSandbox.connect(sandbox.sandbox_id, **options)).get_info()).state == SandboxState.RUNNING
    assert await sandbox.kill() is True
    assert await sandbox.kill() is False
