"""What builds have the guest's agent do: what is asked of it, and what each of its answers means."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from agentenv.core.errors import AgentEnvError, Internal, InvalidInput, StorageFull, Unsupported
from agentenv.guest.provision import Place, Provision


class Agent:
    """Answers every call with `status` and `body`."""

    def __init__(self, status: int = 204, body: bytes = b"") -> None:
        self.status, self.body = status, body
        self.asked: list[tuple[str, bytes]] = []

    async def __call__(self, namespace: str, target: str, content: bytes | Path, deadline_s: float) -> tuple[int, bytes]:
        self.asked.append((target, content if isinstance(content, bytes) else content.read_bytes()))
        return self.status, self.body


async def test_what_is_asked(tmp_path: Path):
    agent = Agent(200, b'{"uid": 7, "gid": 8, "isFolder": true}')
    assert await Provision(agent).look("ns", "app:staff", "/a b") == Place(7, 8, True)
    agent.status = 204
    (tmp_path / "x.tar").write_bytes(b"archive")
    await Provision(agent).make_user("ns", "app")
    await Provision(agent).make_folder("ns", "/x", 1, 2)
    await Provision(agent).unpack("ns", tmp_path / "x.tar", "/a b&c", 3, 4, 5.0)
    look, user, folder, unpack = agent.asked
    assert (look[0], json.loads(look[1])) == ("/provision/look", {"owner": "app:staff", "path": "/a b"})
    assert (user[0], json.loads(user[1])) == ("/provision/user", {"name": "app"})
    assert (folder[0], json.loads(folder[1])) == ("/provision/folder", {"path": "/x", "uid": 1, "gid": 2})
    assert parse_qs(urlsplit(unpack[0]).query) == {"path": ["/a b&c"], "uid": ["3"], "gid": ["4"]}
    assert unpack[1] == b"archive"


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, InvalidInput), (507, StorageFull), (404, Unsupported), (403, Internal), (500, Internal), (302, Internal)],
)
@pytest.mark.parametrize("body", [b'{"code": 1, "message": "said so"}', b"not JSON", b"[]"])
async def test_what_answers_mean(status: int, error: type[AgentEnvError], body: bytes):
    with pytest.raises(error) as caught:
        await Provision(Agent(status, body)).make_user("ns", "app")
    assert type(caught.value) is error
    if b"said so" in body and error is not Unsupported:
        assert "said so" in caught.value.message
