"""Scenarios of the code interpreter's client, each in a sandbox of its own."""

from __future__ import annotations

import e2b
from sdk import need, raises, value

TEMPLATE = "code-interpreter-v1"
PATIENCE_S = 180  # of one cell, in an emulated guest on a machine that may be busy

TABLE = 'import pandas as pd; pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})'
PICTURES = """
from IPython.display import HTML, Markdown, JSON, Latex, SVG, display
display(HTML("<b>bold</b>"))
display(Markdown("# title"))
display(JSON({"a": [1]}))
display(Latex("$x^2$"))
display(SVG("<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'></svg>"))
"""
CHARTS = {
    "line": 'plt.plot([1, 2], [3, 4], label="a"); plt.xlabel("x (s)")',
    "scatter": 'plt.scatter([1, 2], [3, 4], label="a")',
    "bar": 'plt.bar(["p", "q"], [3, 4])',
    "pie": 'plt.pie([1, 3], labels=["p", "q"])',
    "box_and_whisker": "plt.boxplot([[1, 2, 3, 4, 5]])",
    "superchart": "figure, axes = plt.subplots(2); axes[0].plot([1, 2]); axes[1].bar(['p'], [1])",
}


def boxed(sdk, **options):
    return sdk.sandbox(TEMPLATE, **options)


async def run(sandbox, code, **options):
    options.setdefault("timeout", PATIENCE_S)
    return await value(sandbox.run_code(code, **options))


def output(execution):
    return "".join(execution.logs.stdout)


async def code_results(sdk):
    async with boxed(sdk) as sandbox:
        first = await run(sandbox, "x = 20\nprint('out')\nx + 1")
        assert (first.text, output(first), first.error) == ("21", "out\n", None)
        assert [result.is_main_result for result in first.results] == [True]
        second = await run(sandbox, "x")
        assert (second.text, second.execution_count) == ("20", first.execution_count + 1)
        (table,) = (await run(sandbox, TABLE)).results
        assert table.data == {"a": [1, 2], "b": ["x", "y"]}
        assert "<table" in table.html
        shown = (await run(sandbox, PICTURES)).results
        assert [result.is_main_result for result in shown] == [False] * 5
        assert (shown[0].html, shown[1].markdown, shown[2].json, shown[3].latex) == ("<b>bold</b>", "# title", {"a": [1]}, "$x^2$")
        assert "<svg" in shown[4].svg
        assert (await run(sandbox, "None")).results == []


async def code_charts(sdk):
    async with boxed(sdk) as sandbox:
        for kind, draw in CHARTS.items():
            (result,) = (await run(sandbox, f"import matplotlib.pyplot as plt\n{draw}\nplt.title('t')\nplt.show()")).results
            assert result.png.startswith("iVBOR"), kind
            assert result.chart.type.value == kind
            assert len(result.chart.elements) == {"bar": 2, "pie": 2, "superchart": 2}.get(kind, 1), kind
        points = (await run(sandbox, "plt.plot([1, 2], [3, 4], label='a')\nplt.show()")).results[0].chart.elements[0]
        assert (points.label, [tuple(point) for point in points.points]) == ("a", [(1, 3), (2, 4)])


async def code_languages(sdk):
    async with boxed(sdk) as sandbox:
        assert (await run(sandbox, "import sys; sys.version_info.major", language="python")).text == "3"
        assert (await run(sandbox, "const a = [1]; a.concat(2)", language="js")).text == "[ 1, 2 ]"
        assert output(await run(sandbox, "console.log(await Promise.resolve('later'))", language="javascript")) == "later\n"
        assert (await run(sandbox, "const t: number = 2; t", language="ts")).text == "2"
        assert output(await run(sandbox, "X=5; echo $X | tr 5 6", language="bash")) == "6\n"
        await raises(e2b.SandboxException, lambda: run(sandbox, "1", language="cobol"))


