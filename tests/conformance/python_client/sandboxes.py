"""Scenarios about the life of sandboxes."""

from __future__ import annotations

import datetime
import inspect
import urllib.error
import urllib.request
import uuid

import e2b
from sdk import VERSION, Absent, api_url, eventually, need, need_option, raises, takes, value

# Older releases tell missing sandboxes apart by the message only; the first say nothing after a kill.
NOT_FOUND = getattr(e2b, "SandboxNotFoundException", e2b.SandboxException) if VERSION >= (2, 20) else e2b.SandboxException
KILLED = True if VERSION >= (2, 0) else None
BOOT_ID = "/proc/sys/kernel/random/boot_id"
COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /tmp/.c; mv /tmp/.c /tmp/count; sleep 0.1; done"


async def create_and_kill(sdk):
    sandbox = await sdk.create(timeout=60)
    assert sandbox.sandbox_id.split("-")[0].isalnum()
    assert await value(sandbox.is_running()) is True
    assert await value(sandbox.kill()) is KILLED
    assert await value(sandbox.is_running()) is False
    assert await value(sdk.Sandbox.kill(sandbox.sandbox_id)) is False
    assert await value(sdk.Sandbox.kill("nonexistingsandbox")) is False
    if sdk.asynchronous:
        async with await sdk.create() as entered:
            assert (await entered.commands.run("echo in")).stdout == "in\n"
    else:
        with await sdk.create() as entered:
            assert entered.commands.run("echo in").stdout == "in\n"
    assert await value(entered.is_running()) is False


async def connect(sdk):
    async with sdk.sandbox() as sandbox:
        await value(sandbox.files.write("/tmp/mark", "here"))
        other = await sdk.connect(sandbox.sandbox_id)
        assert other.sandbox_id.split("-")[0] == sandbox.sandbox_id.split("-")[0]
        assert await value(other.files.read("/tmp/mark")) == "here"
        assert (await sdk.run(other, "echo again")).stdout == "again\n"
        if not takes(sdk.Sandbox.connect, "timeout") or VERSION < (2, 20):  # before, a connect set the timeout by a call of its own
            return
        before = (await value(sandbox.get_info())).end_at
        await sdk.connect(sandbox.sandbox_id, timeout=10)
        assert (await value(sandbox.get_info())).end_at == before, "a connect never shortens"
        await sdk.connect(sandbox.sandbox_id, timeout=900)
        assert (await value(sandbox.get_info())).end_at > before
        await raises(NOT_FOUND, lambda: sdk.Sandbox.connect("nonexistingsandbox"))


def _query(**fields):
    """A list's filter, in the release's way."""
    return e2b.SandboxQuery(**fields) if hasattr(e2b, "SandboxQuery") else _old_query(**fields)


def _old_query(**fields):
    from e2b.sandbox.sandbox_api import SandboxQuery

    return SandboxQuery(**fields)


async def list_and_filter(sdk):
    mark = str(uuid.uuid4())
    if "query" not in inspect.signature(sdk.Sandbox.list).parameters:
        async with sdk.sandbox(metadata={"mark": mark}) as one:
            found = {info.sandbox_id.split("-")[0]: info for info in await value(sdk.Sandbox.list())}
            assert found[one.sandbox_id.split("-")[0]].metadata == {"mark": mark}
        return
    made = [await sdk.create(metadata={"mark": mark, "odd key&=": f"{number} ü/&="}) for number in range(3)]
    try:
        ids = [sandbox.sandbox_id for sandbox in made]
        everything = _query(metadata={"mark": mark})
        if VERSION >= (2, 0):
            pages = await sdk.pages(query=everything, limit=2)
            assert [len(page) for page in pages] == [2, 1]
            assert [info.sandbox_id for page in pages for info in page] == ids[::-1], "the newest first"
        (found,) = await sdk.pages(query=_query(metadata={"mark": mark, "odd key&=": "1 ü/&="}))
        assert [info.sandbox_id.split("-")[0] for info in found] == [ids[1].split("-")[0]]
        (none,) = await sdk.pages(query=_query(metadata={"mark": mark, "odd key&=": "9"}))
        assert none == []
        if hasattr(e2b, "SandboxState"):
            await sdk.pause(made[0])
            (paused,) = await sdk.pages(query=_query(metadata={"mark": mark}, state=[e2b.SandboxState.PAUSED]))
            assert [info.sandbox_id for info in paused] == ids[:1]
        if "template" in inspect.signature(e2b.SandboxQuery if hasattr(e2b, "SandboxQuery") else _old_query).parameters:
            await _newer_filters(sdk, mark, ids)
    finally:
        for sandbox in made:
            await value(sandbox.kill())


