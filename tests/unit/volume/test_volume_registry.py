"""The volumes of a node, across restarts and crashes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentenv.core.errors import InvalidInput, NotFound, StorageFull, Unauthenticated
from agentenv.core.model import Volume
from agentenv.testing.fake_orchestrator import ManualClock
from agentenv.testing.fake_store import MemoryShelf
from agentenv.volume.registry import Volumes


class FullShelf(MemoryShelf[Volume]):
    full = False

    async def put(self, noun: Volume) -> None:
        self._check()
        await super().put(noun)

    async def remove(self, noun_id: str) -> None:
        self._check()
        await super().remove(noun_id)

    def _check(self) -> None:
        if self.full:
            raise StorageFull("no room")


@pytest.fixture
def shelf() -> FullShelf:
    return FullShelf("volume_id")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "volumes"


@pytest.fixture
def volumes(shelf: FullShelf, folder: Path) -> Volumes:
    return Volumes(shelf, folder, ManualClock())


async def test_a_new_volume_is_empty_and_open_to_every_user_of_a_guest(volumes: Volumes, folder: Path):
    volume = await volumes.create("data")
    root = volumes.content(volume.volume_id, volume.token).stat("/")
    assert (root.kind, root.mode, root.uid) == ("directory", 0o777, 1000)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert repr(volume).find(volume.token) == -1


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", "ü", "a" * 129, "a\n"])
async def test_impossible_names(volumes: Volumes, name: str):
    with pytest.raises(InvalidInput, match="Invalid volume name"):
        await volumes.create(name)


async def test_a_name_belongs_to_one_volume(volumes: Volumes):
    first = await volumes.create("data")
    outcomes = await asyncio.gather(*(volumes.create(name) for name in ("data", "new", "new")), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [InvalidInput, Volume, InvalidInput]
    await volumes.delete(first.volume_id)
    assert (await volumes.create("data")).volume_id != first.volume_id


async def test_deletion(volumes: Volumes, folder: Path):
    volume = await volumes.create("data")
    (folder / volume.volume_id / "file").write_text("x")
    tree = volumes.content(volume.volume_id, volume.token)
    await volumes.delete(volume.volume_id)
    for attempt in (lambda: volumes.get(volume.volume_id), lambda: volumes.content(volume.volume_id, volume.token), lambda: tree.stat("/")):
        with pytest.raises(NotFound):
            attempt()
    with pytest.raises(NotFound):
        await volumes.delete(volume.volume_id)
    await volumes.close()
    assert list(folder.iterdir()) == []


async def test_only_its_own_token_opens_a_volume(volumes: Volumes):
    one, other = await volumes.create("one"), await volumes.create("other")
    for token in ("", other.token, one.token[:-1]):
        with pytest.raises(Unauthenticated):
            volumes.content(one.volume_id, token)


async def test_a_deletion_that_cannot_be_recorded_keeps_everything(volumes: Volumes, shelf: FullShelf, folder: Path):
    volume = await volumes.create("data")
    (folder / volume.volume_id / "file").write_text("x")
    shelf.full = True
    with pytest.raises(StorageFull):
        await volumes.delete(volume.volume_id)
    assert volumes.content(volume.volume_id, volume.token).stat("/file").size_bytes == 1


async def test_a_crash_in_a_deletion_is_finished_at_the_next_start(volumes: Volumes, shelf: FullShelf, folder: Path):
    volume, kept = await volumes.create("data"), await volumes.create("kept")
    (folder / volume.volume_id / "file").write_text("x")
    (folder / volume.volume_id).rename(folder / f".deleted-{volume.volume_id}")
    after = Volumes(shelf, folder, ManualClock())
    await after.open()
    await after.close()
    assert [one.name for one in after.all()] == ["kept"]
    assert [path.name for path in folder.iterdir()] == [kept.volume_id]


async def test_a_start_removes_nothing_it_does_not_know(volumes: Volumes, folder: Path, shelf: FullShelf):
    volume = await volumes.create("data")
    (folder / "vunknown").mkdir()
    (folder / "vunknown" / "work").write_text("of months")
    (folder / "vhalfmade").mkdir()
    await volumes.open()
    assert sorted(path.name for path in folder.iterdir()) == sorted([volume.volume_id, "vunknown"])


async def test_a_lost_folder_comes_back_empty(volumes: Volumes, folder: Path):
    volume = await volumes.create("data")
    (folder / volume.volume_id).rmdir()
    await volumes.open()
    assert volumes.content(volume.volume_id, volume.token).stat("/").mode == 0o777
