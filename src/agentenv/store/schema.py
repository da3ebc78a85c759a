"""The tables of the node's database. A row's `body` is the JSON of the noun; columns beside it serve queries, and what changes too
often to write the whole body.

`STEPS` is the whole history: step N takes a database of version N - 1 to version N, and a new file goes through all of
them. A step that a release has carried is never changed; a change is one more step at the end. Steps know the JSON of their
time, not today's model.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence

Step = str | Callable[[sqlite3.Connection], None]

_FIRST = """
CREATE TABLE snapshots (snapshot_id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE templates (template_id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, body TEXT NOT NULL) STRICT;
CREATE TABLE sandboxes (sandbox_id TEXT PRIMARY KEY, state TEXT NOT NULL, updated_at_ms INTEGER NOT NULL, body TEXT NOT NULL) STRICT;
CREATE TABLE events (
    sandbox_id TEXT NOT NULL, timestamp_ms INTEGER NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE INDEX events_by_sandbox ON events (sandbox_id, timestamp_ms);
"""

_VOLUMES_AND_SECRETS = """
CREATE TABLE volumes (id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE secrets (id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
"""


def _templates_with_builds(db: sqlite3.Connection) -> None:
    """A template was one snapshot under one name; it is builds under tags now, with its use counted in columns of their own."""
    rows = [json.loads(body) for (body,) in db.execute("SELECT body FROM templates")]
    db.execute("DROP TABLE templates")
    db.execute(
        "CREATE TABLE templates (template_id TEXT PRIMARY KEY, spawn_count INTEGER NOT NULL, last_spawned_at_ms INTEGER, "
        "body TEXT NOT NULL) STRICT"
    )
    for row in rows:
        body = json.dumps(_with_builds(row))
        db.execute("INSERT INTO templates VALUES (?, ?, NULL, ?)", (row["template_id"], row["spawn_count"], body))


def _with_builds(row: dict[str, object]) -> dict[str, object]:
    build = {name: row[name] for name in ("build_id", "snapshot_id", "machine", "envd_version")} | {"created_at_ms": row["updated_at_ms"]}
    tag = {
        "tag": "default",
        "build_id": row["build_id"],
        "assignment_id": row["build_id"],  # any UUID will do: nobody has seen an assignment of this build yet
        "assigned_at_ms": row["updated_at_ms"],
        "build_created_at_ms": row["updated_at_ms"],
    }
    kept = {name: row[name] for name in ("template_id", "created_at_ms", "updated_at_ms")}
    return kept | {"aliases": [row["name"]], "kind": "builtin", "builds": [build], "tags": [tag]}


_TEMPLATE_BUILDS = """
CREATE TABLE builds (id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE cached_steps (id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
"""

_IMAGES = "CREATE TABLE images (id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;"
_CHECKPOINTS = "CREATE TABLE checkpoints (id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;"

STEPS: tuple[Step, ...] = (_FIRST, _VOLUMES_AND_SECRETS, _templates_with_builds, _TEMPLATE_BUILDS, _IMAGES, _CHECKPOINTS)
VERSION = len(STEPS)


def version(db: sqlite3.Connection) -> int:
    """The version of the file; 0 when it is new."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def upgrade(db: sqlite3.Connection, steps: Sequence[Step] | None = None) -> None:
    """Bring the file through `steps` (all, when None), each in a transaction of its own. sqlite3 errors pass through."""
    wanted = STEPS if steps is None else steps
    done = version(db)
    for number, step in enumerate(wanted[done:], start=done + 1):
        try:
            if isinstance(step, str):
                db.executescript(f"BEGIN; {step} PRAGMA user_version = {number}; COMMIT;")
            else:
                db.execute("BEGIN IMMEDIATE")
                step(db)
                db.execute(f"PRAGMA user_version = {number}")
                db.execute("COMMIT")
        except BaseException:
            db.rollback()
            raise