async def _newer_filters(sdk, mark, ids):
    def page(**fields):
        return sdk.pages(query=_query(metadata={"mark": mark}, **fields))

    assert len((await page(template="base"))[0]) == 3
    assert await page(template="no-such-template") == [[]]
    (ascending,) = await sdk.pages(query=_query(metadata={"mark": mark}), order="asc")
    assert [info.sandbox_id for info in ascending] == ids
    (after,) = await page(started_after=ascending[1].started_at)
    assert sorted(info.sandbox_id for info in after) == sorted(ids[1:]), "the moment itself is included"


async def details(sdk):
    async with sdk.sandbox(metadata={"a b": "c&d"}, timeout=120) as sandbox:
        need(sandbox, "get_info")
        info = await value(sandbox.get_info())
        assert info.sandbox_id.split("-")[0] == sandbox.sandbox_id.split("-")[0]
        assert info.metadata == {"a b": "c&d"}
        assert info.template_id
        if hasattr(info, "end_at"):
            assert info.end_at - info.started_at == datetime.timedelta(seconds=120)
        if hasattr(info, "state"):
            assert info.state == e2b.SandboxState.RUNNING
            assert info.cpu_count >= 1
            assert info.memory_mb >= 128
            assert info.envd_version
            assert (await value(sdk.Sandbox.get_info(sandbox.sandbox_id))).started_at == info.started_at
        assert sandbox.get_host(8000).startswith("8000-")
        assert sandbox.connection_config.api_key
        assert sandbox.envd_api_url.startswith("http")
        if hasattr(sandbox, "get_mcp_token"):
            assert sandbox.sandbox_domain in sandbox.get_host(80)
            assert sandbox.sandbox_id in sandbox.get_mcp_url()
            await raises(e2b.NotFoundException, sandbox.get_mcp_token)  # it is read from a file that only MCP templates have
        if hasattr(sandbox, "envd_direct_url"):
            assert sandbox.envd_direct_url.startswith("http")
            assert sandbox.traffic_access_token is None
        await raises(NOT_FOUND, lambda: sdk.Sandbox.get_info("nonexistingsandbox"))


async def set_timeout(sdk):
    async with sdk.sandbox(timeout=600) as sandbox:
        await value(sandbox.set_timeout(60))
        if hasattr(sandbox, "get_info"):
            info = await value(sandbox.get_info())
            if hasattr(info, "end_at"):
                assert info.end_at - info.started_at < datetime.timedelta(seconds=300)
        await value(sdk.Sandbox.set_timeout(sandbox.sandbox_id, 1))

        async def ended():
            return not await value(sandbox.is_running())

        await eventually(ended, "it ends at its timeout")
        # The first releases stumble over the refusal itself.
        await raises(e2b.SandboxException if VERSION >= (2, 0) else Exception, lambda: sandbox.commands.run("true"))


