"""The template `code-interpreter-v1` through E2B's own client: languages, results, charts, variables, interrupts, lives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from e2e_node import Node

DEADLINE_S = 180.0
RESTART_DEADLINE_S = 900.0
"""The server imports pandas and matplotlib again: half a minute in an emulated guest, minutes when its host is busy."""
pytestmark = pytest.mark.timeout(3000)  # the first test also makes the template


def make(node: Node, **options: Any) -> Any:
    from e2b_code_interpreter import Sandbox

    return Sandbox.create(timeout=1800, **options, **node.options)


@pytest.fixture(scope="module")
def box(interpreter_node: Node) -> Iterator[Any]:
    """One sandbox for the tests that do not end it."""
    made = make(interpreter_node, envs={"WIDE": "it's"})
    yield made
    made.kill()


def run(box: Any, code: str, **options: Any) -> Any:
    return box.run_code(code, timeout=DEADLINE_S, **options)


def test_first_cell_of_a_new_sandbox(box: Any) -> None:
    contexts = box.list_code_contexts()
    assert [(context.language, context.cwd) for context in contexts] == [("python", "/home/user"), ("javascript", "/home/user")]
    execution = run(box, "import os, getpass\nx = 1\nprint(os.getcwd(), getpass.getuser())\nx")
    assert (execution.text, execution.execution_count) == ("1", 1)
    assert execution.logs.stdout == ["/home/user user\n"]
    assert run(box, "!pwd").execution_count == 2


def test_errors_are_the_cells_own(box: Any) -> None:
    error = run(box, "1/0").error
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "1/0" in error.traceback


def test_tables_and_figures(box: Any) -> None:
    code = """
    import pandas as pd, matplotlib.pyplot as plt
    display(pd.DataFrame({"a": [1, 2], "t": pd.to_datetime(["2024-01-01", None]), "f": [1.5, float("nan")]}))
    plt.plot([1, 2, 3], [2, 4, 8], label="doubling")
    plt.title("growth")
    plt.show()
    """
    table, figure = run(box, code).results
    assert table.data == {"a": [1, 2], "t": ["2024-01-01T00:00:00", None], "f": [1.5, None]}
    assert "<table" in table.html
    assert "2024-01-01" in table.text
    assert figure.png.startswith("iVBOR")
    assert (figure.chart.type, figure.chart.title) == ("line", "growth")
    assert figure.chart.elements[0].points == [(1.0, 2.0), (2.0, 4.0), (3.0, 8.0)]
    assert not figure.extra


@pytest.mark.parametrize(
    ("code", "text", "stdout"),
    [
        ("console.log('Hello', {a: 1}); [1, 2]", "[ 1, 2 ]", "Hello { a: 1 }\n"),
        ("await Promise.resolve('done')", "done", ""),
        ("import { sep } from 'node:path'\nimport * as os from 'os'\nconsole.log(typeof os.EOL)\nsep", "/", "string\n"),
        ("const a = 1, { b } = { b: 2 }; class C { f() { return a + b } } function g() { return new C().f() }", None, ""),
        ("g()", "3", ""),
        ("const a = 5; await 0; let c = a; for (var i = 0; i < 3; i++) { var inner = i } async function h() { return c }", None, ""),
        ("[a, c, i, inner, await h()].join()", "5,5,3,2,5", ""),
        ("(await import('fs')).existsSync('/')", "true", ""),
        ("for (let i = 0; i < 2; i++) i", None, ""),
        ("process.cwd()", "/home/user", ""),
        ("'é\U0001f600'", "é\U0001f600", ""),
        ("var fs = require('fs'); fs.writeSync(1, 'direct\\n'); undefined", None, "direct\n"),
    ],
)
def test_javascript(box: Any, code: str, text: str | None, stdout: str) -> None:
    execution = run(box, code, language="js")
    assert execution.error is None, execution.error
    assert (execution.text, "".join(execution.logs.stdout)) == (text, stdout)


@pytest.mark.parametrize(
    ("code", "name", "value"),
    [
        ("nope()", "ReferenceError", "nope is not defined"),
        ("throw new TypeError('bad')", "TypeError", "bad"),
        ("await Promise.reject(new RangeError('late'))", "RangeError", "late"),
        ("throw 'a string'", "Error", "'a string'"),
        ("let 1x", "SyntaxError", "line 1"),
        ("import x from 'no-such-package'", "Error", "Cannot find module 'no-such-package'"),
        ("export default 1", "SyntaxError", "export"),
    ],
)
def test_javascript_errors(box: Any, code: str, name: str, value: str) -> None:
    error = run(box, code, language="javascript").error
    assert error.name == name
    assert value in error.value
    assert "javascript_worker" not in error.traceback


def test_typescript_is_javascript_with_types(box: Any) -> None:
    execution = run(box, "interface A { x: number }\nconst a: A = { x: 1 }; console.log(a.x as number)", language="ts")
    assert execution.logs.stdout == ["1\n"]
    assert run(box, "a.x", language="typescript").text == "1"
    assert run(box, "let b: = 1", language="ts").error.name == "SyntaxError"


def test_bash(box: Any) -> None:
    run(box, "cd /; X=5", language="bash")
    assert "".join(run(box, "pwd; echo $X; whoami", language="bash").logs.stdout) == "/\n5\nuser\n"
    assert run(box, "false", language="bash").error.value == "1"


@pytest.mark.parametrize("language", ["r", "java"])
def test_other_languages_are_refused_by_name(box: Any, language: str) -> None:
    from e2b import SandboxException

    with pytest.raises(SandboxException, match=f"400.*{language}.*not available"):
        run(box, "1", language=language)


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import os; print(os.environ.get('WIDE'), os.environ.get('ONCE'), os.environ['E2B_SANDBOX_ID'])"),
        ("js", "console.log(process.env.WIDE, process.env.ONCE ?? 'None', process.env.E2B_SANDBOX_ID)"),
        ("bash", "echo $WIDE ${ONCE-None} $E2B_SANDBOX_ID"),
    ],
)
def test_variables_of_the_sandbox_and_of_one_cell(box: Any, language: str, code: str) -> None:
    def seen(**options: Any) -> str:
        return "".join(run(box, code, language=language, **options).logs.stdout)

    assert seen() == f"it's None {box.sandbox_id}\n"
    assert seen(envs={"ONCE": 'a "b"', "WIDE": "mine"}) == f'mine a "b" {box.sandbox_id}\n'
    assert seen() == f"it's None {box.sandbox_id}\n"


@pytest.mark.parametrize(
    ("language", "keep", "code", "read", "value"),
    [
        ("python", "kept = 1", "import time; time.sleep(1000)", "print(kept)", "1\n"),
        ("js", "kept = 1", "while (true) {}", "console.log(kept)", "1\n"),
        ("js", "kept = 1", "await new Promise(() => {})", "console.log(kept)", "1\n"),
        ("js", "kept = 1", "while (true) console.log('x'.repeat(1000))", "console.log(kept)", "1\n"),
        ("js", "kept = 1", "while (true) process.stdout.write('x')", "process.stdout.write(`${kept}\\n`)", "1\n"),
        ("bash", "kept=1", "sleep 1000", "echo $kept", "1\n"),
    ],
)
def test_client_that_gives_up_interrupts_the_cell(box: Any, language: str, keep: str, code: str, read: str, value: str) -> None:
    from e2b import TimeoutException

    run(box, keep, language=language)
    with pytest.raises(TimeoutException):
        box.run_code(code, language=language, timeout=2)
    assert "".join(run(box, read, language=language).logs.stdout) == value


def test_contexts(box: Any) -> None:
    from e2b import NotFoundException

    context = box.create_code_context(cwd="/root", language="python")
    assert box.list_code_contexts()[-1].id == context.id
    run(box, "mine = 1", context=context)
    assert run(box, "mine").error.name == "NameError"
    box.restart_code_context(context)
    assert run(box, "mine", context=context).error.value == "name 'mine' is not defined"
    box.remove_code_context(context)
    with pytest.raises(NotFoundException):
        run(box, "1", context=context)


def test_server_runs_again_after_a_boot_and_after_its_end(interpreter_node: Node) -> None:
    """A pause without memory ends it, and so does whoever kills it; nobody has to start it by hand."""
    from e2b_code_interpreter import Sandbox

    box = make(interpreter_node)
    try:
        box.files.write("/home/user/kept", "kept")
        box.pause(mode="filesystem")
        box = Sandbox.connect(box.sandbox_id, timeout=1800, **interpreter_node.options)
        # It has only begun to start: that this one ends costs no second start.
        kill = "until pkill -9 -o -f '[a]env_interpreter.server'; do sleep 0.1; done"  # the bracket: the shell is not found
        box.commands.run(kill, user="root", timeout=DEADLINE_S)
        wait_until(lambda: healthy(box))
        execution = run(box, "import os; print(open('kept').read(), os.environ['E2B_SANDBOX_ID'])")
        assert execution.logs.stdout == [f"kept {box.sandbox_id}\n"]
        assert "Killed" in box.commands.run("cat /var/log/code-interpreter.log").stdout
        wait_until(lambda: "service is ready again" in interpreter_node.aenv("logs", box.sandbox_id).stdout)
    finally:
        box.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + RESTART_DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(1)


def healthy(box: Any) -> bool:
    reply = httpx.get(
        f"{box.connection_config.get_sandbox_url(box.sandbox_id, box.sandbox_domain)}/health", headers=headers(box), timeout=DEADLINE_S
    )
    return reply.text == "OK"


def headers(box: Any) -> dict[str, str]:
    return {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49999"}


def test_pause_fork_and_identity(interpreter_node: Node) -> None:
    from e2b_code_interpreter import Sandbox

    box = make(interpreter_node)
    children: list[Any] = []
    try:
        run(box, "import random; kept = 'kept'; state = random.getstate()")
        box.pause()
        box = Sandbox.connect(box.sandbox_id, timeout=1800, **interpreter_node.options)
        assert run(box, "kept").text == "kept"
        children = [Sandbox.connect(child.sandbox_id, **interpreter_node.options) for child in box.fork(count=2)]
        read = "import os\nprint(kept, os.environ['E2B_SANDBOX_ID'])\nrandom.random()"
        executions = [run(child, read) for child in children]
        assert ["".join(execution.logs.stdout) for execution in executions] == [f"kept {child.sandbox_id}\n" for child in children]
        assert executions[0].text != executions[1].text
    finally:
        for each in (box, *children):
            each.kill()


def test_new_sandboxes_draw_different_random_numbers(interpreter_node: Node) -> None:
    boxes = [make(interpreter_node) for _ in range(2)]
    try:
        for code, language in (
            ("import random; random.random()", "python"),
            ("Math.random()", "js"),
            ("require('crypto').randomBytes(16).toString('hex')", "js"),
        ):
            texts = [run(box, code, language=language).text for box in boxes]
            assert texts[0] != texts[1], code
    finally:
        for each in boxes:
            each.kill()


def test_stream_is_plain_lines(box: Any) -> None:
    """As any HTTP client sees it, through the node's proxy."""
    url = f"{box.connection_config.get_sandbox_url(box.sandbox_id, box.sandbox_domain)}/execute"
    reply = httpx.post(url, json={"code": "print('é'); 'ü'"}, headers=headers(box), timeout=DEADLINE_S)
    lines = [json.loads(line) for line in reply.content.decode("ascii").split("\n")[:-1]]
    assert [line["type"] for line in lines] == ["number_of_executions", "stdout", "result", "end_of_execution"]
    assert healthy(box)
