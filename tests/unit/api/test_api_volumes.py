"""Volumes over HTTP and through the official SDK."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import AsyncVolume, Sandbox, Volume
from e2b.exceptions import (
    AuthenticationException,
    SandboxException,
    VolumeException,
    VolumeNotFoundException,
    VolumePathNotFoundException,
)

from agentenv.api import request_parts
from agentenv.core.errors import StorageFull
from agentenv.testing.fake_orchestrator import FakeOrchestrator
from agentenv.volume.tree import Upload

Options = dict[str, Any]
Headers = dict[str, str]


@pytest.fixture
def options(live_port: int, key: str, monkeypatch: pytest.MonkeyPatch) -> Options:
    url = f"http://127.0.0.1:{live_port}"
    monkeypatch.setenv("E2B_VOLUME_API_URL", url)
    return {"api_key": key, "api_url": url}


# -- the official SDK


def test_life_of_a_volume(options: Options):
    volume = Volume.create("data", **options)
    assert (volume.name, bool(volume.token)) == ("data", True)
    assert [(one.volume_id, one.name) for one in Volume.list(**options)] == [(volume.volume_id, "data")]
    assert Volume.get_info(volume.volume_id, **options).token == volume.token
    again = Volume.connect(volume.volume_id, **options)
    volume.write_file("/a", "text")
    assert again.read_file("/a") == "text"
    with pytest.raises(VolumeException, match="already exists"):
        Volume.create("data", **options)
    assert Volume.destroy(volume.volume_id, **options)
    assert not Volume.destroy(volume.volume_id, **options)
    with pytest.raises(VolumeNotFoundException):
        Volume.connect(volume.volume_id, **options)
    assert not again.exists("/a")


def test_files_and_folders(options: Options):
    volume = Volume.create("data", **options)
    entry = volume.make_dir("/d/e", force=True, uid=5, gid=6, mode=0o750)
    assert (entry.type.value, entry.path, entry.uid, entry.gid, entry.mode) == ("directory", "/d/e", 5, 6, 0o750)
    written = volume.write_file("/d/e/f.bin", b"\x00\xff" * 3, mode=0o600)
    assert (written.name, written.size, written.mode, written.mtime.tzinfo is not None) == ("f.bin", 6, 0o600, True)
    assert volume.read_file("/d/e/f.bin", format="bytes") == b"\x00\xff" * 3
    assert [one.path for one in volume.list("/")] == ["/d"]
    assert [one.path for one in volume.list("/", depth=3)] == ["/d", "/d/e", "/d/e/f.bin"]
    assert volume.update_metadata("/d/e/f.bin", mode=0o644, uid=9).uid == 9
    assert volume.get_info("/d/e/f.bin").mode == 0o644
    volume.remove("/d")
    assert not volume.exists("/d")
    for attempt in (
        lambda: volume.read_file("/d"),
        lambda: list(volume.read_file("/d", format="stream")),
        lambda: volume.list("/d"),
        lambda: volume.get_info("/d"),
        lambda: volume.remove("/d"),
        lambda: volume.update_metadata("/d", mode=0o600),
        lambda: volume.write_file("/d/f", "x"),
        lambda: volume.make_dir("/d/e"),
    ):
        with pytest.raises(VolumePathNotFoundException):
            attempt()
    with pytest.raises(VolumeException, match="directory"):
        volume.read_file("/")
    with pytest.raises(VolumeException, match="mode"):
        volume.make_dir("/m", mode=0o100000)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_003])
def test_files_of_any_size_stream(options: Options, size: int):
    volume = Volume.create("data", **options)
    content = os.urandom(size)
    assert volume.write_file("/f", io.BytesIO(content)).size == size
    assert b"".join(volume.read_file("/f", format="stream")) == content


def test_odd_names(options: Options):
    volume = Volume.create("data", **options)
    names = ["a b", "ü日本", "%2e%2e", 'a"b', "a\\b", "a#b?c&d=e+f", "-rf", ".hidden", "n" * 255, "new\nline"]
    for name in names:
        volume.write_file(f"/{name}", name)
        assert volume.read_file(f"/{name}") == name
        assert volume.get_info(f"/{name}").name == name
    assert sorted(one.name for one in volume.list("/")) == sorted(names)


def test_tokens_do_not_open_other_volumes(options: Options, key: str):
    one, other = Volume.create("one", **options), Volume.create("other", **options)
    one.write_file("/a", "x")
    for token in (other.token, key, "wrong"):
        with pytest.raises(AuthenticationException):
            Volume(one.volume_id, "one", token=token).read_file("/a")


async def test_the_asynchronous_client(options: Options):
    volume = await AsyncVolume.create("data", **options)
    await asyncio.gather(*(volume.write_file(f"/{number}", b"x" * number) for number in range(8)))
    assert [(one.name, one.size) for one in await volume.list("/")] == [(str(number), number) for number in range(8)]
    stream = await volume.read_file("/7", format="stream")
    assert b"".join([chunk async for chunk in stream]) == b"x" * 7
    assert await AsyncVolume.destroy(volume.volume_id, **options)


# -- the wire


@pytest.fixture
async def volume(client: httpx.AsyncClient) -> dict[str, str]:
    return dict((await client.post("/volumes", json={"name": "data"})).json())


@pytest.fixture
def bearer(volume: dict[str, str]) -> Headers:
    return {"Authorization": f"Bearer {volume['token']}"}


@pytest.fixture
def content(volume: dict[str, str]) -> str:
    return f"/volumecontent/{volume['volumeID']}"


async def test_lists_hold_no_tokens(client: httpx.AsyncClient, volume: dict[str, str]):
    assert (await client.get("/volumes")).json() == [{"volumeID": volume["volumeID"], "name": "data"}]
    assert (await client.get(f"/volumes/{volume['volumeID']}")).json() == volume


async def test_statuses_of_volumes(client: httpx.AsyncClient, volume: dict[str, str]):
    for body, status in (({"name": "data"}, 400), ({"name": "no good"}, 400), ({}, 400), ({"name": 1}, 400)):
        reply = await client.post("/volumes", json=body)
        assert (reply.status_code, reply.json()["code"]) == (status, status)
    for path in ("/volumes/none", "/volumes/..%2F..", f"/volumes/{volume['volumeID']}%2F"):
        for method in ("GET", "DELETE"):
            reply = await client.request(method, path)
            assert (reply.status_code, reply.json()["code"]) == (404, 404), path
    assert (await client.delete(f"/volumes/{volume['volumeID']}")).status_code == 204


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/path?path=/none", 404, "not_found"),
        ("GET", "/path", 400, "invalid_input"),
        ("GET", "/path?path=", 400, "invalid_input"),
        ("GET", "/path?path=a%00b", 400, "invalid_input"),
        ("GET", "/path?path=/" + 64 * "&a=1", 400, "invalid_input"),
        ("GET", "/dir?path=/&depth=65", 400, "invalid_input"),
        ("GET", "/dir?path=/&depth=-1", 400, "invalid_input"),
        ("GET", "/dir?path=/&depth=x", 400, "invalid_input"),
        ("GET", "/file?path=/", 400, "invalid_input"),
        ("POST", "/dir?path=/x&mode=4096", 400, "invalid_input"),
        ("POST", "/dir?path=/x&uid=-1", 400, "invalid_input"),
        ("POST", "/dir?path=/", 409, "conflict"),
        ("PUT", "/file?path=/", 400, "invalid_input"),
        ("PUT", "/file?path=/a/b", 404, "not_found"),
        ("DELETE", "/path?path=/", 400, "invalid_input"),
        ("PATCH", "/path?path=/none", 404, "not_found"),
        ("POST", "/path?path=/", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "not_found"),
    ],
)
async def test_errors_of_content_have_a_text_as_code(
    client: httpx.AsyncClient, bearer: Headers, content: str, method: str, path: str, status: int, code: str
):
    reply = await client.request(method, content + path, headers=bearer)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert reply.json()["message"]


async def test_content_wants_the_volume_token(stranger: httpx.AsyncClient, bearer: Headers, content: str, key: str):
    for headers, status in (({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"X-API-KEY": key}, 401), ({**bearer}, 200)):
        reply = await stranger.get(f"{content}/path?path=/", headers=headers)
        assert reply.status_code == status
        if status != 200:
            assert reply.json()["code"] == "unauthenticated"
    reply = await stranger.get("/volumecontent/vnone/path?path=/", headers=bearer)
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


async def test_force_decides_over_an_existing_file(client: httpx.AsyncClient, bearer: Headers, content: str):
    for force, status in (("", 201), ("", 201), ("&force=true", 201), ("&force=false", 409)):
        reply = await client.put(f"{content}/file?path=/a{force}", content=b"x" + force.encode(), headers=bearer)
        assert reply.status_code == status
    assert (await client.get(f"{content}/file?path=/a", headers=bearer)).content == b"x&force=true"


async def test_names_that_are_no_text_can_be_listed_and_removed(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, volume: dict[str, str], bearer: Headers, content: str
):
    folder = orchestrator.volumes.folder(volume["volumeID"])
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")).write_text("x")
    (entry,) = (await client.get(f"{content}/dir?path=/", headers=bearer)).json()
    assert entry["name"] == "\udcff\udcfe"
    assert (await client.get(f"{content}/file?path=/%ff%fe", headers=bearer)).content == b"x"
    assert (await client.delete(f"{content}/path?path=/%ff%fe", headers=bearer)).status_code == 204


async def test_an_upload_that_breaks_off_leaves_the_old_file(client: httpx.AsyncClient, bearer: Headers, content: str):
    await client.put(f"{content}/file?path=/a", content=b"old", headers=bearer)

    async def broken():
        yield b"half"
        raise ConnectionError

    assert (await client.put(f"{content}/file?path=/a", content=broken(), headers=bearer)).status_code == 500
    assert (await client.get(f"{content}/file?path=/a", headers=bearer)).content == b"old"
    assert [one["name"] for one in (await client.get(f"{content}/dir?path=/", headers=bearer)).json()] == ["a"]


async def test_a_full_disk_is_said_to_be_full(client: httpx.AsyncClient, bearer: Headers, content: str, monkeypatch: pytest.MonkeyPatch):
    await client.put(f"{content}/file?path=/a", content=b"old", headers=bearer)

    def full(_upload: Upload, _data: bytes) -> None:
        raise StorageFull("no room left")

    monkeypatch.setattr(Upload, "write", full)
    reply = await client.put(f"{content}/file?path=/a", content=b"new", headers=bearer)
    assert (reply.status_code, reply.json()["code"]) == (507, "storage_full")
    assert (await client.get(f"{content}/file?path=/a", headers=bearer)).content == b"old"


async def test_an_upload_that_stands_still_is_ended(
    client: httpx.AsyncClient, bearer: Headers, content: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(request_parts, "CHUNK_DEADLINE_S", 0.05)

    async def stuck():
        yield b"half"
        await asyncio.sleep(0.5)

    reply = await client.put(f"{content}/file?path=/a", content=stuck(), headers=bearer)
    assert (reply.status_code, reply.json()["code"]) == (408, "body_too_slow")


async def test_descriptors_are_closed(client: httpx.AsyncClient, bearer: Headers, content: str):
    await client.put(f"{content}/file?path=/a", content=b"old", headers=bearer)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        await client.get(f"{content}/file?path=/a", headers=bearer)
        await client.put(f"{content}/file?path=/a", content=b"new", headers=bearer)
        await client.get(f"{content}/dir?path=/", headers=bearer)
        await client.put(f"{content}/file?path=/no/a", content=b"new", headers=bearer)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


# -- sandboxes that mount volumes


def test_a_sandbox_says_what_it_mounts(options: Options, live_orchestrator: FakeOrchestrator):
    volume = Volume.create("data", **options)
    options = {**options, "sandbox_url": options["api_url"]}
    sandbox = Sandbox.create("base", volume_mounts={"/mnt/a": volume, "/mnt/b": "data"}, **options)
    expected = [{"name": "data", "path": "/mnt/a"}, {"name": "data", "path": "/mnt/b"}]
    assert sandbox.get_info().volume_mounts == expected
    (listed,) = Sandbox.list(**options).next_items()
    assert listed.volume_mounts == expected
    assert {mount.volume_id for mount in live_orchestrator.peek(sandbox.sandbox_id).volume_mounts} == {volume.volume_id}
    with pytest.raises(SandboxException, match="volume 'none' not found"):
        Sandbox.create("base", volume_mounts={"/mnt/a": "none"}, **options)


@pytest.mark.parametrize(
    "mounts",
    [[{"name": "data"}], [{"path": "/a"}], [{"name": "data", "path": 1}], {"name": "data", "path": "/a"}, ["data"], "data"],
)
async def test_malformed_mounts(client: httpx.AsyncClient, volume: dict[str, str], mounts: object):
    reply = await client.post("/v2/sandboxes", json={"templateID": "base", "volumeMounts": mounts})
    assert (reply.status_code, reply.json()["code"]) == (400, 400)
    assert "volumeMounts" in reply.json()["message"]
