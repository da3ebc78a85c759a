"""Commands over sandboxes: what they print, their JSON, their exit codes."""

import asyncio
import json

import pytest

from agentenv.core.errors import Internal, LimitReached, StorageFull
from agentenv.core.lifecycle import State


def test_start_prints_the_id_alone_on_stdout(aenv, server):
    result = aenv("start", "--metadata", "run=7", "--env", "A=1=2", "--timeout", "60", "--on-timeout", "pause")
    sandbox = server.orchestrator.peek(result.stdout.strip())
    assert result.exit_code == 0
    assert result.stderr == ""
    assert (sandbox.metadata, sandbox.env_vars, sandbox.timeout_s, sandbox.on_timeout) == ({"run": "7"}, {"A": "1=2"}, 60, "pause")


def test_start_defaults_are_the_contracts(aenv, server):
    sandbox = server.orchestrator.peek(aenv.start())
    assert (sandbox.template_name, sandbox.timeout_s, sandbox.on_timeout) == ("base", 300, "kill")


def test_json_of_start_and_info_hold_no_token(aenv, server):
    made = json.loads(aenv("start", "--json").stdout)
    shown = aenv("info", made["sandboxID"], "--json").stdout
    token = server.orchestrator.peek(made["sandboxID"]).access_token
    assert token
    assert token not in json.dumps(made)
    assert token not in shown
    assert {"sandboxID", "state", "endAt", "cpuCount", "memoryMB"} <= json.loads(shown).keys()


def test_start_of_unknown_template(aenv):
    result = aenv("start", "nothing-like-it")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "nothing-like-it" in result.stderr
    assert "hint: " in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--env", "novalue"], ["--env", "=x"], ["--timeout", "0"], ["--on-timeout", "sleep"], ["--shell", "--json"]]
)
def test_start_refuses_wrong_arguments(aenv, arguments):
    result = aenv("start", *arguments)
    assert result.exit_code == 2
    assert "Try 'aenv start --help'" in result.stderr


def test_ls_shows_running_ones_and_says_what_it_hides(aenv):
    running, paused = aenv.start(), aenv.start()
    assert aenv("pause", paused).exit_code == 0
    result = aenv("ls")
    assert running in result.stdout
    assert paused not in result.stdout
    assert "1 paused sandbox is not shown" in result.stderr
    assert [item["sandboxID"] for item in json.loads(aenv("ls", "--json").stdout)] == [running]
    assert {item["sandboxID"] for item in json.loads(aenv("ls", "--all", "--json").stdout)} == {running, paused}
    assert [item["sandboxID"] for item in json.loads(aenv("ls", "--state", "paused", "--json").stdout)] == [paused]


def test_ls_without_sandboxes(aenv):
    result = aenv("ls")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "aenv start" in result.stderr
    assert json.loads(aenv("ls", "--json").stdout) == []


@pytest.mark.parametrize("pair", ["a b=c&d", "naïve=ü%25=x", "plus=1+1", "empty="])
def test_ls_by_metadata_survives_the_threefold_encoding(aenv, pair):
    wanted = aenv.start("--metadata", pair)
    aenv.start("--metadata", "other=1")
    assert [item["sandboxID"] for item in json.loads(aenv("ls", "--metadata", pair, "--json").stdout)] == [wanted]


def test_ls_reads_every_page(aenv):
    ids = {aenv.start() for _ in range(103)}
    assert {item["sandboxID"] for item in json.loads(aenv("ls", "--json").stdout)} == ids


def test_ls_does_not_let_metadata_steer_the_terminal(aenv):
    aenv.start("--metadata", "x=\x1b[2J\x07evil\r\u202eoops")
    shown = aenv("ls").stdout
    assert "evil" in shown
    assert not set("\x1b\x07\r\u202e") & set(shown)


def test_all_and_state_exclude_each_other(aenv):
    assert aenv("ls", "--all", "--state", "paused").exit_code == 2


def test_pause_resume_kill_by_unique_prefix(aenv, server):
    sandbox_id = aenv.start()
    assert aenv("pause", sandbox_id[:9]).stdout == f"{sandbox_id}\n"
    assert server.orchestrator.peek(sandbox_id).state is State.PAUSED
    assert aenv("resume", sandbox_id[:9]).exit_code == 0
    assert server.orchestrator.peek(sandbox_id).state is State.RUNNING
    assert aenv("kill", sandbox_id[:9]).exit_code == 0
    assert server.orchestrator.peek(sandbox_id).state is State.KILLED