async def pause_and_resume(sdk):
    async with sdk.sandbox(envs={"KEPT": "yes"}) as sandbox:
        if not hasattr(sandbox, "pause"):
            need(sandbox, "beta_pause")
        boot_id = await value(sandbox.files.read(BOOT_ID))
        counter = await sdk.run(sandbox, COUNTER, background=True, timeout=0)
        await eventually(lambda: sandbox.files.exists("/tmp/count"), "the counter counts")
        await sdk.pause(sandbox)
        assert await value(sandbox.is_running()) is False
        if hasattr(e2b, "SandboxState"):
            assert (await value(sandbox.get_info())).state == e2b.SandboxState.PAUSED
        again = await sdk.connect(sandbox.sandbox_id, timeout=300)
        assert again.sandbox_id == sandbox.sandbox_id
        assert await value(sandbox.is_running()) is True, "the first client's token is still good"
        assert await value(again.files.read(BOOT_ID)) == boot_id
        assert counter.pid in [process.pid for process in await value(again.commands.list())]
        before = int(await value(again.files.read("/tmp/count")))

        async def counts_on():
            return int(await value(again.files.read("/tmp/count"))) > before

        await eventually(counts_on, "the counter goes on")
        assert (await sdk.run(again, "printf %s $KEPT")).stdout == "yes"
        if VERSION >= (2, 45):
            assert await sdk.pause(sandbox) is True
            assert await value(sdk.Sandbox.pause(sandbox.sandbox_id)) is False
            await value(sandbox.connect())
            assert await value(sandbox.beta_pause()) is True
            await raises(e2b.SandboxException, lambda: sandbox.commands.run("true"))


async def pause_disk_only(sdk):
    async with sdk.sandbox(envs={"KEPT": "yes"}) as sandbox:
        need_option(need(sandbox, "pause"), "keep_memory")
        await value(sandbox.files.write("/home/user/kept", "on disk"))
        boot_id = await value(sandbox.files.read(BOOT_ID))
        await sdk.run(sandbox, COUNTER, background=True, timeout=0)
        await sdk.pause(sandbox, keep_memory=False)
        assert await value(sandbox.is_running()) is False
        again = await sdk.connect(sandbox.sandbox_id, timeout=300)
        assert await value(again.files.read("/home/user/kept")) == "on disk"
        assert await value(again.files.read(BOOT_ID)) != boot_id
        assert "count" not in str([process.args for process in await value(again.commands.list())])
        assert (await sdk.run(again, "printf %s $KEPT; whoami")).stdout == "yesuser\n"


async def pause_at_timeout(sdk):
    if VERSION < (2, 20):
        raise Absent("no lifecycle option")
    async with sdk.sandbox(timeout=300, lifecycle={"on_timeout": "pause"}) as sandbox:
        await value(sandbox.files.write("/tmp/mark", "kept"))
        assert (await value(sandbox.get_info())).state == e2b.SandboxState.RUNNING
        await value(sandbox.set_timeout(0))

        async def paused():
            return (await value(sandbox.get_info())).state == e2b.SandboxState.PAUSED

        await eventually(paused, "it pauses at its timeout")
        again = await sdk.connect(sandbox.sandbox_id, timeout=300)
        assert await value(again.files.read("/tmp/mark")) == "kept"


async def auto_resume(sdk):
    if VERSION < (2, 20):
        raise Absent("no lifecycle option")
    async with sdk.sandbox(lifecycle={"on_timeout": "pause", "auto_resume": True}) as sandbox:
        await value(sandbox.files.write("/tmp/mark", "kept"))
        await sdk.pause(sandbox)
        assert await value(sandbox.files.read("/tmp/mark")) == "kept"
        assert (await value(sandbox.get_info())).state == e2b.SandboxState.RUNNING


async def fork(sdk):
    async with sdk.sandbox() as sandbox:
        need(sandbox, "fork")
        await sdk.run(sandbox, COUNTER, background=True, timeout=0)
        await eventually(lambda: sandbox.files.exists("/tmp/count"), "the counter counts")
        children = await value(sandbox.fork(count=2, timeout=120))
        try:
            assert len({child.sandbox_id for child in children} | {sandbox.sandbox_id}) == 3
            for number, child in enumerate(children):
                await value(child.files.write("/tmp/who", str(number)))
            assert [await value(child.files.read("/tmp/who")) for child in children] == ["0", "1"]
            assert await value(sandbox.files.exists("/tmp/who")) is False
            before = int(await value(children[0].files.read("/tmp/count")))

            async def counts_on():
                return int(await value(children[0].files.read("/tmp/count"))) > before

            await eventually(counts_on, "the child's counter goes on")
        finally:
            for child in children:
                await value(child.kill())
        (child,) = await value(sdk.Sandbox.fork(sandbox.sandbox_id, timeout=60))
        assert await value(child.kill()) is True
        await raises(NOT_FOUND, lambda: sdk.Sandbox.fork("nonexistingsandbox"))


