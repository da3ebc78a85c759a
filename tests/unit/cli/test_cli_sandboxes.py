"""Commands over sandboxes: what they print, their JSON, their exit codes."""

import asyncio
import json

import pytest
from click.testing import CliRunner

from agentenv.cli.main import cli
from agentenv.core.errors import Internal, LimitReached, StorageFull
from agentenv.core.lifecycle import State
from agentenv.core.model import LogEntry, LogQuery
from agentenv.core.quotas import Quotas
from agentenv.testing.fake_orchestrator import ManualClock


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


@pytest.mark.parametrize("words", [("create", "--detach"), ("sandbox", "create", "-d"), ("sbx", "cr", "-d"), ("sandbox", "start")])
def test_a_sandbox_without_a_terminal_by_every_name(aenv, server, words):
    result = aenv(*words, "base", "-e", "A=1", "--lifecycle.ontimeout", "pause", "--lifecycle.autoresume", "--timeout", "60")
    assert (result.exit_code, result.stderr) == (0, "")
    sandbox = server.orchestrator.peek(result.stdout.strip())
    assert (sandbox.env_vars, sandbox.on_timeout, sandbox.auto_resume, sandbox.timeout_s) == ({"A": "1"}, "pause", True, 60)
    assert json.loads(aenv(*words, "--json").stdout).keys() >= {"sandboxID", "templateID"}


@pytest.mark.parametrize(("words", "stored"), [([], None), (["--pause-when-idle"], True), (["--no-pause-when-idle"], False)])
def test_whether_an_idle_one_may_be_paused(aenv, server, words, stored):
    assert server.orchestrator.peek(aenv("start", *words).stdout.strip()).pause_when_idle is stored


def test_a_larger_disk_is_passed_on(aenv, server):
    made = aenv("start", "--disk", "16384")
    assert server.orchestrator.peek(made.stdout.strip()).machine.disk_mb == 16384
    assert aenv("start", "--disk", "0").exit_code == 2


