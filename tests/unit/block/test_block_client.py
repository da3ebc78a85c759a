"""The client against a scripted blockd on a Unix socket."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.block.client import BlockClient, RemoteBlob, Stack, Upper, Written
from agentenv.core import errors

STACK = {
    "id": "disk-1", "path": "/run/x/disk-1", "virtual_size_bytes": 4096, "lowers": ["/l/a.lsmt", "/l/b.lsmt"],
    "upper": {"data": "/l/u.lsmt", "index": "/l/u.index"}, "cache": "direct", "owner": {"uid": 0, "gid": 0}, "open_handles": 2,
    "upper_data_bytes": 7, "upper_mapped_bytes": 0, "upper_records": 0,
    "waits_for_room": True,
}  # fmt: skip
PARSED = Stack("disk-1", Path("/run/x/disk-1"), 4096, 2, 7, (Path("/l/a.lsmt"), Path("/l/b.lsmt")), Path("/l/u.lsmt"), True)


class FakeBlockd:
    """Answers every request with `status` and `body`; remembers what was asked."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.status, self.body = 200, b"{}"
        self.delay_s = 0.0
        self.cut_off = False
        self.asked: list[tuple[str, str, Any]] = []
        self._server: asyncio.Server | None = None

    def answer(self, status: int, body: object) -> None:
        self.status, self.body = status, body if isinstance(body, bytes) else json.dumps(body).encode()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [line.split(":")[1] for line in head.lower().splitlines() if line.startswith("content-length")]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                method, path, _ = head.split(" ", 2)
                self.asked.append((method, path, json.loads(body) if body else None))
                await asyncio.sleep(self.delay_s)
                reply = f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(self.body)}\r\n\r\n".encode() + self.body
                writer.write(reply[: len(reply) // 2] if self.cut_off else reply)
                if self.cut_off:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@pytest.fixture
async def blockd(tmp_path: Path) -> AsyncIterator[FakeBlockd]:
    blockd = FakeBlockd(tmp_path / "blockd.sock")
    await blockd.start()
    yield blockd
    await blockd.stop()


@pytest.fixture
async def client(blockd: FakeBlockd) -> AsyncIterator[BlockClient]:
    client = BlockClient(blockd.socket)
    yield client
    await client.close()


async def test_stacks_are_opened_listed_and_sealed(blockd: FakeBlockd, client: BlockClient) -> None:
    blockd.answer(200, STACK)
    opened = await client.open("disk-1", [Path("/l/a.lsmt")], Upper(Path("/l/u.lsmt"), Path("/l/u.index")), None, "direct")
    blockd.answer(200, {"stacks": [STACK, STACK | {"upper": None, "upper_data_bytes": 0}]})
    listed = await client.stacks()
    blockd.answer(200, {"layer": {"path": "/l/u.lsmt", "size_bytes": 1, "mapped_bytes": 1, "uuid": ""}, "stack": STACK})
    sealed = await client.seal("disk-1", Upper(Path("/l/v.lsmt"), Path("/l/v.index")))
    assert opened == listed[0] == sealed == PARSED
    assert listed[1].upper is None
    assert (PARSED.files, listed[1].files) == ((*PARSED.lowers, Path("/l/u.lsmt")), PARSED.lowers)
    uppers = [{"data": f"/l/{name}.lsmt", "index": f"/l/{name}.index"} for name in "uv"]
    assert blockd.asked == [
        (
            "PUT",
            "/v1/stacks/disk-1",
            {"lowers": ["/l/a.lsmt"], "upper": uppers[0], "upper_layout": "hybrid", "virtual_size_bytes": None, "cache": "direct"},
        ),
        ("GET", "/v1/stacks", None),
        ("POST", "/v1/stacks/disk-1/seal", {"upper": uppers[1], "sync": False}),
    ]


async def test_a_disk_is_a_device_where_blockd_has_them_and_memory_never(blockd: FakeBlockd, client: BlockClient) -> None:
    for exports, wanted in ((["fuse"], None), (["fuse", "ublk"], "auto")):
        blockd.answer(200, {"program": "blockd", "exports": exports})
        await client.info()
        blockd.answer(200, STACK)
        await client.open("disk-1", [], Upper(Path("/l/u.lsmt"), Path("/l/u.index")), 4096, "direct")
        blockd.answer(200, STACK)
        await client.open("mem-1", [Path("/l/a.lsmt")], None, None, "page")
        disk, memory = (asked[2] for asked in blockd.asked[-2:])
        assert (disk.get("export"), memory.get("export")) == (wanted, None)


async def test_an_export_and_an_owner_are_passed_on(blockd: FakeBlockd, client: BlockClient) -> None:
    blockd.answer(200, STACK)
    await client.open("capture-1", [], Upper(Path("/l/u.lsmt"), Path("/l/u.index")), 4096, "direct", "fuse", (7, 8), True)
    assert blockd.asked[-1][2] | {"export": "fuse", "owner": {"uid": 7, "gid": 8}, "records_zeros": True} == blockd.asked[-1][2]


async def test_captures_imports_and_commits(blockd: FakeBlockd, client: BlockClient) -> None:
    figures = {"size_bytes": 1, "pages": 2, "zero_pages": 3, "stored_pages": 4, "find_us": 5, "copy_us": 6}
    blockd.answer(200, figures | {"output": "/l/m.lsmt", "virtual_size_bytes": 9})
    captured = await client.capture(42, "mem-1", Path("/l/m.lsmt"))
    assert {name: getattr(captured, name) for name in figures} == figures
    assert await client.import_raw(Path("/raw"), Path("/l/o.lsmt")) == 1
    assert await client.commit([Path("/l/a.lsmt")], Path("/l/o.lsmt")) == 1
    assert [asked[1] for asked in blockd.asked] == ["/v1/captures", "/v1/imports", "/v1/commits"]
    assert blockd.asked[0][2] == {"pid": 42, "stack": "mem-1", "output": "/l/m.lsmt", "sync": False}


async def test_layers_in_registries_and_packed_ones(blockd: FakeBlockd, client: BlockClient) -> None:
    blockd.answer(200, {"output": "/l/n.lsmt", "virtual_size_bytes": 1 << 30, "uuid": "", "parent_uuid": "", "fetched_bytes": 5})
    blob = RemoteBlob("https://r/v2/x/blobs", "sha256:1", 7)
    assert await client.add_remote(Path("/l/n.lsmt"), blob, ("me", "secret")) == 1 << 30
    blockd.answer(200, {"layers": [], "cache": {"used_bytes": 1}})
    assert (await client.remotes())["cache"] == {"used_bytes": 1}
    blockd.answer(200, {"size_bytes": 3, "sha256": "ab"})
    assert await client.pack(Path("/l/a.lsmt"), Path("/out")) == Written(3, "ab")
    blockd.answer(200, {"freed_bytes": 4})
    assert await client.shrink_cache(sys.maxsize) == 4
    blockd.answer(404, {"code": "not_found", "message": "no such route", "hint": ""})
    assert await client.shrink_cache(1) == 0
    blockd.answer(200, {"layers": [], "cache": {"used_bytes": 10}})
    assert [await client.shrink_cache(size, dry_run=True) for size in (7, 12)] == [7, 10]
    remote, _, packed, shrunk, *_ = (asked[2] for asked in blockd.asked)
    assert shrunk == {"bytes": 1 << 62}
    assert remote == {
        "output": "/l/n.lsmt",
        "blobs_url": "https://r/v2/x/blobs",
        "digest": "sha256:1",
        "size_bytes": 7,
        "check_certificate": True,
        "login": {"username": "me", "password": "secret"},
    }
    compression = {"algorithm": "lz4", "block_bytes": 4096}
    assert packed == {"lowers": ["/l/a.lsmt"], "output": "/out", "compression": compression, "tar": True, "keep_uuid": True}


async def test_a_replacement_names_its_layers(blockd: FakeBlockd, client: BlockClient) -> None:
    blockd.answer(500, {"code": "io", "message": "", "hint": ""})
    with pytest.raises(errors.Internal):
        await client.replace("disk-1", [Path("/l/a.lsmt"), Path("/l/b.lsmt")], Path("/l/m.lsmt"))
    method, path, body = blockd.asked[0]
    assert (method, path) == ("POST", "/v1/stacks/disk-1/replace")
    assert body == {"lowers": ["/l/a.lsmt", "/l/b.lsmt"], "replacement": "/l/m.lsmt"}


CODES = {
    "not_found": (404, errors.NotFound), "invalid_input": (400, errors.InvalidInput), "conflict": (409, errors.Conflict),
    "busy": (409, errors.Conflict), "storage_full": (507, errors.StorageFull), "corrupt": (500, errors.DataCorrupt),
    "denied": (403, errors.PermissionDenied), "unavailable": (503, errors.Unavailable),
    "io": (500, errors.Internal), "internal": (500, errors.Internal), "of_a_newer_blockd": (418, errors.Internal),
}  # fmt: skip


@pytest.mark.parametrize("code", CODES)
async def test_errors_come_by_their_code_with_cause_and_hint(blockd: FakeBlockd, client: BlockClient, code: str) -> None:
    status, expected = CODES[code]
    blockd.answer(status, {"code": code, "message": "what happened", "hint": "what to do"})
    with pytest.raises(errors.AgentEnvError) as caught:
        await client.flush("disk-1")
    assert type(caught.value) is expected
    assert (caught.value.message, caught.value.hint) == ("blockd: what happened", "what to do")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"text"', b'{"code": "busy"}', b'{"code": [], "message": 1}', b"\xff"])
async def test_an_error_of_another_shape_is_internal_with_its_words(blockd: FakeBlockd, client: BlockClient, body: bytes) -> None:
    blockd.answer(500, body)
    with pytest.raises(errors.Internal, match="500"):
        await client.flush("disk-1")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"stacks": [{}]}', b'{"stacks": 5}'])
async def test_a_success_of_another_shape_is_internal(blockd: FakeBlockd, client: BlockClient, body: bytes) -> None:
    blockd.answer(200, body)
    with pytest.raises(errors.Internal, match="blockd"):
        await client.stacks()


async def test_closing_what_is_not_open_is_no_error(blockd: FakeBlockd, client: BlockClient) -> None:
    blockd.answer(404, {"code": "not_found", "message": "", "hint": ""})
    await client.close_stack("disk-1")
    await client.close_stack("disk-1", force=True)
    assert [asked[1] for asked in blockd.asked] == ["/v1/stacks/disk-1", "/v1/stacks/disk-1?force=true"]


async def test_nobody_there_a_cut_answer_and_a_slow_one(blockd: FakeBlockd, client: BlockClient, tmp_path: Path) -> None:
    blockd.delay_s = 0.1
    with pytest.raises(errors.DeadlineExceeded, match=r"0\.02 s"):
        await client.info(deadline_s=0.02)
    blockd.delay_s, blockd.cut_off = 0.0, True
    with pytest.raises(errors.Unavailable, match=r"blockd\.sock"):
        await client.info()
    nobody = BlockClient(tmp_path / "nobody.sock")
    with pytest.raises(errors.Unavailable, match=r"nobody\.sock"):
        await nobody.info()
    await nobody.close()
