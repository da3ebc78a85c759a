"""Bash cells: one shell that keeps its state, exit codes, variables, interrupts."""

from __future__ import annotations

import pytest
from interpreter_rig import Interpreter


def test_state_stays_in_one_shell(server: Interpreter) -> None:
    server.run('X=5; f() { echo "f $1"; }; cd /; shopt -s extglob', language="bash")
    assert server.output("echo $X; f a; pwd; shopt extglob", language="bash") == "5\nf a\n/\nextglob        \ton\n"
    assert server.output("echo it''s \"é\" >&2", "stderr", language="bash") == "its é\n"


@pytest.mark.parametrize(
    ("code", "value"), [("false", "1"), ("nosuchprogram", "127"), ("echo 'open", "2"), ("(exit 7)", "7"), ("true; return 3", "3")]
)
def test_exit_status_is_the_error(server: Interpreter, code: str, value: str) -> None:
    error = server.error(code, language="bash")
    assert (error["name"], error["value"]) == ("ExitStatus", value)
    assert [line["type"] for line in server.run("true", language="bash")] == ["number_of_executions"]


def test_programs_read_no_cell_and_hold_no_pipe(server: Interpreter) -> None:
    assert server.output("cat; ls /proc/self/fd | tr '\\n' ' '", language="bash").split()[:3] == ["0", "1", "2"]
    assert server.output("sleep 1000 & echo $!", language="bash").strip().isdigit()
    assert server.output("kill %1; echo on", language="bash") == "on\n"


def test_leaving_the_shell_starts_a_new_one(server: Interpreter) -> None:
    server.run("X=5", language="bash")
    error = server.error("echo a; exit 3", language="bash")
    assert error["name"] == "ContextRestarting"
    assert "status 3" in error["value"]
    assert server.output("echo ${X:-gone}", language="bash") == "gone\n"


def test_variables_of_one_cell_are_reset(server: Interpreter) -> None:
    server.run("export HAS=old; unset HAS_NOT", language="bash")
    value = "it's $HOME `id` \\ \"\n"
    assert server.output('printf %s "$HAS|$HAS_NOT"', language="bash", env_vars={"HAS": value, "HAS_NOT": "x"}) == f"{value}|x"
    assert server.output("bash -c 'echo \"$HAS|${HAS_NOT-unset}\"'", language="bash") == "old|unset\n"


def test_sandbox_variables_follow_the_agent(server: Interpreter) -> None:
    server.agent.variables = {"WIDE": "o'ne", "not a name": "x"}
    assert server.output("bash -c 'echo $WIDE'", language="bash", token="secret") == "o'ne\n"
    server.agent.variables = {}
    assert server.output("echo ${WIDE-unset}", language="bash", token="secret") == "unset\n"


@pytest.mark.parametrize(
    "code",
    [
        "echo now; sleep 1000; touch {mark}",
        "echo now; f() {{ sleep 1000; touch {mark}; }}; f; touch {mark}",
        "while true; do echo now; sleep 1; done; touch {mark}",
        "while true; do echo now; done",
        "for i in 1 2 3; do echo now; (sleep 1000); touch {mark}; done",
    ],
)
def test_hanging_up_leaves_the_rest_of_the_cell_out(server: Interpreter, code: str) -> None:
    mark = server.home / "mark"
    server.run("kept=yes", language="bash")
    server.hang_up(code.format(mark=mark), "now", language="bash")
    assert server.run("echo $kept", language="bash")[1:] == [{"type": "stdout", "text": "yes\n"}]
    assert not mark.exists()


def test_nul_is_refused(server: Interpreter) -> None:
    assert server.error("echo \0", language="bash")["name"] == "SyntaxError"
