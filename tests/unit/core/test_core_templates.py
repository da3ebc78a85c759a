"""Names of templates, and what must hold between a template's builds and tags after every change."""

from __future__ import annotations

import random

import pytest

from agentenv.core import ids, templates
from agentenv.core.errors import InvalidInput, LimitReached, NotFound
from agentenv.core.model import Build, CreateRequest, Machine, Template, new_sandbox
from agentenv.core.references import Reference, check_tag, parse_new_name, parse_reference

MACHINE = Machine(1, 512, 8192)
UUID = "6b5a0a06-9c2c-4b5e-8a43-0e5f5b1f8f6b"


def build(at_ms: int = 1, **fields: object) -> Build:
    return Build(ids.new_build_id(), ids.new_snapshot_id(), MACHINE, "0.6", at_ms, **fields)  # type: ignore[arg-type]


def template(*tags: str) -> Template:
    return templates.first(build(), ("mine",), "built", tags or ("default",), 1)


@pytest.mark.parametrize(
    ("text", "name", "tag"),
    [
        ("base", "base", None),
        ("  Base \n", "base", None),
        ("base:V1.0", "base", "v1.0"),
        ("local/base", "base", None),
        ("LOCAL/my_base-2:a.b-c_d", "my_base-2", "a.b-c_d"),
        (f"base:{UUID}", "base", UUID),
        ("x" * 128 + ":" + "y" * 128, "x" * 128, "y" * 128),
    ],
)
def test_names(text: str, name: str, tag: str | None):
    assert parse_reference(text) == Reference(name, tag)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ":",
        ":v1",
        "base:",
        "/base",
        "local/",
        "a/b/c",
        "a:b:c",
        "bä",
        "a b",
        "a.b",
        "base:v 1",
        "base\0",
        "x" * 129,
        "b:" + "y" * 129,
    ],
)
def test_what_is_no_name_is_refused_by_the_field(text: str):
    with pytest.raises(InvalidInput, match=r"^target: "):
        parse_reference(text, "target")
    with pytest.raises(InvalidInput, match=r"^name: "):
        parse_new_name(text)


def test_what_is_in_another_namespace_is_not_here_and_cannot_be_made_here():
    with pytest.raises(NotFound):
        parse_reference("team/base:v1")
    with pytest.raises(InvalidInput, match="not yours"):
        parse_new_name("team/base:v1")
    assert parse_new_name("local/base:v1") == Reference("base", "v1")


def test_a_tag_is_never_taken_for_a_build():
    for text in (UUID, UUID.upper()):
        with pytest.raises(InvalidInput, match="build id"):
            check_tag(text)
        with pytest.raises(InvalidInput, match="build id"):
            parse_new_name(f"mine:{text}")
    assert check_tag(" V1.0 ") == "v1.0"
    assert check_tag(UUID.replace("-", "")) == UUID.replace("-", "")
    for text in ("", "a/b", "a:b", "a b"):
        with pytest.raises(InvalidInput):
            check_tag(text)


def test_a_template_is_found_by_id_and_alias_and_its_builds_by_tag_and_id():
    one, other = template(), templates.first(build(), (), "snapshot", ("v1",), 1)
    for reference in ("mine", one.template_id):
        assert templates.find([other, one], Reference(reference)) is one
    assert templates.find([other, one], Reference(other.template_id)) is other
    with pytest.raises(NotFound, match="template 'none' not found"):
        templates.find([other, one], Reference("none"))
    assert templates.build_of(one, None) == templates.build_of(one, "default") == templates.build_of(one, one.builds[0].build_id)
    with pytest.raises(NotFound, match="no tag 'v2'"):
        templates.build_of(one, "v2")
    with pytest.raises(NotFound, match="no tag 'default'"):
        templates.build_of(other, None)
    assert (one.name, other.name) == ("mine", other.template_id)
    assert templates.snapshot_name(one, "v1") == "local/mine:v1"
    assert templates.snapshot_name(other, "v1") == f"{other.template_id}:v1"


@pytest.mark.parametrize(
    ("name", "hint"), [("code-interpreter-v1", "`aenv up --template code-interpreter-v1`"), ("other", "`aenv templates`")]
)
def test_a_template_that_is_not_there_says_how_to_get_it(name: str, hint: str):
    with pytest.raises(NotFound, match=f"template '{name}' not found") as refused:
        templates.find([], parse_reference(name))
    assert hint in refused.value.hint


