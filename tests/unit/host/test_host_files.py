from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.core.errors import Conflict, StorageFull
from agentenv.host import files


def test_a_file_is_replaced_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    files.write_atomic(path, b"one", 0o600)
    files.write_atomic(path, b"two", 0o640)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"two", 0o640)
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, b"old")

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_target_of_a_link_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    files.write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_bytes() == b"kept"
    assert not (tmp_path / "link").is_symlink()


def test_free_space_is_asked_of_the_folder(tmp_path: Path) -> None:
    files.require_free(tmp_path, 1, "a test")
    with pytest.raises(StorageFull, match=r"a test: \d+ MiB needed, \d+ MiB free"):
        files.require_free(tmp_path, 1 << 60, "a test")


def test_a_lock_is_for_one_at_a_time(tmp_path: Path) -> None:
    def take_twice() -> None:
        with files.locked(tmp_path / "lock", "testing"), files.locked(tmp_path / "lock", "testing"):
            pytest.fail("two hold it")

    with pytest.raises(Conflict, match="testing"):
        take_twice()
    with files.locked(tmp_path / "lock", "testing"):
        pass


def test_a_file_system_is_written_out_by_any_of_its_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    files.write_out(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.write_out(tmp_path / "nothing")
    with pytest.raises(NotADirectoryError):
        files.write_out(tmp_path / "file")


def test_what_a_confined_program_made_is_taken_once(tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / "taken"
    made.write_bytes(b"state")
    assert files.take(made, path, 5) == 5
    assert (path.read_bytes(), made.exists()) == (b"state", False)
    made.write_bytes(b"again")
    with pytest.raises(FileExistsError):
        files.take(made, path, 5)
    assert path.read_bytes() == b"state"


@pytest.mark.parametrize("trick", ["link", "dangling", "fifo", "folder", "too large", "nothing"])
def test_a_trick_of_a_confined_program_is_not_taken(tmp_path: Path, trick: str) -> None:
    made, path, secret = tmp_path / "made", tmp_path / "taken", tmp_path / "secret"
    secret.write_bytes(b"key")
    match trick:
        case "link":
            made.symlink_to(secret)
        case "dangling":
            made.symlink_to(tmp_path / "nowhere")
        case "fifo":
            os.mkfifo(made)
        case "folder":
            made.mkdir()
        case "too large":
            made.write_bytes(b"x" * 101)
    with pytest.raises(OSError, match=r"\w"):
        files.take(made, path, 100)
    assert not path.exists()
    assert secret.read_bytes() == b"key"


def test_a_folder_of_ones_own_is_closed_to_others(tmp_path: Path) -> None:
    open_before = tmp_path / "was-there"
    open_before.mkdir(mode=0o755)
    for folder in (open_before, tmp_path / "new" / "one"):
        files.own_folder(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    files.own_folder(open_before, 0o711)
    assert open_before.stat().st_mode & 0o777 == 0o711
