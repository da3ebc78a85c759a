"""What holds for every command: help, sections, exit codes, colour, progress, documentation."""

import importlib.util
import io
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from aenv_runner import process_environment
from click.testing import CliRunner

from agentenv.cli import output
from agentenv.cli.exits import EXIT_CODES, CliError, Exit
from agentenv.cli.main import cli, exit_code
from agentenv.cli.output import ProgressReport, clean, duration, size
from agentenv.cli.verb import SECTIONS, Group, Verb, aliases_of, walk
from agentenv.core import errors

ROOT = Path(__file__).parents[3]
CONTEXT = click.Context(cli, info_name="aenv")
NAMES = cli.list_commands(CONTEXT)
COMMANDS = ROOT / "src" / "agentenv" / "cli" / "commands"
VERBS = dict(walk(cli, CONTEXT))
IMPLIED = {path[1:] for path in VERBS if path[0] == "sandbox"}


def test_every_module_is_a_command_with_section_and_help():
    modules = [path.relative_to(COMMANDS).with_suffix("").parts for path in COMMANDS.rglob("*.py") if path.stem != "__init__"]
    assert {tuple(word.rstrip("_") for word in path) for path in modules} == VERBS.keys() - IMPLIED
    for path, verb in VERBS.items():
        assert isinstance(verb, Verb)
        assert verb.name == path[-1]
        assert verb.section in SECTIONS
        assert 10 < len(verb.help.splitlines()[0]) <= 60, f"the first line of {path}'s help must fit the list"


def groups(group=cli):
    yield group
    for name in group.list_commands(CONTEXT):
        if isinstance(command := group.get_command(CONTEXT, name), Group):
            yield from groups(command)


def test_no_name_or_alias_means_two_things():
    for group in groups():
        commands = [group.get_command(CONTEXT, name) for name in group.list_commands(CONTEXT)]
        words = [word for command in commands for word in (command.name, *aliases_of(command))]
        assert sorted(set(words)) == sorted(words)
        assert group.absent.keys().isdisjoint(words)
        for command in commands:
            for word in aliases_of(command):
                assert group.get_command(CONTEXT, word) is command


def test_the_word_sandbox_may_be_left_out():
    assert IMPLIED
    for path in IMPLIED:
        assert VERBS[path] is VERBS[("sandbox", *path)]


# What its --help lists, release 2.19.
E2B_WORDS = """
sandbox connect|cn info|in list|ls kill|kl pause|ps resume|rs create|cr logs|lg metrics|mt exec|ex snapshot|snap
template list|ls delete|dl publish|pb unpublish|upb
auth info
"""
E2B_OPTIONS = """
sandbox connect: -u --user -c --cwd -e --env
sandbox info: -f --format
sandbox list: -s --state -m --metadata -t --template --started-after -o --order -l --limit -f --format
sandbox kill: -a --all -s --state -m --metadata
sandbox create: -d --detach --lifecycle.ontimeout --lifecycle.autoresume --timeout -u --user -c --cwd -e --env
sandbox logs: --level -f --follow --format --loggers
sandbox metrics: -f --follow --format
sandbox exec: -b --background -c --cwd -u --user -e --env
sandbox snapshot create: -n --name
sandbox snapshot list: -n --name -l --limit -f --format
template list: -t --project -f --format
template delete: -s --select -t --project -y --yes
template publish: -s --select -t --project -y --yes
template unpublish: -s --select -t --project -y --yes
"""


@pytest.mark.parametrize("line", E2B_WORDS.split("\n")[1:-1])
def test_every_word_of_the_e2b_command_line(line):
    group_name, *words = line.split()
    group = cli.get_command(CONTEXT, group_name)
    for word in words:
        found = {id(group.get_command(CONTEXT, name)) for name in word.split("|")}
        assert len(found) == 1
        assert found != {id(None)}, word


@pytest.mark.parametrize("line", E2B_OPTIONS.split("\n")[1:-1])
def test_every_option_of_the_e2b_command_line(line):
    path, _, options = line.partition(": ")
    ours = {flag for parameter in VERBS[tuple(path.split())].params for flag in parameter.opts}
    assert set(options.split()) <= ours


