"""Python cells: results, errors, state, variables, interrupts."""

from __future__ import annotations

import time

import pytest
from interpreter_rig import DEADLINE_S, Interpreter


def test_count_output_and_result_come_in_order(server: Interpreter) -> None:
    context = server.http.post("/contexts", json={}).json()["id"]
    assert server.run("print('a')\nprint('b', end='')\n'c'", context_id=context) == [
        {"type": "number_of_executions", "execution_count": 1},
        {"type": "stdout", "text": "a\nb"},
        {"type": "result", "is_main_result": True, "text": "c"},
    ]
    assert server.run("echo x", context_id=context)[0]["execution_count"] == 2
    assert server.run("1", context_id=context)[0]["execution_count"] == 3


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x = 1; x", "1"),
        ("'it'", "it"),
        ('"it\'s"', "it's"),
        ("None", None),
        ("x = 2", None),
        ("3;", None),
        ("\n        import os\n        os.sep\n    ", "/"),
        ("import asyncio\nawait asyncio.sleep(0)\n5", "5"),
        ("async def f():\n    return 6\nimport asyncio\nasyncio.run(f())", "6"),
        ("%%timeit -n1 -r1\npass", None),
        ("'\\U0001f600é'", "\U0001f600é"),
    ],
)
def test_value_of_the_last_expression(server: Interpreter, code: str, text: str | None) -> None:
    assert server.value(code) == text


@pytest.mark.parametrize(
    ("code", "name", "value"),
    [
        ("nope_nope", "NameError", "name 'nope_nope' is not defined"),
        ("1 / 0", "ZeroDivisionError", "division by zero"),
        ("if:", "SyntaxError", "invalid syntax"),
        ("import sys; sys.exit(3)", "SystemExit", "3"),
        ("exit()", "SystemExit", "0"),
        ("input('?')", "EOFError", "EOF when reading a line"),
        ("await nope_nope()", "NameError", "name 'nope_nope' is not defined"),
    ],
)
def test_errors_have_name_value_and_traceback_and_lose_nothing(server: Interpreter, code: str, name: str, value: str) -> None:
    server.run("kept = 1")
    error = server.error(code)
    assert error["name"] == name
    assert value in error["value"]
    assert name in error["traceback"]
    assert "\x1b" not in error["traceback"]
    assert server.value("kept") == "1"


def test_displays_are_results_of_their_own(server: Interpreter) -> None:
    code = """
    from IPython.display import HTML, JSON, Markdown, SVG, Javascript, display
    display({"text/latex": "x^2"}, raw=True)
    display(Markdown("# m"))
    display(SVG("<svg xmlns='http://www.w3.org/2000/svg'/>"))
    display({"application/x-own": 1, "image/png": b"png"}, raw=True)
    handle = display(HTML("<b>"), display_id=True)
    handle.update(HTML("<i>"))
    HTML("<p>")
    """
    results = [line for line in server.run(code) if line["type"] == "result"]
    kinds = [sorted(set(result) - {"type", "text", "is_main_result"}) for result in results]
    assert kinds == [["latex"], ["markdown"], ["svg"], ["extra", "png"], ["html"], ["html"]]
    assert [result["is_main_result"] for result in results] == [False] * 5 + [True]
    assert results[3]["extra"] == {"application/x-own": 1}
    assert results[3]["png"] == "cG5n"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("{'a': [1, None, 2.5]}", {"a": [1, None, 2.5]}),
        ("[1, 'x']", [1, "x"]),
        ("{1: float('nan')}", {"1": None}),
        ("import datetime; [datetime.date(2024, 1, 2)]", ["2024-01-02"]),
        ("x = []; x.append(x); x", None),
        ("'text'", None),
    ],
)
def test_dicts_and_lists_are_json_too(server: Interpreter, code: str, found: object) -> None:
    (result,) = [line for line in server.run(code) if line["type"] == "result"]
    assert result.get("json") == found


def test_result_larger_than_an_event_is_left_out_and_said_so(server: Interpreter) -> None:
    lines = server.run("display({'text/plain': 'small', 'text/html': 'x' * (17 << 20)}, raw=True)")
    (result,) = [line for line in lines if line["type"] == "result"]
    assert result == {"type": "result", "is_main_result": False, "text": "small"}
    assert "text/html" in "".join(line["text"] for line in lines if line["type"] == "stderr")
    assert server.value("1") == "1"


def test_output_of_programs_is_output_of_the_cell(server: Interpreter) -> None:
    assert server.output("!echo hi; pwd") == f"hi\n{server.home}\n"
    assert server.output("import os; print('a'); os.system('echo b'); print('c')") == "a\nb\nc\n"
    assert server.output("!echo no >&2", "stderr") == "no\n"
    assert server.output("import subprocess; subprocess.run('cat'); print('end')") == "end\n"