def test_a_build_goes_with_its_last_tag():
    first, second = build(1), build(2)
    one = templates.with_build(templates.first(first, ("mine",), "built", ("default", "v1"), 1), second, ("default",), 2)
    assert one.builds == (second, first)
    assert [(tag.tag, tag.build_id) for tag in one.tags] == [("default", second.build_id), ("v1", first.build_id)]
    assert [(tag.tag, tag.build_id) for tag in one.history] == [("default", first.build_id)]
    moved = templates.with_tags(one, second, ("v1",), 3)
    assert moved.builds == (second,)
    assert (moved.build_count, moved.updated_at_ms, moved.created_at_ms) == (2, 3, 1)
    assert templates.without_tags(one, ["v1"], 4).builds == (second,)


def test_default_stays_until_the_end_and_a_template_without_tags_has_nothing():
    one = template("default", "v1")
    with pytest.raises(InvalidInput, match="'default' cannot be removed"):
        templates.without_tags(one, ["v1", "default"], 2)
    with pytest.raises(NotFound, match="'v2'"):
        templates.without_tags(one, ["v1", "v2"], 2)
    for ended in (templates.without(one, ["default", "v1"], 2), templates.without_tags(template("v1"), ["v1"], 2)):
        assert (ended.builds, ended.tags) == ((), ())


def test_tags_are_bounded_and_so_is_their_history():
    one = template()
    with pytest.raises(LimitReached):
        templates.with_tags(one, one.builds[0], [f"v{n}" for n in range(templates.TAGS_MAX)], 2)
    full = templates.with_tags(one, one.builds[0], [f"v{n}" for n in range(templates.TAGS_MAX - 1)], 2)
    for n in range(300):
        full = templates.with_build(full, build(n), ("default", "v5"), n)
    assert len(full.tags) == templates.TAGS_MAX
    assert len(full.history) == templates._HISTORY_MAX
    assert len(full.builds) == 2


@pytest.mark.parametrize("seed", range(20))
def test_what_must_hold_holds_after_any_changes(seed: int):
    rng = random.Random(seed)
    names = ["default", "a", "b", "c"]
    one = template()
    for at_ms in range(2, 60):
        if not one.builds:
            return
        tags = rng.sample(names, rng.randint(1, 3))
        pick = rng.random()
        if pick < 0.4:
            one = templates.with_build(one, build(at_ms), tags, at_ms)
        elif pick < 0.7:
            one = templates.with_tags(one, rng.choice(one.builds), tags, at_ms)
        else:
            present = [tag.tag for tag in one.tags]
            one = templates.without(one, rng.sample(present, rng.randint(1, len(present))), at_ms)
        assert {tag.build_id for tag in one.tags} == {b.build_id for b in one.builds}
        assert len({tag.tag for tag in one.tags}) == len(one.tags)
        assert [b.created_at_ms for b in one.builds] == sorted((b.created_at_ms for b in one.builds), reverse=True)
        assert "default" not in [tag.tag for tag in one.tags][1:]
        assert {tag.tag for tag in one.history} <= set(names)


def test_a_new_sandbox_has_what_its_build_brings_and_the_caller_wins():
    one = templates.first(build(env_vars={"A": "build", "B": "build"}), (), "snapshot", ("default",), 1)
    request = CreateRequest("x", 60, on_timeout="pause", allow_public_traffic=False, metadata={"m": "1"}, env_vars={"B": "caller"})
    first, second = (new_sandbox(request, one, one.builds[0], 1000) for _ in range(2))
    assert first.env_vars == {"A": "build", "B": "caller"}
    assert (first.template_name, first.template_id, first.build_id) == (one.template_id, one.template_id, one.builds[0].build_id)
    assert (first.machine, first.end_at_ms, first.on_timeout, first.snapshot_id) == (MACHINE, 61_000, "pause", one.builds[0].snapshot_id)
    secrets = [secret for s in (first, second) for secret in (s.sandbox_id, s.access_token, s.traffic_token)]
    assert None not in secrets
    assert len(set(secrets)) == 6
