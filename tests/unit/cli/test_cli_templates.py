"""Templates and snapshots: lists, the last question before a change, and what stays."""

import json
import re
from dataclasses import replace

import pytest
from aenv_runner import Screen

from agentenv.testing.fake_orchestrator import make_template


@pytest.fixture
def screen(server):
    screens = []

    def make(*arguments):
        screens.append(Screen(server.environment, *arguments))
        return screens[-1]

    yield make
    for one in screens:
        one.close()


@pytest.fixture
def add(server):
    def add(*added):
        for name in added:
            template = replace(make_template(name), kind="built")
            server.orchestrator._book._by_id[template.template_id] = template

    return add


def names(aenv):
    return [name for item in json.loads(aenv("template", "list", "--json").stdout) for name in item["names"]]


def snapshots(aenv, *arguments):
    return [item["snapshotID"] for item in json.loads(aenv("snapshot", "list", "--json", *arguments).stdout)]


def test_a_snapshot_becomes_a_template(aenv, server):
    source = aenv.start()
    made = aenv("snapshot", "create", source[:9], "--name", "kept")
    assert (made.exit_code, made.stderr) == (0, "")
    snapshot_id = made.stdout.strip()
    assert aenv.start(snapshot_id) != source
    assert aenv.start("kept")
    assert server.orchestrator.peek(source).state == "running"
    assert snapshots(aenv) == [snapshot_id]
    shown = aenv("snapshot", "list").stdout.splitlines()
    assert shown[0].split() == ["ID", "NAMES"]
    assert shown[1].startswith(snapshot_id)


@pytest.mark.parametrize("words", [("snapshot",), ("snap",), ("sandbox", "snapshot"), ("sbx", "snap")])
def test_snapshots_by_every_name(aenv, words):
    source = aenv.start()
    made = json.loads(aenv(*words, "cr", source, "-n", "one", "--json").stdout)
    assert made.keys() == {"snapshotID", "names"}
    listed = json.loads(aenv(*words, "ls", "--format", "json").stdout)
    assert listed == [made]
    assert aenv(*words, "dl", made["snapshotID"]).stdout.strip() == made["snapshotID"]
    assert json.loads(aenv(*words, "list", "-f", "json").stdout) == []


def test_snapshots_of_a_sandbox_of_a_name_and_the_first_few(aenv):
    first, second = aenv.start(), aenv.start()
    of_first = [aenv("snapshot", "create", first, "-n", name).stdout.strip() for name in ("a", "b")]
    of_second = aenv("snapshot", "create", second).stdout.strip()
    assert sorted(snapshots(aenv, first)) == sorted(of_first)
    assert snapshots(aenv, second) == [of_second]
    assert snapshots(aenv, "-n", "b") == of_first[1:]
    assert snapshots(aenv, "-n", "c") == []
    limited = aenv("snapshot", "list", "-l", "2")
    assert len(limited.stdout.splitlines()) == 3
    assert "there are more than 2" in limited.stderr
    assert len(snapshots(aenv, "-l", "0")) == 3


def test_snapshots_that_are_not_there(aenv):
    assert aenv("snapshot", "create", "i" + "0" * 20).exit_code == 3
    assert "no snapshots; `aenv snapshot create ID`" in aenv("snapshot", "list").stderr
    assert aenv("snapshot", "list", "-n", "x").stderr == "no snapshots match\n"
    kept = aenv("snapshot", "create", aenv.start()).stdout.strip()
    result = aenv("snapshot", "delete", "nothing", kept)
    assert (result.exit_code, result.stdout.strip()) == (3, kept)
    assert "nothing" in result.stderr


def test_a_snapshot_in_use_stays(aenv):
    kept = aenv("snapshot", "create", aenv.start(), "-n", "kept").stdout.strip()
    child = aenv.start("kept")
    result = aenv("snapshot", "delete", kept)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert snapshots(aenv) == [kept]
    aenv("kill", child)
    assert aenv("snapshot", "delete", kept).exit_code == 0


@pytest.mark.parametrize("word", ["delete", "dl", "rm"])
def test_templates_are_deleted(aenv, add, word):
    add("one", "two")
    result = aenv("tpl", word, "one", "two", "--yes", "-t", "any-project")
    assert (result.exit_code, result.stdout.split()) == (0, ["one", "two"])
    assert names(aenv) == ["base"]


def test_the_nodes_own_template_stays(aenv):
    result = aenv("template", "delete", "base", "-y")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "base" in result.stderr
    assert names(aenv) == ["base"]


def test_templates_are_published_and_back(aenv, add):
    add("one")

    def public():
        return {name: item["public"] for item in json.loads(aenv("templates", "--json").stdout) for name in item["aliases"]}

    before = public()
    assert aenv("template", "publish", "one", "-y").stdout == "one\n"
    assert public() == {**before, "one": True}
    assert aenv("template", "unpublish", "one", "-y").stdout == "one\n"
    assert public() == {**before, "one": False}
    assert aenv("template", "pb", "none-such", "-y").exit_code == 3


@pytest.mark.parametrize("verb", ["delete", "publish", "unpublish"])
@pytest.mark.parametrize("arguments", [["base"], ["--select"], [], ["base", "--select"]])
def test_nothing_changes_when_nobody_can_be_asked(aenv, verb, arguments):
    result = aenv("template", verb, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "hint: " in result.stderr
    assert names(aenv) == ["base"]


def test_a_person_is_asked(aenv, add, screen):
    add("one")
    no = screen("template", "delete", "one")
    no.wait_for(r"Delete one\? \[y/N\]")
    no.type("n\r")
    assert no.end()[0] == 1
    assert "error: nothing was changed" in re.sub(r"\x1b\[[0-9;]*m", "", no.shown)
    assert len(names(aenv)) == 2
    yes = screen("template", "delete", "one")
    yes.wait_for(r"\[y/N\]")
    yes.type("y\r")
    assert yes.end()[0] == 0
    assert names(aenv) == ["base"]


def test_templates_are_picked_from_a_list(aenv, add, screen):
    add("one", "two")
    picking = screen("template", "delete", "-s", "-y")
    number = picking.wait_for(r"(\d)  \S*one\S*\r\n")[1]
    picking.wait_for("Numbers")
    picking.type(f"{number}\r")
    assert picking.end()[0] == 0
    assert [name for name in names(aenv) if "one" in name] == []
    assert any("two" in name for name in names(aenv))
    for answer in ("9", "x", "0", "1 9"):
        wrong = screen("template", "delete", "-s", "-y")
        wrong.wait_for("Numbers")
        wrong.type(f"{answer}\r")
        assert wrong.end()[0] == 2