async def code_errors(sdk):
    async with boxed(sdk) as sandbox:
        await run(sandbox, "kept = 'kept'")
        error = (await run(sandbox, "def f():\n    return 1 / 0\nf()")).error
        assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
        assert "return 1 / 0" in error.traceback
        assert (await run(sandbox, "def f(:")).error.name == "SyntaxError"
        assert (await run(sandbox, "nope()", language="js")).error.name == "ReferenceError"
        assert (await run(sandbox, "(exit 3)", language="bash")).error.value == "3"
        assert (await run(sandbox, "kept")).text == "kept"  # without quotes, as the official server has it


async def code_streaming(sdk):
    told = []
    async with boxed(sdk) as sandbox:
        await run(
            sandbox,
            "import sys\nfor n in range(3):\n    print(n)\nprint('bad', file=sys.stderr)\ndisplay(7)\n1/0",
            on_stdout=lambda message: told.append(("out", message.line)),
            on_stderr=lambda message: told.append(("err", message.line)),
            on_result=lambda result: told.append(("result", result.text)),
            on_error=lambda error: told.append(("error", error.name)),
        )
    assert "".join(text for kind, text in told if kind == "out") == "0\n1\n2\n"
    assert "".join(text for kind, text in told if kind == "err") == "bad\n"
    assert [entry for entry in told if entry[0] in ("result", "error")] == [("result", "7"), ("error", "ZeroDivisionError")]


async def code_contexts(sdk):
    async with boxed(sdk) as sandbox:
        context = await value(sandbox.create_code_context(cwd="/tmp", language="python"))
        assert (context.language, context.cwd) == ("python", "/tmp")
        assert output(await run(sandbox, "import os; mine = 1; print(os.getcwd())", context=context)) == "/tmp\n"
        assert (await run(sandbox, "mine")).error.name == "NameError"
        assert (await run(sandbox, "mine", context=context)).text == "1"
        listed = await value(need(sandbox, "list_code_contexts")())
        assert context.id in [found.id for found in listed]
        await value(sandbox.restart_code_context(context))
        assert (await run(sandbox, "mine", context=context)).error.name == "NameError"
        await value(sandbox.remove_code_context(context))
        assert context.id not in [found.id for found in await value(sandbox.list_code_contexts())]
        await raises(e2b.SandboxException, lambda: run(sandbox, "1", context=context))


async def code_variables(sdk):
    read = {"python": "import os; print(os.environ.get('A'), os.environ.get('B'))", "bash": "echo ${A-None} ${B-None}"}
    read["js"] = "console.log(process.env.A ?? 'None', process.env.B ?? 'None')"
    async with boxed(sdk, envs={"A": "wide"}) as sandbox:
        for language, code in read.items():
            assert output(await run(sandbox, code, language=language)) == "wide None\n", language
            assert output(await run(sandbox, code, language=language, envs={"A": "mine", "B": "once"})) == "mine once\n", language
            assert output(await run(sandbox, code, language=language)) == "wide None\n", language


async def code_timeout(sdk):
    async with boxed(sdk) as sandbox:
        await run(sandbox, "kept = 1")
        await raises(e2b.TimeoutException, lambda: run(sandbox, "import time; time.sleep(1000)", timeout=3))
        assert (await run(sandbox, "kept")).text == "1"


async def code_lives(sdk):
    async with boxed(sdk) as sandbox:
        await run(sandbox, "kept = ['kept']")
        await sdk.pause(sandbox)
        resumed = await sdk.connect(sandbox.sandbox_id)
        assert (await run(resumed, "kept.append('again'); kept")).text == "['kept', 'again']"
        (child,) = await value(need(resumed, "fork")())
        try:
            other = await sdk.connect(child.sandbox_id)
            assert (await run(other, "kept.append('child'); kept")).text == "['kept', 'again', 'child']"
        finally:
            await value(child.kill())
        assert (await run(resumed, "kept")).text == "['kept', 'again']"


SCENARIOS = (
    code_results,
    code_charts,
    code_languages,
    code_errors,
    code_streaming,
    code_contexts,
    code_variables,
    code_timeout,
    code_lives,
)
