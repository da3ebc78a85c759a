"""One table of the node's database, mirrored in memory: nouns that are put, looked up by id, and removed.

Invariant: when a call has returned, mirror and file agree. Writes of one id must not overlap: the caller sees to that.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Generic, Protocol, TypeVar

from pydantic import TypeAdapter

Noun = TypeVar("Noun")
Statement = tuple[str, tuple[Any, ...]]


class Shelf(Protocol[Noun]):
    """Nouns by id."""

    def get(self, noun_id: str) -> Noun | None:
        """The noun of that id, or None."""
        ...

    def all(self) -> list[Noun]:
        """Every noun, in the order they came."""
        ...

    async def put(self, noun: Noun) -> None:
        """Add it, or replace the one of the same id."""
        ...

    async def remove(self, noun_id: str) -> None:
        """Forget it. No error when it is gone."""
        ...


class TableShelf(Generic[Noun]):
    """A shelf in a table `(id, body)`; `execute` commits statements, then calls `mirror`."""

    def __init__(self, table: str, noun: type[Noun], id_field: str, execute: Callable[..., Awaitable[None]]) -> None:
        self._table = table
        self._adapter: TypeAdapter[Noun] = TypeAdapter(noun)
        self._id_field = id_field
        self._execute = execute
        self._nouns: dict[str, Noun] = {}

    def load(self, database: sqlite3.Connection) -> None:
        """Read the table. ValueError when a body is not what it should be."""
        rows = database.execute(f"SELECT id, body FROM {self._table} ORDER BY rowid")
        self._nouns = {noun_id: self._adapter.validate_json(body) for noun_id, body in rows}

    def get(self, noun_id: str) -> Noun | None:
        """The noun of that id, or None."""
        return self._nouns.get(noun_id)

    def all(self) -> list[Noun]:
        """Every noun, in the order they came."""
        return list(self._nouns.values())

    async def put(self, noun: Noun) -> None:
        """Add it, or replace the one of the same id."""
        noun_id = str(getattr(noun, self._id_field))
        upsert = f"INSERT INTO {self._table} VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET body = excluded.body"
        row = (noun_id, json.dumps(asdict(noun)))  # type: ignore[call-overload]
        await self._execute((upsert, row), mirror=lambda: self._nouns.update({noun_id: noun}))

    async def remove(self, noun_id: str) -> None:
        """Forget it. No error when it is gone."""
        await self._execute((f"DELETE FROM {self._table} WHERE id = ?", (noun_id,)), mirror=lambda: self._nouns.pop(noun_id, None))
