"""Runs scenarios with one release of the E2B command line client and tells the outcome of each as one line of JSON.

    python main.py --program PATH SCENARIO...

Outcomes are those of the Python client's script.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import subprocess
import time
import traceback
from contextlib import contextmanager

PATIENCE_S = 120  # for one call, on a machine that may be busy


class Cli:
    """The client as a person uses it."""

    def __init__(self, program):
        self.program = program

    def __call__(self, *arguments, code=0, stdin=None):
        """Standard output of one call; it must end with `code`."""
        done = subprocess.run([self.program, *arguments], input=stdin, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == code, f"{arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def sandbox(self, *options):
        """A sandbox made by the client, killed by it in the end."""
        known = {found["sandboxId"] for found in self.listed("running,paused")}
        self("sandbox", "create", "base", "--detach", *options)
        (made,) = [found["sandboxId"] for found in self.listed("running,paused") if found["sandboxId"] not in known]
        try:
            yield made
        finally:
            self("sandbox", "kill", made)

    def listed(self, state="running"):
        return json.loads(self("sandbox", "list", "--state", state, "--format", "json"))


def cli_sandboxes(cli):
    with cli.sandbox() as sandbox_id:
        assert json.loads(cli("sandbox", "info", sandbox_id, "--format", "json"))["sandboxId"] == sandbox_id
        assert sandbox_id in cli("sandbox", "list")
        cli("sandbox", "pause", sandbox_id)
        assert sandbox_id not in [found["sandboxId"] for found in cli.listed()]
        assert sandbox_id in [found["sandboxId"] for found in cli.listed("paused")]
        cli("sandbox", "resume", sandbox_id)
        assert sandbox_id in [found["sandboxId"] for found in cli.listed()]
    assert sandbox_id not in [found["sandboxId"] for found in cli.listed("running,paused")]


def cli_exec(cli):
    with cli.sandbox() as sandbox_id:
        assert cli("sandbox", "exec", sandbox_id, "echo", "hello") == "hello\n"
        assert (
            cli("sandbox", "exec", "-u", "root", "-c", "/tmp", "-e", "A=1 2", sandbox_id, 'whoami; pwd; echo "$A"') == "root\n/tmp\n1 2\n"
        )
        cli("sandbox", "exec", sandbox_id, "exit 7", code=7)
        assert cli("sandbox", "exec", sandbox_id, "wc -c", stdin="six by").strip() == "6"


def cli_logs_and_metrics(cli):
    with cli.sandbox() as sandbox_id:
        end = time.monotonic() + PATIENCE_S
        while not (found := cli("sandbox", "metrics", sandbox_id, "--format", "json").strip()):
            assert time.monotonic() < end, "no metrics"
            time.sleep(1)
        assert "cpu" in found.lower(), found
        logs = cli("sandbox", "logs", sandbox_id, "--format", "json").strip()
        assert logs, "no logs"


def cli_terminal(cli):
    with cli.sandbox() as sandbox_id:
        pid, master = pty.fork()
        if pid == 0:
            os.execv(cli.program, [cli.program, "sandbox", "connect", sandbox_id])
        shown = ""
        try:
            shown += _until(master, "$ ")
            os.write(master, b"echo $((6*7))-here\n")
            shown += _until(master, "42-here")
            os.write(master, b"exit\n")
            _until_the_end(master)
        finally:
            os.close(master)
            os.waitpid(pid, 0)
        assert "42-here" in shown


def _until(master, text):
    """What the terminal shows up to `text`."""
    shown, end = "", time.monotonic() + PATIENCE_S
    while text not in shown:
        assert time.monotonic() < end, f"no {text!r} in {shown!r}"
        if select.select([master], [], [], 1)[0]:
            shown += os.read(master, 65536).decode(errors="replace")
    return shown


def _until_the_end(master):
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if select.select([master], [], [], 1)[0]:
            try:
                if not os.read(master, 65536):
                    return
            except OSError:  # how a terminal whose other side has closed ends
                return
    raise AssertionError("the client did not end after its shell had")


def cli_snapshots(cli):
    with cli.sandbox() as sandbox_id:
        name = f"conformance-cli-{os.getpid()}"
        cli("sandbox", "snapshot", "create", sandbox_id, "--name", name)
        assert name in cli("sandbox", "snapshot", "list")
        (snapshot_id,) = {word for word in cli("sandbox", "snapshot", "list").replace("│", " ").split() if name in word and ":" in word}
        cli("sandbox", "snapshot", "delete", snapshot_id)
        assert name not in cli("sandbox", "snapshot", "list")


def cli_templates(cli):
    def base():
        (found,) = [found for found in json.loads(cli("template", "list", "--format", "json")) if "base" in found["aliases"]]
        return found

    assert "base" in cli("template", "list")
    for verb, public in (("publish", True), ("unpublish", False)):
        cli("template", verb, "base", "--yes")
        assert base()["public"] is public
    name = f"conformance-cli-template-{os.getpid()}"
    with cli.sandbox() as sandbox_id:
        cli("sandbox", "snapshot", "create", sandbox_id, "--name", name)
    cli("template", "delete", name, "--yes")
    cli("template", "delete", name, "--yes", code=1)
    cli("template", "delete", "base", "--yes", code=1)


SCENARIOS = (cli_sandboxes, cli_exec, cli_logs_and_metrics, cli_terminal, cli_snapshots, cli_templates)


def main():
    """All that were asked for, in order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("scenarios", nargs="*")
    arguments = parser.parse_args()
    known = {function.__name__: function for function in SCENARIOS}
    for name in arguments.scenarios:
        began = time.monotonic()
        outcome, detail = "pass", ""
        if name not in known:
            outcome, detail = "absent", "not part of this client"
        else:
            try:
                known[name](Cli(arguments.program))
            except Exception:  # noqa: BLE001 - whatever a scenario ends with is its outcome
                outcome, detail = "fail", traceback.format_exc()[-3000:]
        took_ms = round(1000 * (time.monotonic() - began))
        print(json.dumps({"scenario": name, "outcome": outcome, "detail": detail, "took_ms": took_ms}), flush=True)


if __name__ == "__main__":
    main()
