"""Secrets at rest: encrypted, bound to their place, versioned, within limits."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core.errors import Conflict, DataCorrupt, InvalidInput, NotFound
from agentenv.core.model import Secret
from agentenv.secret.vault import Vault
from agentenv.store.sqlite import Store
from agentenv.testing.fake_orchestrator import ManualClock
from agentenv.testing.fake_store import MemoryShelf

VALUE = "correct horse battery staple"


@pytest.fixture
def shelf() -> MemoryShelf[Secret]:
    return MemoryShelf("secret_id")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "secret-key"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def vault(shelf: MemoryShelf[Secret], key_file: Path, clock: ManualClock) -> Vault:
    return Vault(shelf, key_file, clock)


async def test_a_value_goes_in_and_only_reveal_gives_it_back(
    vault: Vault, key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    secret = await vault.create("Api-Key", VALUE, {"team": "a"})
    assert (secret.name, secret.version, secret.metadata) == ("api-key", 1, {"team": "a"})
    assert VALUE not in f"{secret!r}{secret.sealed}{caplog.text}"
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert await vault.reveal("API-KEY") == await vault.reveal(secret.secret_id) == VALUE


async def test_versions_count_up_and_metadata_stays_unless_given(vault: Vault, clock: ManualClock):
    first = await vault.create("k", "one", {"a": "1"})
    clock.advance_ms(5)
    second = await vault.update("k", "two", None)
    third = await vault.update(first.secret_id, "three", {})
    assert [one.version for one in (first, second, third)] == [1, 2, 3]
    assert (second.metadata, third.metadata) == ({"a": "1"}, {})
    assert (third.created_at_ms, third.updated_at_ms) == (first.created_at_ms, first.created_at_ms + 5)
    assert await vault.reveal("k") == "three"


async def test_names_are_unique_whatever_their_case(vault: Vault):
    secret = await vault.create("k", VALUE, {})
    with pytest.raises(Conflict):
        await vault.create("K", VALUE, {})
    await vault.delete("K")
    for attempt in (vault.delete("k"), vault.update("k", VALUE, None), vault.reveal(secret.secret_id)):
        with pytest.raises(NotFound):
            await attempt
    assert (await vault.create("k", VALUE, {})).secret_id != secret.secret_id


@pytest.mark.parametrize("name", ["", "a{b", "a}", "a\nb", "a\x7f", "a\x85", "sec_mine", "SEC_mine", "n" * 257, "ü" * 129])
async def test_impossible_names(vault: Vault, name: str):
    with pytest.raises(InvalidInput, match="name"):
        await vault.create(name, VALUE, {})


@pytest.mark.parametrize("name", ["n" * 256, "with space", "a/b", "ü", "second_"])
async def test_possible_names(vault: Vault, name: str):
    await vault.create(name, VALUE, {})
    assert vault.find(name).name == name


@pytest.mark.parametrize(
    ("metadata", "allowed"),
    [
        ({str(number): "" for number in range(32)}, True),
        ({str(number): "" for number in range(33)}, False),
        ({"k" * 128: "v" * 1024}, True),
        ({"k" * 129: ""}, False),
        ({"ü" * 65: ""}, False),
        ({"": "v"}, False),
        ({"k": "v" * 1025}, False),
        ({f"{number:04}": "v" * 1020 for number in range(8)}, True),
        ({f"{number:04}": "v" * 1020 for number in range(8)} | {"k": ""}, False),
    ],
)
async def test_limits_of_metadata(vault: Vault, metadata: dict[str, str], allowed: bool):
    if allowed:
        assert (await vault.create("k", VALUE, metadata)).metadata == metadata
        return
    with pytest.raises(InvalidInput, match="metadata"):
        await vault.create("k", VALUE, metadata)
    await vault.create("k", VALUE, {})
    with pytest.raises(InvalidInput, match="metadata"):
        await vault.update("k", VALUE, metadata)
    assert vault.find("k").version == 1


@pytest.mark.parametrize(
    ("value", "allowed"), [("v" * 8192, True), ("v" * 8193, False), ("", False), ("ü" * 4096, True), ("ü" * 4097, False)]
)
async def test_limits_of_values(vault: Vault, value: str, allowed: bool):
    if allowed:
        await vault.create("k", value, {})
        assert await vault.reveal("k") == value
        return
    with pytest.raises(InvalidInput, match="value"):
        await vault.create("k", value, {})


async def test_a_stored_value_cannot_pass_for_another(vault: Vault, shelf: MemoryShelf[Secret]):
    cheap, dear = await vault.create("cheap", "1", {}), await vault.create("dear", "2", {})
    for forged in (
        replace(cheap, sealed=dear.sealed),
        replace(cheap, version=2),
        replace(cheap, sealed="AAAA"),
        replace(cheap, sealed="%"),
    ):
        await shelf.put(forged)
        with pytest.raises(DataCorrupt, match="cheap"):
            await vault.reveal("cheap")


async def test_equal_values_look_different(vault: Vault):
    assert (await vault.create("a", VALUE, {})).sealed != (await vault.create("b", VALUE, {})).sealed


async def test_a_lost_key_is_not_replaced_while_secrets_need_it(vault: Vault, key_file: Path):
    await vault.create("k", VALUE, {})
    key_file.unlink()
    for attempt in (vault.reveal("k"), vault.create("l", VALUE, {}), vault.update("k", VALUE, None)):
        with pytest.raises(DataCorrupt, match="missing"):
            await attempt
    assert not key_file.exists()
    await vault.delete("k")
    await vault.create("l", VALUE, {})
    assert await vault.reveal("l") == VALUE


async def test_a_damaged_key_is_said_to_be(vault: Vault, key_file: Path):
    await vault.create("k", VALUE, {})
    key_file.write_bytes(b"short")
    with pytest.raises(DataCorrupt, match="5 bytes"):
        await vault.reveal("k")


async def test_secrets_survive_a_restart(tmp_path: Path, key_file: Path, clock: ManualClock):
    for version in (1, 2):
        store = Store(tmp_path / "node.db", clock)
        await store.open()
        vault = Vault(store.secrets, key_file, clock)
        secret = await (vault.create("k", VALUE, {"a": "b"}) if version == 1 else vault.update("k", VALUE + "2", None))
        assert secret.version == version
        await store.close()
    assert VALUE.encode() not in b"".join(path.read_bytes() for path in tmp_path.glob("node.db*"))