def test_large_output_arrives_whole(server: Interpreter) -> None:
    text = server.output("for i in range(200_000): print(i, 'é')")
    assert text == "".join(f"{i} é\n" for i in range(200_000))


def test_bytes_that_are_no_text_are_replaced(server: Interpreter) -> None:
    assert server.output("import os; os.write(1, b'a\\xffb\\n'); os.write(1, b'\\xc3')") == "a\ufffdb\n\ufffd"


def test_variables_of_one_cell_are_reset(server: Interpreter) -> None:
    read = "import os; os.environ.get('ONCE', 'unset')"
    assert server.value("import os; len(os.environ['ONCE'])", env_vars={"ONCE": "é\n'"}) == "3"
    assert server.value(read) == "unset"
    server.error("import os; os.environ['ONCE'] = 'mine'; 1 / 0", env_vars={"ONCE": "x"})
    assert server.value(read) == "unset"


def test_sandbox_variables_follow_the_agent(server: Interpreter) -> None:
    read = "import os; os.environ.get('WIDE', 'unset')"
    server.agent.variables = {"WIDE": "one"}
    assert server.value(read, token="secret") == "one"
    assert server.value(read, token="secret", env_vars={"WIDE": "mine"}) == "mine"
    assert server.value(read, token="secret") == "one"
    server.agent.variables = {"WIDE": "two"}
    assert server.value(read, token="wrong") == "one"  # what was known goes on to hold
    assert server.value(read) == "one"
    assert server.value(read, token="secret") == "two"
    server.agent.variables = {}
    assert server.value(read, token="secret") == "unset"


def test_random_numbers_are_new_in_every_worker_and_after_a_new_identity(server: Interpreter) -> None:
    read = "import random; random.getstate()"
    first, second = (server.http.post("/contexts", json={}).json()["id"] for _ in range(2))
    assert server.value(read, context_id=first) != server.value(read, context_id=second)
    before = server.value("random.seed(1); random.getstate()", context_id=first)
    assert server.value("random.getstate()", context_id=first) == before
    server.id_file.write_text("another")
    assert server.value("random.getstate()", context_id=first) != before


@pytest.mark.parametrize(
    "code",
    [
        "print('now'); import time; time.sleep(1000)",
        "print('now', flush=True)\nwhile True: pass",
        "print('now'); import subprocess; subprocess.run('sleep 1000', shell=True)",
        "print('now'); import os; os.system('sleep 1000')",
        "print('now')\n!sleep 1000",
        "print('now'); import asyncio; await asyncio.sleep(1000)",
        "while True: print('now' * 1000)",
    ],
)
def test_hanging_up_interrupts_the_cell_and_keeps_the_variables(server: Interpreter, code: str) -> None:
    server.run("kept = 'yes'")
    server.hang_up(code, "now")
    assert server.run("kept")[1:] == [{"type": "result", "is_main_result": True, "text": "yes"}]


def test_cell_that_does_not_heed_is_ended_with_its_context(server: Interpreter) -> None:
    context = server.http.post("/contexts", json={}).json()["id"]
    server.run("kept = 1", context_id=context)
    server.hang_up(
        "import time\nprint('now')\nwhile True:\n    try:\n        time.sleep(1)\n    except KeyboardInterrupt:\n        pass",
        "now",
        context_id=context,
    )
    assert server.error("kept", context_id=context)["name"] == "NameError"
    assert server.value("1", context_id=context) == "1"


def test_worker_that_dies_says_so_and_starts_anew(server: Interpreter) -> None:
    server.run("kept = 1")
    lines = server.run("import os, signal; os.write(1, b'last words'); os.kill(os.getpid(), signal.SIGKILL)")
    assert {"type": "stdout", "text": "last words"} in lines
    (error,) = [line for line in lines if line["type"] == "error"]
    assert error["name"] == "ContextRestarting"
    assert "signal 9" in error["value"]
    assert server.error("kept")["name"] == "NameError"


def test_tasks_go_on_between_cells(server: Interpreter) -> None:
    server.run("""
    import asyncio
    seen = []
    async def count():
        while True:
            seen.append(1)
            await asyncio.sleep(0.01)
    task = asyncio.create_task(count())
    await asyncio.sleep(0)
    """)
    before = int(server.value("len(seen)") or 0)
    end = time.monotonic() + DEADLINE_S
    while int(server.value("len(seen)") or 0) <= before + 5:
        assert time.monotonic() < end
        time.sleep(0.05)
    server.run("task.cancel()")
