"""`agentenv.client`: what it adds to E2B's classes, against the API."""

from __future__ import annotations

from typing import Any

import e2b
import pytest

from agentenv.client import AsyncSandbox, Sandbox
from agentenv.core.errors import StorageFull
from agentenv.testing.fake_orchestrator import FakeOrchestrator

Options = dict[str, Any]


@pytest.fixture
def options(live_port: int, key: str) -> Options:
    url = f"http://127.0.0.1:{live_port}"
    return {"api_key": key, "api_url": url, "sandbox_url": url}


def test_a_checkpoint_for_the_length_of_a_block(options: Options, live_orchestrator: FakeOrchestrator):
    sandbox = Sandbox.create("base", **options)
    with sandbox.checkpoint("clean") as outer, sandbox.checkpoint() as inner:
        assert [(c.name, c.parent_id, c.current) for c in sandbox.checkpoints()] == [("clean", None, False), (None, outer.id, True)]
        outer.rollback()
        inner.rollback()
        sandbox.rollback("clean")
        assert live_orchestrator.peek(sandbox.sandbox_id).checkpoint_id == outer.id
    assert sandbox.checkpoints() == []
    outer.delete()  # it is gone already


def test_errors_are_e2bs_own(options: Options):
    sandbox = Sandbox.create("base", **options)
    with pytest.raises(e2b.NotFoundException, match="has no checkpoint 'x'"):
        sandbox.rollback("x")
    with pytest.raises(e2b.SandboxException, match="no checkpoint to go back to"):
        sandbox.rollback()
    sandbox.checkpoint("a")
    with pytest.raises(e2b.SandboxException, match="already"):
        sandbox.checkpoint("a")
    sandbox.kill()
    with pytest.raises(e2b.NotFoundException):
        sandbox.checkpoint()
    stranger = Sandbox.create("base", **options)
    stranger.connection_config.api_key = "e2b_" + "f" * 40
    with pytest.raises(e2b.AuthenticationException):
        stranger.checkpoints()


def test_many_in_one_call(options: Options, live_orchestrator: FakeOrchestrator):
    live_orchestrator.fail_next("create", StorageFull("the disk is full"))
    failed, *made = Sandbox.create_many(3, "base", timeout=60, body={"metadata": {"run": "7"}}, **options)
    assert isinstance(failed, e2b.SandboxException)
    assert "full" in str(failed)
    assert [type(sandbox) for sandbox in made] == [Sandbox, Sandbox]
    for sandbox in made:
        assert isinstance(sandbox, Sandbox)
        assert sandbox.get_info().metadata == {"run": "7"}
        with sandbox.checkpoint() as checkpoint:
            checkpoint.rollback()


def test_a_fork_into_more_than_e2bs_client_asks_for(options: Options, live_orchestrator: FakeOrchestrator):
    source = Sandbox.create("base", **options)
    with pytest.raises(e2b.InvalidArgumentException):
        source.fork(count=60)
    live_orchestrator.fail_next("fork_child", StorageFull("the disk is full"))
    failed, *made = source.fork_many(60, timeout=60)
    assert isinstance(failed, e2b.SandboxException)
    assert len({sandbox.sandbox_id for sandbox in made if isinstance(sandbox, Sandbox)}) == 59
    with pytest.raises(e2b.SandboxException, match="400"):
        source.fork_many(101)


async def test_the_same_for_asyncio(options: Options):
    sandbox = await AsyncSandbox.create("base", **options)
    async with await sandbox.checkpoint("clean") as kept:
        await kept.rollback()
        await sandbox.rollback()
        assert [c.name for c in await sandbox.checkpoints()] == ["clean"]
    assert await sandbox.checkpoints() == []
    with pytest.raises(e2b.NotFoundException):
        await sandbox.rollback("clean")
