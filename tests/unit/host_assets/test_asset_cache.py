"""Assets appear whole or not at all, damage is noticed, one builder at a time."""

import json
import os
import threading
from pathlib import Path

import pytest

from agentenv.core.errors import DeadlineExceeded, InvalidInput, StorageFull
from agentenv.host import asset_cache
from agentenv.host.asset_cache import AssetCache, digest_of, file_lock, sha256_nonzero


class Builder:
    """Counts how often it builds."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, folder: Path) -> dict[str, object]:
        self.builds += 1
        (folder / "sub").mkdir()
        (folder / "sub/data").write_bytes(b"content")
        (folder / "link").symlink_to("sub/data")
        return {"version": "1"}


def test_made_once_then_found(tmp_path: Path) -> None:
    cache, build = AssetCache(tmp_path), Builder()
    made = cache.ensure("thing", build)
    assert made.facts == {"version": "1"}
    assert (made.path / "link").read_bytes() == b"content"
    assert list(made.checksums) == ["sub/data"]
    assert cache.ensure("thing", build) == made
    assert cache.find("thing", verify=True) == made
    assert build.builds == 1
    assert sorted(path.name for path in cache.folder.iterdir()) == [".thing.lock", "thing"]


def damage_content(path: Path) -> None:
    (path / "sub/data").write_bytes(b"CONTENT")


def damage_size(path: Path) -> None:
    (path / "sub/data").write_bytes(b"more content")


def damage_missing(path: Path) -> None:
    (path / "sub/data").unlink()


def damage_link(path: Path) -> None:
    (path / "link").unlink()
    (path / "link").symlink_to("/etc/passwd")


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def damage_format(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 0}))


@pytest.mark.parametrize("damage", [damage_content, damage_size, damage_missing, damage_link, damage_manifest, damage_format])
def test_damaged_asset_is_made_again(tmp_path: Path, damage) -> None:
    cache, build = AssetCache(tmp_path), Builder()
    damage(cache.ensure("thing", build).path)
    assert cache.find("thing") is None
    assert cache.candidates("thing") == []
    made = cache.ensure("thing", build)
    assert (made.path / "sub/data").read_bytes() == b"content"
    assert build.builds == 2


def test_change_that_keeps_size_and_time_is_found_by_verify_only(tmp_path: Path) -> None:
    cache, build = AssetCache(tmp_path), Builder()
    data = cache.ensure("thing", build).path / "sub/data"
    times = data.stat()
    data.write_bytes(b"CONTENT")
    os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.find("thing") is not None
    assert cache.find("thing", verify=True) is None
    cache.ensure("thing", build, verify=True)
    assert data.read_bytes() == b"content"


def test_copied_cache_with_new_times_still_counts(tmp_path: Path) -> None:
    cache, build = AssetCache(tmp_path), Builder()
    os.utime(cache.ensure("thing", build).path / "sub/data", ns=(1, 1))
    assert cache.ensure("thing", build).facts == {"version": "1"}
    assert build.builds == 1


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache = AssetCache(tmp_path)

    def fail(folder: Path) -> dict[str, object]:
        (folder / "half").write_bytes(b"half")
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError):
        cache.ensure("thing", fail)
    assert [path.name for path in cache.folder.iterdir()] == [".thing.lock"]


def test_leftover_of_a_crash_is_removed(tmp_path: Path) -> None:
    cache = AssetCache(tmp_path)
    (cache.folder / ".thing.new-abc/sub").mkdir(parents=True)
    cache.ensure("thing", Builder())
    assert sorted(path.name for path in cache.folder.iterdir()) == [".thing.lock", "thing"]


def test_full_disk_is_named(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, object]:
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageFull, match="thing"):
        AssetCache(tmp_path).ensure("thing", fail)


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b"])
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput):
        AssetCache(tmp_path).ensure(name, Builder())


def test_many_threads_one_build(tmp_path: Path) -> None:
    cache, build, found = AssetCache(tmp_path), Builder(), []
    threads = [threading.Thread(target=lambda: found.append(cache.ensure("thing", build))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 6
    assert build.builds == 1


def test_lock_gives_up_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asset_cache, "LOCK_POLL_S", 0.001)
    with (
        file_lock(tmp_path / "lock"),
        pytest.raises(DeadlineExceeded, match="another process"),
        file_lock(tmp_path / "lock", timeout_s=0.01),
    ):
        pytest.fail("locked twice")
    with file_lock(tmp_path / "lock", timeout_s=0.01):
        pass


def test_newest_candidate_first(tmp_path: Path) -> None:
    cache = AssetCache(tmp_path)
    for number, name in enumerate(["thing-old", "thing-new", "other"]):
        made = cache.ensure(name, Builder())
        os.utime(made.path / "manifest.json", (number, number))
    assert [asset.path.name for asset in cache.candidates("thing-")] == ["thing-new", "thing-old"]
    assert AssetCache(tmp_path / "none").candidates("thing-") == []


def test_digest_of_an_image_does_not_see_holes(tmp_path: Path) -> None:
    sparse, full, other = tmp_path / "sparse", tmp_path / "full", tmp_path / "other"
    with open(sparse, "wb") as out:
        out.seek(3 << 20)
        out.write(b"x")
        out.truncate(5 << 20)
    full.write_bytes(sparse.read_bytes())
    other.write_bytes(bytes(3 << 20) + b"y" + bytes((2 << 20) - 1))
    assert sparse.stat().st_blocks < full.stat().st_blocks
    assert sha256_nonzero(sparse) == sha256_nonzero(full)
    assert sha256_nonzero(sparse) != sha256_nonzero(other)


def test_digest_sees_where_the_data_is(tmp_path: Path) -> None:
    for name, offset in (("a", 0), ("b", 1 << 20)):
        with open(tmp_path / name, "wb") as out:
            out.seek(offset)
            out.write(b"x")
            out.truncate(4 << 20)
    assert sha256_nonzero(tmp_path / "a") != sha256_nonzero(tmp_path / "b")
    (tmp_path / "empty").write_bytes(b"")
    assert sha256_nonzero(tmp_path / "empty") == sha256_nonzero(tmp_path / "empty")


def test_disk_images_are_judged_by_what_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asset_cache, "DISK_IMAGE_BYTES", 1 << 20)

    def build(folder: Path) -> dict[str, object]:
        with open(folder / "root.ext4", "wb") as out:
            out.write(b"data")
            out.truncate(2 << 20)
        return {}

    cache = AssetCache(tmp_path)
    made = cache.ensure("image", build)
    assert made.checksums == {"root.ext4": sha256_nonzero(made.path / "root.ext4")}
    assert cache.find("image", verify=True)
    with open(made.path / "root.ext4", "r+b") as out:
        out.seek(1 << 20)
        out.write(b"x")
    assert cache.find("image", verify=True) is None


def test_digest_of_inputs_is_stable_and_told_apart() -> None:
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
    assert len(digest_of({})) == 16
