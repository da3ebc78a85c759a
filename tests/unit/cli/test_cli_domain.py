"""Domain mode as the commands show it: `aenv ca`, `aenv env --domain`, and what `aenv up` remembers."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from aenv_runner import KEY, aenv_process, free_port
from click.testing import CliRunner

from agentenv.cli.commands import ca
from agentenv.cli.main import cli
from agentenv.cli.node import load_config, read_record


def run(*arguments, **environment):
    return CliRunner().invoke(cli, list(arguments), env=environment, prog_name="aenv")


@pytest.fixture
def domain(monkeypatch):
    home = load_config().node.home
    home.mkdir(parents=True)
    (home / "api-key").write_text(KEY + "\n")
    monkeypatch.setenv("AENV_API_DOMAIN", "sbx.localhost:8443")
    return home / "ca" / "sbx.localhost"


def test_ca_shows_what_clients_need(domain):
    text = run("ca")
    assert text.exit_code == 0, text.output
    assert f"export SSL_CERT_FILE={domain / 'trust.pem'}" in text.stderr
    assert f"export NODE_EXTRA_CA_CERTS={domain / 'ca.pem'}" in text.stderr
    shown = json.loads(run("ca", "--json").stdout)
    assert (shown["domain"], shown["path"]) == ("sbx.localhost:8443", str(domain / "ca.pem"))
    assert run("ca", "--path").stdout == f"{domain / 'ca.pem'}\n"
    pem = run("ca", "--pem").stdout
    assert pem == (domain / "ca.pem").read_text()
    found = subprocess.run(["openssl", "x509", "-noout", "-fingerprint", "-sha256"], input=pem, capture_output=True, text=True, check=True)
    assert found.stdout.strip().endswith(shown["sha256"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"AENV_API_DOMAIN": ""}, "no domain"),
        ({"AENV_API_TLS_PORT": "off"}, "TLS is off"),
        ({"AENV_API_TLS_CERT": "/c.pem", "AENV_API_TLS_KEY": "/k.pem"}, "shows the certificate /c.pem"),
    ],
)
def test_ca_says_why_there_is_none(domain, settings, reason):
    result = run("ca", **settings)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert not domain.exists()


def test_ca_takes_one_option(domain):
    assert run("ca", "--pem", "--json").exit_code == 2


def test_ca_in_the_trust_store(domain, monkeypatch, tmp_path):
    store = tmp_path / "store"
    calls = tmp_path / "calls"
    tool = tmp_path / "bin" / "update-ca-certificates"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho called >> {calls}; [ ! -e {tmp_path}/broken ] || {{ echo "no room" >&2; exit 3; }}\n')
    tool.chmod(0o755)
    monkeypatch.setattr(ca, "_STORE", store)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    assert run("ca", "--install").exit_code == 0
    assert (store / "agentenv-sbx.localhost.crt").read_text() == (domain / "ca.pem").read_text()
    assert run("ca", "--uninstall").exit_code == 0
    assert list(store.iterdir()) == []
    assert calls.read_text().split() == ["called", "called"]
    (tmp_path / "broken").touch()
    failed = run("ca", "--install")
    assert failed.exit_code == 1
    assert "no room" in failed.stderr
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "ca-certificates" in run("ca", "--install").stderr


def test_env_for_domain_mode(domain):
    assert json.loads(run("env", "--domain", "--json").stdout) == {
        "E2B_DOMAIN": "sbx.localhost:8443",
        "E2B_API_KEY": KEY,
        "SSL_CERT_FILE": str(domain / "trust.pem"),
        "NODE_EXTRA_CA_CERTS": str(domain / "ca.pem"),
    }
    lines = run("env", "--domain").stdout.splitlines()
    assert {"unset E2B_API_URL", "unset E2B_SANDBOX_URL"} < set(lines)
    # Without the option nothing changes but the domain that clients are told.
    assert json.loads(run("env", "--json").stdout)["E2B_API_URL"].startswith("http://127.0.0.1:")


@pytest.mark.parametrize("settings", [{"AENV_API_TLS_PORT": "off"}, {"AENV_API_TLS_CERT": "/c.pem", "AENV_API_TLS_KEY": "/k.pem"}])
def test_env_names_no_ca_where_there_is_none(domain, settings):
    values = json.loads(run("env", "--domain", "--json", **settings).stdout)
    assert set(values) == {"E2B_DOMAIN", "E2B_API_KEY"}


def test_env_without_a_domain(domain):
    result = run("env", "--domain", AENV_API_DOMAIN="")
    assert result.exit_code == 1
    assert "no domain" in result.stderr


def test_what_up_was_told_holds_for_later_commands(monkeypatch):
    monkeypatch.setenv("FAKE_HOST", "fit")
    tls_port = free_port()
    started = aenv_process("up", "--detach", "--domain", "sbx.localhost", "--tls-port", str(tls_port))
    try:
        assert started.returncode == 0, started.stderr
        assert f"https://api.sbx.localhost:{tls_port}" in started.stderr
        values = json.loads(aenv_process("env", "--domain", "--json").stdout)
        assert values["E2B_DOMAIN"] == f"sbx.localhost:{tls_port}"
        again = aenv_process("up", "--detach")
        assert "already up" in again.stderr
        record = read_record(load_config())
        assert (record.domain, record.tls_port) == ("sbx.localhost", tls_port)
    finally:
        assert aenv_process("down").returncode == 0
    assert not Path(load_config().node.run / "server.json").exists()


@pytest.mark.parametrize("arguments", [("--domain", "localhost"), ("--domain", "http://x.tld"), ("--domain", "x.tld:99999")])
def test_up_refuses_a_domain_that_cannot_work(monkeypatch, arguments):
    monkeypatch.setenv("FAKE_HOST", "fit")
    result = run("up", "--detach", *arguments)
    assert result.exit_code == 2
    assert "setting api" in result.stderr
