"""`aenv checkpoint` and `aenv rollback`: what they print, their JSON, their exit codes."""

import json

import pytest


def test_taken_listed_gone_back_to_and_deleted(aenv, server):
    sandbox_id = aenv.start()
    first = aenv("checkpoint", "create", sandbox_id, "--name", "clean")
    assert (first.exit_code, first.stderr) == (0, "")
    second = json.loads(aenv("cp", "cr", sandbox_id[:8], "--no-memory", "--json").stdout)
    assert (second["parentID"], second["memory"]) == (first.stdout.strip(), False)
    rows = aenv("checkpoint", "list", sandbox_id).stdout.splitlines()[1:]
    assert [row.split() for row in rows] == [
        [first.stdout.strip(), "clean", "memory", "and", "disk", rows[0].split()[-1]],
        ["*", second["checkpointID"], "-", "disk", rows[1].split()[-1]],
    ]
    assert rows[1].index(second["checkpointID"]) == rows[0].index(first.stdout.strip()) + 2, "a child stands to the right of its parent"
    back = aenv("rollback", sandbox_id[:8], "clean")
    assert (back.exit_code, back.stdout.strip()) == (0, sandbox_id)
    assert server.orchestrator.peek(sandbox_id).checkpoint_id == first.stdout.strip()
    assert [item["current"] for item in json.loads(aenv("checkpoint", "ls", sandbox_id, "--json").stdout)] == [True, False]
    gone = aenv("checkpoint", "delete", sandbox_id, "clean", second["checkpointID"])
    assert gone.stdout.split() == ["clean", second["checkpointID"]]
    empty = aenv("checkpoint", "list", sandbox_id)
    assert (empty.stdout, "checkpoint create" in empty.stderr) == ("", True)


@pytest.mark.parametrize(("words", "exit_code"), [(("rollback",), 2), (("rollback", "x"), 3), (("checkpoint", "delete", "x"), 3)])
def test_errors_say_what_to_do(aenv, words, exit_code):
    sandbox_id = aenv.start()
    verb, rest = [word for word in words if word != "x"], [word for word in words if word == "x"]
    result = aenv(*verb, sandbox_id, *rest)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert "no checkpoint" in result.stderr
    assert "hint:" in result.stderr
