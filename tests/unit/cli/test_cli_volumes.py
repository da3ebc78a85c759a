"""`aenv volume` and `aenv secret` against a real API."""

import json
import os

from click.testing import CliRunner

from agentenv.cli.main import cli


def aenv_with_input(aenv, text, *arguments):
    return CliRunner().invoke(cli, list(arguments), env=aenv.server.environment, input=text, prog_name="aenv")


def test_life_of_a_volume(aenv, tmp_path):
    assert "no volumes" in aenv("volume", "ls").stderr
    volume_id = aenv("volume", "create", "data").stdout.strip()
    assert json.loads(aenv("vol", "list", "--json").stdout) == [{"volumeID": volume_id, "name": "data"}]
    assert volume_id in aenv("volume", "ls").stdout
    content = os.urandom(700_000)
    (tmp_path / "in").write_bytes(content)
    assert aenv("volume", "put", "data", str(tmp_path / "in"), "/a/b/c.bin").stdout == "/a/b/c.bin\n"
    assert aenv("volume", "put", volume_id, str(tmp_path / "in")).stdout == "/in\n"
    result = aenv("volume", "get", "data", "/a/b/c.bin", str(tmp_path / "out"))
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'out'}\n")
    assert (tmp_path / "out").read_bytes() == content
    assert aenv("volume", "rm", "data").stdout == f"{volume_id}\n"
    assert aenv("volume", "delete", "data").exit_code == 3


def test_volumes_through_pipes(aenv):
    aenv("volume", "create", "data")
    assert aenv_with_input(aenv, "from a pipe", "volume", "put", "data", "-", "/p").exit_code == 0
    assert aenv("volume", "get", "data", "/p", "-").stdout == "from a pipe"
    assert aenv_with_input(aenv, "x", "volume", "put", "data", "-").exit_code == 2


def test_a_failed_copy_touches_nothing(aenv, tmp_path):
    aenv("volume", "create", "data")
    (tmp_path / "out").write_text("mine")
    result = aenv("volume", "get", "data", "/none", str(tmp_path / "out"))
    assert (result.exit_code, (tmp_path / "out").read_text()) == (3, "mine")
    assert "path '/none' not found" in result.stderr
    assert aenv("volume", "put", "data", str(tmp_path / "missing")).exit_code == 2


def test_the_token_is_not_shown(aenv):
    for arguments in (("volume", "create", "data", "--json"), ("volume", "ls", "--json")):
        assert "token" not in aenv(*arguments).stdout


def test_names_that_are_refused(aenv):
    assert aenv("volume", "create", "no good").exit_code == 2
    aenv("volume", "create", "data")
    result = aenv("volume", "create", "data")
    assert (result.exit_code, "already exists" in result.stderr) == (2, True)


def test_life_of_a_secret(aenv):
    assert "no secrets" in aenv("secret", "ls").stderr
    made = aenv_with_input(aenv, "hidden\n", "secret", "create", "Key", "--metadata", "a=b", "--json")
    assert json.loads(made.stdout)["metadata"] == {"a": "b"}
    assert aenv_with_input(aenv, "other", "secret", "update", "key").stdout == "2\n"
    (listed,) = json.loads(aenv("secret", "ls", "--json").stdout)
    assert (listed["name"], listed["currentVersion"], listed["metadata"]) == ("key", 2, {"a": "b"})
    shown = aenv("secret", "list")
    assert "a=b" in shown.stdout
    assert "hidden" not in made.output + shown.output
    assert aenv_with_input(aenv, "x", "secret", "create", "key").exit_code != 0
    assert aenv("secret", "rm", "key").exit_code == 0
    assert aenv("secret", "rm", "key").exit_code == 3


async def test_a_value_is_taken_as_it_is_but_for_the_line_end(aenv):
    for number, (text, value) in enumerate([("v", "v"), ("v\n", "v"), ("v\r\n", "v"), ("v\n\n", "v\n"), (" v ", " v ")]):
        assert aenv_with_input(aenv, text, "secret", "create", f"k{number}").exit_code == 0
        assert await aenv.server.orchestrator.secrets.reveal(f"k{number}") == value
    assert aenv_with_input(aenv, b"\xff", "secret", "create", "k").exit_code == 2
