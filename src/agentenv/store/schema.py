"""The tables of the node's database. A row's `body` is the JSON of the noun; columns beside it serve queries.

`STEPS` is the whole history: step N takes a database of version N - 1 to version N, and a new file goes through all of
them. A step that a release has carried is never changed; a change is one more step at the end.
"""

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

STEPS: tuple[str, ...] = (_FIRST, _VOLUMES_AND_SECRETS)
VERSION = len(STEPS)
