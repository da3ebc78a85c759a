"""Keys: where they may stand in a request, and the file they come from."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from agentenv.api.auth import KeyRing
from agentenv.core.errors import InvalidInput

OTHER = "e2b_" + "a" * 40


@pytest.mark.parametrize("name", ["X-API-KEY", "x-api-key"])
async def test_key_header(name: str, stranger: httpx.AsyncClient, key: str):
    assert (await stranger.get("/templates", headers={name: key})).status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_bearer(scheme: str, stranger: httpx.AsyncClient, key: str):
    assert (await stranger.get("/templates", headers={"Authorization": f"{scheme} {key}"})).status_code == 200


async def test_a_wrong_key_is_not_rescued_by_a_right_bearer(stranger: httpx.AsyncClient, key: str):
    response = await stranger.get("/templates", headers={"X-API-KEY": OTHER, "Authorization": f"Bearer {key}"})
    assert response.status_code == 401


@pytest.mark.parametrize("header", ["Basic {key}", "{key}", "Bearer", "Bearer  "])
async def test_other_schemes_are_no_key(header: str, stranger: httpx.AsyncClient, key: str):
    assert (await stranger.get("/templates", headers={"Authorization": header.format(key=key)})).status_code == 401


@pytest.mark.parametrize("near", [lambda key: key[:-1], lambda key: key + "0", lambda key: key.upper(), lambda key: "é" + key])
def test_near_misses(near, key: str):
    ring = KeyRing([key])
    assert ring.caller(key) is not None
    assert ring.caller(near(key)) is None


async def test_a_key_of_bytes_beyond_ascii_is_just_wrong(stranger: httpx.AsyncClient):
    response = await stranger.get("/templates", headers={b"X-API-KEY": b"e2b_\xff\xfe" + b"0" * 38})
    assert response.status_code == 401


def test_callers_are_named_without_their_keys(key: str):
    ring = KeyRing([key, OTHER])
    assert ring.caller(key) != ring.caller(OTHER)
    assert key not in str(ring.caller(key))


def test_key_file(tmp_path: Path, key: str):
    file = tmp_path / "keys"
    file.write_text(f"# people\n\n{key}\n  {OTHER}  \n")
    ring = KeyRing.from_file(file)
    assert ring.caller(key)
    assert ring.caller(OTHER)
    assert ring.caller("# people") is None


@pytest.mark.parametrize("content", ["", "# nobody\n", "short\n", "a key with spaces in it\n", "e2b_" + "a" * 400, "e2b_ключключключ\n"])
def test_key_files_that_cannot_be_meant(content: str, tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(InvalidInput, match=str(file)):
        KeyRing.from_file(file)


def test_missing_key_file(tmp_path: Path):
    with pytest.raises(InvalidInput, match="cannot be read"):
        KeyRing.from_file(tmp_path / "none")


def test_key_file_is_followed(tmp_path: Path, key: str):
    file = tmp_path / "keys"
    file.write_text(key + "\n")
    ring = KeyRing.from_file(file)
    _replace(file, f"{OTHER}\n")
    assert ring.caller(OTHER)
    assert ring.caller(key) is None
    _replace(file, "broken\n")
    assert ring.caller(OTHER), "a broken file must not lock everybody out"
    file.unlink()
    assert ring.caller(OTHER)
    _replace(file, f"{key}\n")
    assert ring.caller(key)


def _replace(file: Path, content: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(content)
    new.replace(file)
