from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.core import ids
from agentenv.core.clock import rfc3339
from agentenv.core.paths import NodePaths

FORMATS: list[tuple[Callable[[], str], str]] = [
    (ids.new_sandbox_id, r"i[a-z0-9]{20}"),
    (ids.new_template_id, r"[a-z0-9]{20}"),
    (ids.new_snapshot_id, r"s[a-z0-9]{20}"),
    (ids.new_layer_id, r"[0-9a-f]{32}"),
    (ids.new_build_id, r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
    (ids.new_run_id, r"[a-z0-9]{8}"),
    (ids.new_token, r"[0-9a-f]{64}"),
    (ids.new_api_key, r"e2b_[0-9a-f]{40}"),
]


@pytest.mark.parametrize(("make", "pattern"), FORMATS, ids=lambda value: getattr(value, "__name__", None))
def test_formats_and_uniqueness(make: Callable[[], str], pattern: str) -> None:
    made = {make() for _ in range(500)}
    assert len(made) == 500
    assert all(re.fullmatch(pattern, value) for value in made)


def test_sandbox_ids_fit_a_host_label_with_a_port() -> None:
    assert ids.SANDBOX_ID.match(ids.new_sandbox_id())
    assert len(f"65535-{ids.new_sandbox_id()}") <= 63
    assert "-" not in ids.new_sandbox_id()


def test_secrets_compare_by_value() -> None:
    assert ids.same_secret("ä" * 3, "ä" * 3)
    assert not ids.same_secret("a", "b")
    assert not ids.same_secret("", "a")


def test_entropy_has_the_asked_size_and_differs() -> None:
    assert len(ids.new_entropy()) == 64
    assert ids.new_entropy(16) != ids.new_entropy(16)


def test_times_are_utc_with_milliseconds() -> None:
    assert rfc3339(0) == "1970-01-01T00:00:00.000Z"
    assert rfc3339(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"


def test_nodes_with_other_homes_have_other_tags() -> None:
    tags = {NodePaths(Path(f"/srv/node{number}"), Path("/run")).tag for number in range(50)}
    assert len(tags) == 50
    assert all(re.fullmatch(r"[0-9a-f]{4}", tag) for tag in tags)
