"""The tables of the node's database, by version. A row's `body` is the JSON of the noun; columns beside it serve queries."""

VERSION = 1

CREATE = """
CREATE TABLE snapshots (snapshot_id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE templates (template_id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, body TEXT NOT NULL) STRICT;
CREATE TABLE sandboxes (sandbox_id TEXT PRIMARY KEY, state TEXT NOT NULL, updated_at_ms INTEGER NOT NULL, body TEXT NOT NULL) STRICT;
CREATE TABLE events (
    sandbox_id TEXT NOT NULL, timestamp_ms INTEGER NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE INDEX events_by_sandbox ON events (sandbox_id, timestamp_ms);
"""