async def metrics(sdk):
    async with sdk.sandbox() as sandbox:
        need(sandbox, "get_metrics")
        (first, *_) = await eventually(lambda: sandbox.get_metrics(), "a first sample")
        assert first.cpu_count >= 1
        assert 0 < first.mem_used < first.mem_total
        assert 0 < first.disk_used < first.disk_total
        now = datetime.datetime.now(datetime.UTC)
        past = now - datetime.timedelta(hours=2)
        assert await value(sdk.Sandbox.get_metrics(sandbox.sandbox_id, start=past, end=past + datetime.timedelta(hours=1))) == []


async def network_settings(sdk):
    if VERSION < (2, 45):
        raise Absent("no settings of the network afterwards")
    rules = {"deny_out": ["0.0.0.0/0"], "allow_out": ["198.51.100.7", "203.0.113.0/24"]}
    async with sdk.sandbox(network=rules) as sandbox:
        told = (await value(sandbox.get_info())).network
        assert (told["deny_out"], told["allow_out"]) == (rules["deny_out"], rules["allow_out"])
        await value(sandbox.update_network({"deny_out": ["192.0.2.0/24"]}))
        told = (await value(sandbox.get_info())).network
        assert (told["deny_out"], told.get("allow_out") or []) == (["192.0.2.0/24"], []), "a put replaces all"
        await raises(e2b.SandboxException, lambda: sandbox.update_network({"deny_out": ["example.org"]}))
        await raises(NOT_FOUND, lambda: sdk.Sandbox.update_network("nonexistingsandbox", {}))
    await raises(e2b.SandboxException, lambda: sdk.Sandbox.create("base", network={"allow_out": ["example.org"]}))


async def ports(sdk):
    url = api_url()
    async with sdk.sandbox() as sandbox:
        await sdk.run(sandbox, "exec python3 -m http.server 8000 --directory /etc", background=True, timeout=0)

        def fetch(port):
            headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
            with urllib.request.urlopen(urllib.request.Request(url + "/hostname", headers=headers), timeout=60) as reply:
                return reply.status

        def answers():
            try:
                return fetch(8000) == 200
            except urllib.error.HTTPError as error:
                if error.code != 502:
                    raise
                return False

        await eventually(answers, "the server in the sandbox answers")
        closed = await raises(urllib.error.HTTPError, lambda: fetch(8001))
        body = closed.read().decode()
        assert (closed.code, "port is not open" in body, '"port":8001' in body.replace(" ", "")) == (502, True, True), body


async def errors(sdk):
    made = sdk.Sandbox.create if hasattr(sdk.Sandbox, "create") else sdk.Sandbox
    bad_key = await raises(
        e2b.SandboxException if VERSION < (2, 0) else e2b.AuthenticationException, lambda: made("base", api_key="e2b_" + "f" * 40)
    )
    assert "key" in str(bad_key).lower()
    unknown = await raises(e2b.SandboxException, lambda: made("no-such-template"))
    assert "no-such-template" in str(unknown)
    await raises(e2b.SandboxException, lambda: made("base", timeout=10_000_000))
    async with sdk.sandbox() as sandbox:
        assert await value(sandbox.kill()) is KILLED
        await raises(e2b.SandboxException, lambda: sandbox.files.read("/etc/hostname"))
        await raises(NOT_FOUND, lambda: sandbox.set_timeout(10))


async def idempotent_create(sdk):
    if not hasattr(sdk.Sandbox, "create"):
        raise Absent("no option idempotency_key")
    need_option(sdk.Sandbox.create, "idempotency_key")
    key = str(uuid.uuid4())
    async with sdk.sandbox(idempotency_key=key) as sandbox:
        assert (await sdk.create(idempotency_key=key)).sandbox_id == sandbox.sandbox_id
        await raises(e2b.SandboxException, lambda: sdk.create(idempotency_key=key, metadata={"other": "request"}))


SCENARIOS = (
    create_and_kill,
    connect,
    list_and_filter,
    details,
    set_timeout,
    pause_and_resume,
    pause_disk_only,
    pause_at_timeout,
    auto_resume,
    fork,
    metrics,
    network_settings,
    ports,
    errors,
    idempotent_create,
)