def test_ambiguous_and_unknown_prefixes(aenv):
    first, second = aenv.start(), aenv.start()
    both = aenv("pause", "i")
    assert both.exit_code == 2
    assert first in both.stderr
    assert second in both.stderr
    unknown = aenv("info", "zzz")
    assert unknown.exit_code == 3
    assert "aenv ls --all" in unknown.stderr
    assert aenv("info", "").exit_code == 3


def test_unknown_full_id_is_not_found_everywhere(aenv):
    missing = "i" + "0" * 20
    for verb in ("pause", "resume", "kill", "info", "logs", "fork"):
        result = aenv(verb, missing)
        assert result.exit_code == 3, verb
        assert result.stdout == ""
        assert "hint: " in result.stderr
    assert aenv("exec", missing, "--", "true").exit_code == 3


def test_resume_never_shortens(aenv, server):
    sandbox_id = aenv.start("--timeout", "3000")
    end = server.orchestrator.peek(sandbox_id).end_at_ms
    assert aenv("resume", sandbox_id, "--timeout", "10").exit_code == 0
    assert server.orchestrator.peek(sandbox_id).end_at_ms == end


def test_kill_goes_on_after_a_failure_and_tells_it_by_code(aenv, server):
    first, last = aenv.start(), aenv.start()
    result = aenv("kill", first, "i" + "0" * 20, last)
    assert result.exit_code == 3
    assert result.stdout.split() == [first, last]
    assert server.orchestrator.peek(last).state is State.KILLED


def test_kill_all_ends_paused_ones_too(aenv, server):
    running, paused = aenv.start(), aenv.start()
    aenv("pause", paused)
    result = aenv("kill", "--all")
    assert set(result.stdout.split()) == {running, paused}
    assert server.orchestrator.peek(paused).state is State.KILLED
    again = aenv("kill", "--all")
    assert (again.exit_code, again.stdout) == (0, "")


@pytest.mark.parametrize("arguments", [[], ["--all", "iabc"]])
def test_kill_wants_ids_or_all(aenv, arguments):
    assert aenv("kill", *arguments).exit_code == 2


def test_pause_of_a_paused_one(aenv):
    sandbox_id = aenv.start()
    aenv("pause", sandbox_id)
    result = aenv("pause", sandbox_id)
    assert result.exit_code == 1
    assert "paused" in result.stderr


def test_fork_prints_new_ids(aenv):
    sandbox_id = aenv.start()
    ids = aenv("fork", sandbox_id, "--count", "3").stdout.split()
    assert len({*ids, sandbox_id}) == 4
    outcomes = json.loads(aenv("fork", sandbox_id, "--count", "2", "--json").stdout)
    assert all(outcome["sandbox"].keys() >= {"sandboxID", "templateID"} for outcome in outcomes)
    assert "envdAccessToken" not in outcomes[0]["sandbox"]


def test_fork_that_partly_fails(aenv, server):
    sandbox_id = aenv.start()
    server.orchestrator.sandboxes_running = 2  # room for one child
    result = aenv("fork", sandbox_id, "--count", "3")
    assert result.exit_code == 1
    assert len(result.stdout.split()) == 1
    assert result.stderr.count("one copy did not start") == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [(StorageFull("no room left", "free some space"), 1), (LimitReached("200 sandboxes run already"), 1), (Internal("boom"), 1)],
)
def test_errors_of_the_node_are_shown_with_their_cause(aenv, server, error, code):
    sandbox_id = aenv.start()
    server.orchestrator.fail_next("pause", error)
    result = aenv("pause", sandbox_id)
    assert result.exit_code == code
    assert error.message in result.stderr
    assert "Traceback" not in result.output


def test_logs(aenv, server):
    sandbox_id = aenv.start()
    aenv("pause", sandbox_id)
    aenv("resume", sandbox_id)
    known = asyncio.run(server.orchestrator.logs(sandbox_id, 0, 1000))
    assert len(known) >= 3
    assert len(aenv("logs", sandbox_id).stdout.splitlines()) == len(known)
    entries = [json.loads(line) for line in aenv("logs", sandbox_id, "--json").stdout.splitlines()]
    assert [entry["message"] for entry in entries] == [entry.message for entry in known]
    assert {"timestamp", "level", "message", "fields"} <= entries[0].keys()


def test_templates(aenv):
    assert json.loads(aenv("templates", "--json").stdout)[0]["names"] == ["base"]
    assert "base" in aenv("templates").stdout
