"""What happens when the node, its key or its answer is not there or is wrong; and which node is meant."""

import json
import socket
import threading
import time

import pytest
from aenv_runner import KEY, free_port
from click.testing import CliRunner

from agentenv.cli.api import Api
from agentenv.cli.main import cli
from agentenv.cli.node import load_config, node_url
from agentenv.cli.target import find_target


def run(*arguments, **environment):
    return CliRunner().invoke(cli, list(arguments), env=environment, prog_name="aenv")


def write_key(text=KEY + "\n"):
    home = load_config().node.home
    home.mkdir(parents=True, exist_ok=True)
    (home / "api-key").write_text(text)


def test_no_server():
    write_key()
    result = run("ls")
    assert result.exit_code == 4
    assert f"cannot reach the node at {node_url(load_config())}" in result.stderr
    assert "hint: is the node up? `aenv up --detach`" in result.stderr
    assert result.stdout == ""


def test_missing_key_file():
    result = run("ls")
    assert result.exit_code == 4
    assert "api-key" in result.stderr
    assert "aenv up" in result.stderr


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_key_file_without_key(text):
    write_key(text)
    result = run("env")
    assert result.exit_code == 1
    assert "holds no key" in result.stderr


def test_first_key_of_the_file_counts():
    write_key(f"# mine\n\n{KEY}\ne2b_{'0' * 40}\n")
    assert find_target({}).api_key == KEY


@pytest.mark.parametrize("verb", [("ls",), ("start",), ("templates",)])
def test_wrong_key_names_where_it_came_from(server, verb):
    result = run(*verb, E2B_API_URL=server.url, E2B_API_KEY="e2b_" + "0" * 40)
    assert result.exit_code == 1
    assert "environment variable E2B_API_KEY" in result.stderr
    assert "unset E2B_API_KEY" in result.stderr
    write_key("e2b_" + "0" * 40)
    result = run(*verb, E2B_API_URL=server.url)
    assert result.exit_code == 1
    assert "api-key" in result.stderr


def test_auth_info_tells_node_and_key_but_not_the_key(server):
    good = run("auth", "info", E2B_API_URL=server.url, E2B_API_KEY=KEY)
    assert (good.exit_code, good.stderr) == (0, "the node takes this key\n")
    assert server.url in good.stdout
    assert "environment variable E2B_API_KEY" in good.stdout
    assert KEY not in good.output
    write_key()
    as_json = run("auth", "info", "--json", E2B_API_URL=server.url)
    assert json.loads(as_json.stdout).keys() == {"api", "sandboxes", "domain", "key"}
    assert "api-key" in json.loads(as_json.stdout)["key"]
    wrong = run("auth", "info", E2B_API_URL=server.url, E2B_API_KEY="e2b_" + "0" * 40)
    assert wrong.exit_code == 1
    assert "takes this key" not in wrong.output


def test_url_that_is_none():
    result = run("ls", E2B_API_URL="localhost:3000", E2B_API_KEY=KEY)
    assert result.exit_code == 2
    assert "E2B_API_URL" in result.stderr


@pytest.fixture
def canned():
    """Serves one fixed answer to every connection; `None` accepts and never answers, b"" hangs up."""
    listeners = []

    def serve(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def loop():
            held = []
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.recv(65536)
                held.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=loop, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 13\r\n\r\n<html></html>",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
        b'HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\n"hi"',
        b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
    ],
)
def test_another_program_on_the_port(canned, answer):
    result = run("ls", E2B_API_URL=canned(answer), E2B_API_KEY=KEY)
    assert result.exit_code == 4
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "hint: " in result.stderr


def test_a_node_that_never_answers(canned, monkeypatch):
    monkeypatch.setitem(Api._call.__kwdefaults__, "deadline_s", 0.3)
    begun = time.monotonic()
    result = run("ls", E2B_API_URL=canned(None), E2B_API_KEY=KEY)
    assert time.monotonic() - begun < 5
    assert result.exit_code == 4
    assert "did not answer" in result.stderr


def test_a_list_without_end(monkeypatch, canned):
    monkeypatch.setattr("agentenv.cli.api.MAX_PAGES", 3)
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\nx-next-token: again\r\n\r\n[]"
    result = run("ls", E2B_API_URL=canned(body), E2B_API_KEY=KEY)
    assert result.exit_code == 1
    assert "more than 3 pages" in result.stderr


def test_proxy_of_the_environment_is_not_used_for_loopback(server):
    dead = f"http://127.0.0.1:{free_port()}"
    result = run("ls", **server.environment, HTTP_PROXY=dead, http_proxy=dead, ALL_PROXY=dead)
    assert result.exit_code == 0, result.stderr


def test_target_from_environment_and_node():
    write_key()
    local = find_target({})
    assert local.api_url == local.sandbox_url == node_url(load_config())
    assert local.domain == f"localhost:{load_config().api.port}"
    other = find_target({"E2B_API_URL": "http://far:1/", "E2B_API_KEY": "k"})
    assert (other.api_url, other.sandbox_url, other.api_key) == ("http://far:1", None, "k")
    domain = find_target({"E2B_DOMAIN": "my.tld", "E2B_API_KEY": "k"})
    assert (domain.api_url, domain.sandbox_url) == ("https://api.my.tld", None)
    assert KEY not in repr(local)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:{}"), ("::", "http://[::1]:{}"), ("::1", "http://[::1]:{}"), ("10.0.0.5", "http://10.0.0.5:{}")],
)
def test_node_url(host, url):
    config = load_config(api_host=host)
    assert node_url(config) == url.format(config.api.port)


def test_env_is_fit_for_eval_and_json():
    write_key()
    result = run("env")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert all(line.startswith("export E2B_") for line in lines)
    assert f"export E2B_API_KEY={KEY}" in lines
    assert "the server is not running" in result.stderr
    values = json.loads(run("env", "--json").stdout)
    assert values == {
        "E2B_API_URL": node_url(load_config()),
        "E2B_SANDBOX_URL": node_url(load_config()),
        "E2B_VOLUME_API_URL": node_url(load_config()),
        "E2B_DOMAIN": f"localhost:{load_config().api.port}",
        "E2B_API_KEY": KEY,
    }


@pytest.mark.parametrize("setting", [{"AENV_API_PORT": "0"}, {"AENV_API_PORT": "many"}, {"AENV_CONFIG": "/nowhere/x.toml"}])
def test_wrong_settings_are_usage_errors(setting):
    result = run("ls", **setting)
    assert result.exit_code == 2
    assert "hint: " in result.stderr


def test_config_shows_value_default_and_variable():
    rows = {row["setting"]: row for row in json.loads(run("config", "--json", AENV_GUEST_MEMORY_MB="777").stdout)}
    assert (rows["guest.memory_mb"]["value"], rows["guest.memory_mb"]["default"]) == (777, 512)
    assert rows["guest.memory_mb"]["variable"] == "AENV_GUEST_MEMORY_MB"
    assert all(row["meaning"] for row in rows.values())
    assert "777" in run("config", AENV_GUEST_MEMORY_MB="777").stdout