@pytest.mark.parametrize("word", ["login", "logout", "configure"])
def test_there_is_nothing_to_log_in_to(word):
    result = CliRunner().invoke(cli, ["auth", word], prog_name="aenv")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no accounts" in result.stderr
    assert "hint: its key is in its home" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["kil"], "did you mean `aenv kill`? `aenv --help` lists the commands"),
        (["sbx", "pausee"], "did you mean `aenv sbx pause`? `aenv sbx --help` lists the commands"),
        (["template", "zzz"], "`aenv template --help` lists the commands"),
    ],
)
def test_a_mistyped_command_is_told_the_likely_one(arguments, hint):
    result = CliRunner().invoke(cli, arguments, prog_name="aenv")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith(f"hint: {hint}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell):
    result = CliRunner().invoke(cli, ["completion", shell], prog_name="aenv")
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"_AENV_COMPLETE={shell}_complete" in result.stdout


@pytest.mark.parametrize("word", ["create", "ct", "init", "it", "migrate"])
def test_project_files_are_said_to_be_absent(word):
    result = CliRunner().invoke(cli, ["template", word, "x", "--path", "."], prog_name="aenv")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"error: `aenv template {word}`: AgentENV has no project files to make or migrate\nhint: " in result.stderr


@pytest.mark.parametrize(
    "name", ["assets", "config", "create", "doctor", "env", "fork", "info", "list", "logs", "metrics", "start", "version"]
)
def test_every_read_verb_has_json(name):
    assert any("--json" in option.opts for option in VERBS[(name,)].params)


def test_help_names_every_command():
    done = subprocess.run(
        [sys.executable, "-m", "agentenv.cli", "--help"], env=process_environment({}), capture_output=True, text=True, check=True
    )
    for name in NAMES:
        assert re.search(rf"^  {name}[, ]", done.stdout, re.MULTILINE)


def test_help_imports_nothing_heavy():
    """What keeps `aenv --help` at 0.2 s, told without a clock that a busy machine would upset."""
    code = (
        "import sys\nfrom agentenv.cli.main import cli\nfrom click.testing import CliRunner\n"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0\n"
        "print([name for name in ('httpx', 'e2b', 'pydantic', 'rich', 'fastapi', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=process_environment({}), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["nonsense"], ["ls", "--nonsense"], ["info"], ["exec", "iabc"], ["fork", "iabc", "--count", "0"]])
def test_usage_errors_exit_2_on_stderr(arguments):
    result = CliRunner().invoke(cli, arguments, prog_name="aenv")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "--help" in result.stderr


def test_exit_codes_are_all_documented():
    assert set(EXIT_CODES) == set(Exit)
    for cls in errors.all_errors():
        assert exit_code(cls("x")) in EXIT_CODES
    assert exit_code(errors.NotFound("x")) == Exit.NOT_FOUND
    assert exit_code(errors.InvalidInput("x")) == Exit.USAGE
    assert exit_code(errors.StorageFull("x")) == Exit.FAILURE


@pytest.mark.parametrize(
    ("raised", "code", "shown"),
    [
        (CliError("cause", "step", 4), 4, "error: cause\nhint: step\n"),
        (errors.NotFound("gone", "look"), 3, "error: gone\nhint: look\n"),
        (errors.Conflict("busy"), 1, "error: busy\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_failures_end_with_message_hint_and_code(monkeypatch, raised, code, shown):
    def fail(**_arguments):
        raise raised

    monkeypatch.setattr(cli.get_command(CONTEXT, "version"), "callback", fail)
    result = CliRunner().invoke(cli, ["version"], prog_name="aenv")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", shown)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environment", "fancy"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"TERM": ""}, False)],
)
def test_colour_only_where_it_is_welcome(monkeypatch, environment, fancy):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert output.is_fancy(Terminal()) is fancy
    assert output.is_fancy(io.StringIO()) is False
    assert ("\x1b[" in output.styled("x", Terminal(), fg="red")) is fancy


def test_plain_progress_is_lines_not_floods(monkeypatch):
    errors_shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors_shown)
    with ProgressReport() as progress:
        for done in range(0, 1001, 10):
            progress("fetch kernel (bytes)", done * 1024, 1000 * 1024)
        progress("fetch kernel (bytes)", 1000 * 1024, 1000 * 1024)
        progress("build", None, None)
    assert errors_shown.getvalue().splitlines() == ["fetch kernel: 0 B / 1000.0 KiB", "fetch kernel: 1000.0 KiB / 1000.0 KiB", "build"]


def test_bars_on_a_terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    with ProgressReport() as progress:
        progress("fetch kernel (bytes)", 512, 1024)
        progress("[odd] step", None, None)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "fetch kernel" in shown
    assert "512 B / 1.0 KiB" in shown
    assert "[odd] step" in shown


def test_a_long_wait_is_told_and_leaves_nothing(monkeypatch):
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(output, "BUSY_AFTER_S", 3600)
    with output.busy("pausing i0"):
        pass
    assert screen.getvalue() == ""
    monkeypatch.setattr(output, "BUSY_AFTER_S", 0)
    with output.busy("pausing [i0]\x1b[2J"):
        while "pausing" not in screen.getvalue():
            time.sleep(0.01)
    assert "pausing [i0]" in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K") or "\x1b[?25h" in screen.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    monkeypatch.setattr(sys, "stderr", plain)
    with output.busy("pausing"):
        pass
    assert plain.getvalue() == ""


def test_words_for_people():
    assert [duration(s) for s in (-1, 0, 59, 60, 3600, 86400 + 7200)] == ["0s", "0s", "59s", "1m", "1h 0m", "1d 2h"]
    assert [size(n) for n in (0, 1023, 1024, 5 << 30, 3 << 40)] == ["0 B", "1023 B", "1.0 KiB", "5.0 GiB", "3.0 TiB"]
    assert clean("a\x1b[31mb\x00\n\tc\x9b") == "a\ufffd[31mb\ufffd\n\tc\ufffd"


@pytest.fixture(scope="module")
def gen_docs():
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "tools" / "gen_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh(gen_docs):
    assert [str(path.relative_to(ROOT)) for path in gen_docs.stale_pages()] == [], "run `make docs`"


def test_stale_and_absent_pages_are_found(gen_docs, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "cli.md").write_text("old")
    assert {str(path.relative_to(tmp_path)) for path in gen_docs.stale_pages(tmp_path)} == set(gen_docs.PAGES)


def test_pages_hold_every_state_error_and_command(gen_docs):
    from agentenv.core.lifecycle import State

    assert all(f"`{state}`" in gen_docs.lifecycle_page() for state in State)
    assert all(f"`{cls.code}`" in gen_docs.errors_page() for cls in errors.all_errors())
    page = gen_docs.cli_page()
    assert all(f"### aenv {' '.join(path)}\n" in page for path in VERBS if path[0] != "sandbox")