def test_limits_are_passed_on_or_refused_by_name(aenv, server):
    made = aenv("start", "--limit", "cpuPercent=50", "--limit", "networkBytesPerSecond=1000000")
    assert server.orchestrator.peek(made.stdout.strip()).quotas == Quotas(cpu_percent=50, network_bytes_per_s=1_000_000)
    for wrong in ("cpu=50", "cpuPercent=half", "cpuPercent=-1"):
        result = aenv("start", "--limit", wrong)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "cpuPercent" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--auto-resume"], ["--detach", "--user", "root"], ["--json", "--cwd", "/"], ["--lifecycle.ontimeout", "sleep"]]
)
def test_create_refuses_what_does_not_go_together(aenv, arguments):
    result = aenv("create", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "hint: `aenv create --help`" in result.stderr


def test_create_without_a_terminal_makes_nothing(aenv, server):
    result = aenv("create")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "aenv create --detach" in result.stderr
    assert json.loads(aenv("ls", "--all", "--json").stdout) == []


def test_info_for_people(aenv, server):
    sandbox_id = aenv.start("-m", "who=me")
    lines = dict(line.split(maxsplit=1) for line in aenv("info", sandbox_id).stdout.splitlines())
    assert (lines["id"], lines["state"], lines["metadata"]) == (sandbox_id, "running", "who=me")
    assert lines["template"].startswith("base (")
    assert lines["machine"] == "1 CPU, 512 MiB memory, 8192 MiB disk"
    assert lines["ends"].endswith("(in 4m)") or lines["ends"].endswith("(in 5m)")
    assert "onTimeout=kill" in lines["lifecycle"]
    aenv("pause", sandbox_id)
    assert "ends" not in aenv("info", sandbox_id).stdout


def test_ids_are_completed(aenv):
    ids = {aenv.start(), aenv.start()}
    words = {"COMP_WORDS": "aenv sandbox kill i", "COMP_CWORD": "3", "_AENV_COMPLETE": "bash_complete"}
    shown = CliRunner().invoke(cli, [], env={**aenv.server.environment, **words}, prog_name="aenv").stdout
    assert {line.partition(",")[2] for line in shown.splitlines()} == ids
    nowhere = {**words, "E2B_API_URL": "http://127.0.0.1:9", "E2B_API_KEY": "e2b_00"}
    silent = CliRunner().invoke(cli, [], env=nowhere, prog_name="aenv")
    assert silent.output.strip() == ""


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
    assert "hint: `aenv start --help`" in result.stderr


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


def test_ls_by_template_time_order_and_number(aenv, server):
    clock = server.orchestrator.clock = ManualClock()
    ids = []
    for _ in range(4):
        ids.append(aenv.start())
        clock.advance_ms(1000)

    def listed(*arguments):
        return [item["sandboxID"] for item in json.loads(aenv("sandbox", "list", "--format", "json", *arguments).stdout)]

    assert listed() == ids[::-1]
    assert listed("-o", "asc") == ids
    assert listed("--limit", "2") == ids[:1:-1]
    assert listed("--order", "asc", "-l", "3") == ids[:3]
    assert listed("-l", "0") == ids[::-1]
    assert listed("-t", "base") == ids[::-1]
    assert listed("--template", "other") == []
    third = json.loads(aenv("info", ids[2], "-f", "json").stdout)["startedAt"]
    assert listed("--started-after", third) == [ids[3], ids[2]]
    assert "there are more than 2: --limit N shows more" in aenv("ls", "-l", "2").stderr
    assert aenv("ls", "-l", "4").stderr == ""


@pytest.mark.parametrize(
    "arguments", [["-l", "-1"], ["-o", "up"], ["-s", "gone"], ["-s", ""], ["-m", "x"], ["--started-after", "now"], ["-f", "xml"]]
)
def test_ls_refuses_wrong_arguments(aenv, arguments):
    result = aenv("ls", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")


def test_ls_says_when_nothing_matches(aenv):
    aenv.start()
    for arguments in (["-s", "paused"], ["-m", "a=b"], ["-t", "other"]):
        result = aenv("ls", *arguments)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no sandboxes match\n")


def test_a_comma_joins_pairs_but_may_be_part_of_a_value(aenv):
    wanted = aenv.start("-m", "a=1,2", "-m", "b=3")
    assert aenv("ls", "-m", "a=1,2,b=3").stdout.split("\n")[1].startswith(wanted)
    assert wanted not in aenv("ls", "-m", "a=1,b=3").stdout


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


def test_pause_of_the_disk_alone(aenv, server):
    sandbox_id = aenv.start()
    assert aenv("pause", "--no-memory", sandbox_id).exit_code == 0
    assert server.orchestrator.peek(sandbox_id).pause_mode == "filesystem"
    assert "filesystem" in aenv("info", sandbox_id).stdout
    assert aenv("resume", "--no-memory", sandbox_id).exit_code == 0
    assert aenv("sandbox", "pause", sandbox_id).exit_code == 0
    assert server.orchestrator.peek(sandbox_id).pause_mode == "full"
    assert aenv("sandbox", "resume", sandbox_id).exit_code == 0


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


def test_kill_all_leaves_paused_ones_and_says_so(aenv, server):
    running, paused = aenv.start(), aenv.start()
    aenv("pause", paused)
    result = aenv("kill", "--all")
    assert result.stdout.split() == [running]
    assert "paused ones are left" in result.stderr
    assert server.orchestrator.peek(paused).state is State.PAUSED
    again = aenv("kill", "--all", "--state", "running,paused")
    assert (again.stdout.split(), again.stderr) == ([paused], "")
    nothing = aenv("sandbox", "kl", "-a")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", "no running sandboxes\n")


@pytest.mark.parametrize(
    ("arguments", "killed"),
    [
        (["--metadata", "run=1"], {"first", "second"}),
        (["-m", "run=1,who=me"], {"second"}),
        (["-m", "run=1", "-m", "who=me"], {"second"}),
        (["-m", "run=2"], set()),
        (["-s", "paused", "-m", "run=2"], {"third"}),
        (["-s", "running,paused"], {"first", "second", "third"}),
    ],
)
def test_kill_all_that_match(aenv, server, arguments, killed):
    ids = {
        "first": aenv.start("-m", "run=1"),
        "second": aenv.start("-m", "run=1", "-m", "who=me"),
        "third": aenv.start("-m", "run=2"),
    }
    aenv("pause", ids["third"])
    result = aenv("kill", "--all", *arguments)
    assert result.exit_code == 0
    assert set(result.stdout.split()) == {ids[name] for name in killed}
    ended = {name for name, sandbox_id in ids.items() if server.orchestrator.peek(sandbox_id).state is State.KILLED}
    assert ended == killed


@pytest.mark.parametrize("arguments", [[], ["--all", "iabc"], ["iabc", "-m", "a=b"], ["iabc", "-s", "paused"], ["--all", "-s", "asleep"]])
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
    known = asyncio.run(server.orchestrator.logs(sandbox_id, LogQuery()))
    assert len(known) >= 3
    assert len(aenv("logs", sandbox_id).stdout.splitlines()) == len(known)
    entries = [json.loads(line) for line in aenv("logs", sandbox_id, "--json").stdout.splitlines()]
    assert [entry["message"] for entry in entries] == [entry.message for entry in known]
    assert {"timestamp", "level", "message", "fields"} <= entries[0].keys()


def test_logs_by_weight_and_logger(aenv, server):
    sandbox_id = aenv.start()
    log = server.orchestrator._logs[sandbox_id]
    log.clear()
    for level, logger in (("debug", "orchestrator"), ("info", "guest"), ("warn", "orchestrator"), ("error", "guest")):
        log.append(LogEntry(1_800_000_000_000, level, logger, f"{level} of {logger}"))

    def messages(*arguments):
        return [json.loads(line)["message"] for line in aenv("logs", sandbox_id, "--format", "json", *arguments).stdout.splitlines()]

    assert messages("--level", "debug") == [entry.message for entry in log]
    assert messages() == messages("--level", "INFO") == [entry.message for entry in log[1:]]
    assert messages("--level", "WARN") == [entry.message for entry in log[2:]]
    assert messages("--level", "error", "--loggers", "orchestrator") == []
    assert messages("--loggers", "orchestrator, other") == ["warn of orchestrator"]
    assert messages("--loggers", "guest,orchestrator") == messages()
    assert aenv("logs", sandbox_id, "--level", "loud").exit_code == 2


@pytest.mark.parametrize(
    "words", [("templates",), ("template", "list"), ("tpl", "ls", "-t", "any"), ("template", "list", "--format", "pretty")]
)
def test_templates(aenv, words):
    assert json.loads(aenv(*words, "--json").stdout)[0]["names"] == ["base"]
    assert "base" in aenv(*words).stdout


@pytest.mark.parametrize("long", ["info", "logs", "metrics", "pause", "resume", "kill", "fork"])
def test_one_verb_two_names(aenv, long):
    sandbox_id = aenv.start()
    if long == "resume":
        aenv("pause", sandbox_id)
    result = aenv("sandbox", long, sandbox_id)
    assert result.exit_code == 0, result.output
    unknown = aenv("sbx", long, "i" + "0" * 20)
    assert unknown.exit_code == 3
