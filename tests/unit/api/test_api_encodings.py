"""Property tests of what travels encoded: the metadata filter, page tokens, times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from urllib.parse import parse_qs, quote, urlencode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentenv.api.metadata_query import parse_metadata_filter
from agentenv.api.pagination import decode_token, encode_token, make_position, page_of, parse_position
from agentenv.api.timestamps import parse_rfc3339_us
from agentenv.core.errors import InvalidInput
from agentenv.core.model import Page

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
MIN_MS, MAX_MS = 0, 4_102_444_800_000


def encode_three_deep(metadata: dict[str, str]) -> str:
    """What the SDKs put on the wire."""
    return urlencode({"metadata": urlencode({quote(key): quote(value) for key, value in metadata.items()})})


def test_the_contracts_own_example():
    wire = encode_three_deep({"a b": "c&d"})
    assert wire == "metadata=a%252520b%3Dc%252526d"
    assert parse_metadata_filter(parse_qs(wire)["metadata"][0]) == {"a b": "c&d"}


@given(st.dictionaries(TEXT, TEXT, min_size=1, max_size=5))
@example({"a=b": "c&d", "100%": "+ +", "": ""})
@example({"ключ": "значение\0\n"})
def test_metadata_round_trip(metadata: dict[str, str]):
    assert parse_metadata_filter(parse_qs(encode_three_deep(metadata))["metadata"][0]) == metadata


@given(TEXT)
def test_any_metadata_text_is_parsed_or_refused(text: str):
    try:
        parsed = parse_metadata_filter(text)
    except InvalidInput as refusal:
        parsed, reason = None, refusal.message
    else:
        reason = ""
    assert reason.startswith("metadata: ") if parsed is None else bool(parsed) == bool(text)


@pytest.mark.parametrize("text", ["novalue", "a=b=c", "a%3Db%3Dc", "a=b&", "a=%ZZ", "a=%2", "%FF=x", "a=%25FF", "a=1&a=2", "&"])
def test_malformed_metadata(text: str):
    with pytest.raises(InvalidInput, match="metadata"):
        parse_metadata_filter(text)


def test_no_metadata_is_no_filter():
    assert parse_metadata_filter("") == {}


@given(st.integers(MIN_MS, MAX_MS), st.from_regex(r"[a-z0-9]{1,64}", fullmatch=True), st.booleans())
def test_token_round_trip(at_ms: int, item_id: str, ascending: bool):
    token = encode_token(make_position(at_ms, item_id), ascending=ascending)
    assert set(token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    position, was_ascending = decode_token(token)
    assert (parse_position(position), was_ascending) == ((at_ms, item_id), ascending)
    assert page_of(7, token, None) == Page(limit=7, after=position, ascending=ascending)


@given(TEXT)
@example("A" * 600)
@example("====")
@example("AA==")
def test_foreign_tokens_are_refused_or_printable(token: str):
    try:
        position, _ = decode_token(token)
        reason = ""
    except InvalidInput as refusal:
        position, reason = "", refusal.message
    assert reason.startswith("nextToken") if not position else position.isprintable()


@pytest.mark.parametrize("position", ["", "x", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z__", "2026-13-01T00:00:00Z__a", "__a"])
def test_foreign_positions(position: str):
    with pytest.raises(InvalidInput, match="nextToken"):
        parse_position(position)


def test_the_order_must_be_the_tokens():
    token = encode_token(make_position(1, "a"), ascending=True)
    assert page_of(1, token, "asc").ascending
    with pytest.raises(InvalidInput, match="order"):
        page_of(1, token, "desc")


@given(st.datetimes(datetime(1970, 1, 2), datetime(2100, 1, 1)), st.integers(-23 * 60, 23 * 60))
def test_times_round_trip(naive: datetime, offset_minutes: int):
    at = naive.replace(tzinfo=timezone(timedelta(minutes=offset_minutes)))
    expected = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert parse_rfc3339_us(at.isoformat()) == expected


def test_nanoseconds_are_cut():
    assert parse_rfc3339_us("1970-01-01T00:00:01.123456789Z") == 1_123_456


@pytest.mark.parametrize(
    "text", ["", "now", "2026-01-01", "2026-01-01T00:00:00", "2026-02-30T00:00:00Z", "2026-01-01T25:00:00Z", "2026-01-01T00:00:00+24:00"]
)
def test_other_times_are_refused(text: str):
    with pytest.raises(ValueError):
        parse_rfc3339_us(text)
