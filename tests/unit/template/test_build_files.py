"""Uploaded archives: who may upload, when one is there, and which go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.core.errors import InvalidInput, NotFound, PermissionDenied, StorageFull
from agentenv.template.build_files import BuildFiles
from agentenv.testing.fake_orchestrator import ManualClock

HASH = "a" * 64


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def files(tmp_path: Path, clock: ManualClock) -> BuildFiles:
    made = BuildFiles(tmp_path / "files", clock, 1000, 2500, 0)
    made.open()
    return made


async def sent(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def there(files: BuildFiles) -> list[str]:
    return sorted(path.name for path in files._folder.iterdir())


async def store(files: BuildFiles, name: str, size_bytes: int, used_s: int = 0) -> None:
    await files.receive(name, files.ticket(name), size_bytes, sent(b"x" * size_bytes))
    if used_s:
        os.utime(files._folder / name, (used_s, used_s))


async def test_an_upload_is_there_when_all_of_it_is(files: BuildFiles):
    assert not files.has(HASH)
    assert await files.receive(HASH, files.ticket(HASH), 6, sent(b"abc", b"def")) == 6
    assert files.has(HASH)
    with files.using(HASH) as path:
        assert path.read_bytes() == b"abcdef"
    await files.receive(HASH, files.ticket(HASH), None, sent(b"again"))
    with files.using(HASH) as path:
        assert path.read_bytes() == b"again"
    assert there(files) == [HASH]


@pytest.mark.parametrize(
    ("declared", "chunks"),
    [(4, [b"abc"]), (2, [b"abc"]), (1001, [b"x"]), (None, [b"x" * 600, b"x" * 600]), (1000, [b"x" * 600, b"x" * 600])],
)
async def test_what_is_not_whole_or_too_large_leaves_nothing(files: BuildFiles, declared: int | None, chunks: list[bytes]):
    with pytest.raises(InvalidInput):
        await files.receive(HASH, files.ticket(HASH), declared, sent(*chunks))
    assert there(files) == []


async def test_a_caller_that_goes_away_leaves_nothing(files: BuildFiles):
    async def breaks() -> AsyncIterator[bytes]:
        yield b"abc"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await files.receive(HASH, files.ticket(HASH), 6, breaks())
    assert there(files) == []


async def test_a_ticket_is_for_one_hash_and_for_two_hours(files: BuildFiles, clock: ManualClock):
    ticket = files.ticket(HASH)
    assert files.ticket(HASH) == ticket
    for name, given in ((HASH, "0" * 64), ("b" * 64, ticket), (HASH, "")):
        with pytest.raises(PermissionDenied):
            await files.receive(name, given, 1, sent(b"x"))
    clock.advance_ms(2 * 3_600_000 + 1)
    with pytest.raises(PermissionDenied):
        await files.receive(HASH, ticket, 1, sent(b"x"))
    assert there(files) == []


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 129, "ä", ".partial-x", "a\0"])
async def test_a_name_that_is_no_hash(files: BuildFiles, name: str):
    for ask in (files.has, files.ticket):
        with pytest.raises(InvalidInput):
            ask(name)


async def test_the_ones_used_longest_ago_go(files: BuildFiles):
    await store(files, "old", 900, used_s=100)
    await store(files, "older", 900, used_s=50)
    with files.using("older"):
        pass  # a use makes it the newest
    await store(files, "new", 900)
    assert there(files) == ["new", "older"]


async def test_what_is_in_use_stays(files: BuildFiles):
    await store(files, "used", 900)
    with files.using("used"):
        os.utime(files._folder / "used", (1, 1))
        await store(files, "b", 900, used_s=100)
        await store(files, "c", 900)
        assert there(files) == ["b", "c", "used"] or there(files) == ["c", "used"]
        assert files.has("used")
    with pytest.raises(NotFound, match="not uploaded"), files.using("missing"):
        pass


async def test_one_after_the_other_at_once(files: BuildFiles):
    ticket = files.ticket(HASH)
    await asyncio.gather(*(files.receive(HASH, ticket, 3, sent(b"abc")) for _ in range(5)))
    assert there(files) == [HASH]


async def test_remains_of_a_crash_go_with_the_next_start(files: BuildFiles):
    (files._folder / ".partial-x").write_bytes(b"half")
    files.open()
    assert there(files) == []


async def test_no_room(tmp_path: Path, clock: ManualClock):
    files = BuildFiles(tmp_path, clock, 1000, 2000, 1 << 60)
    with pytest.raises(StorageFull):
        await files.receive(HASH, files.ticket(HASH), 1, sent(b"x"))
    assert there(files) == []


@pytest.mark.parametrize("size_kib", [1, 60, 200, 230])
async def test_an_upload_onto_a_disk_that_fills_leaves_nothing(size_kib: int, clock: ManualClock, small_disk: Callable[[str], Any]):
    disk = small_disk("256k")
    files = BuildFiles(disk.path / "files", clock, 1 << 30, 1 << 30, 0)
    files.open()
    (disk.path / "ballast").write_bytes(bytes((256 - size_kib) << 10 & ~4095))
    with pytest.raises(StorageFull, match="no room for an upload"):
        await files.receive(HASH, files.ticket(HASH), None, sent(*[b"x" * 10_000] * 30))
    assert there(files) == []
    disk.resize("4m")
    assert await files.receive(HASH, files.ticket(HASH), None, sent(*[b"x" * 10_000] * 30)) == 300_000
