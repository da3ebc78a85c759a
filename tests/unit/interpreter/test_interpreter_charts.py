"""Figures: an image, and the chart that E2B's client draws itself, by its own parser's shapes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from interpreter_rig import Interpreter, interpreter


@pytest.fixture(scope="module")
def server() -> Iterator[Interpreter]:
    with interpreter(preload="numpy,matplotlib.pyplot,PIL.Image") as made:
        made.run("import matplotlib.pyplot as plt, numpy as np, datetime")
        yield made


def figure(server: Interpreter, code: str) -> dict[str, Any]:
    lines = server.run(code)
    results = [line for line in lines if line["type"] == "result"]
    assert len(results) == 1, lines
    assert base64.b64decode(results[0]["png"]).startswith(b"\x89PNG")
    assert "extra" not in results[0]
    assert results[0]["text"].startswith("<Figure")
    return results[0]


def chart(server: Interpreter, code: str) -> dict[str, Any]:
    found: dict[str, Any] = figure(server, code)["chart"]
    return found


@pytest.mark.parametrize("code", ["plt.plot([1, 2]); plt.show()", "plt.plot([1, 2]);"])
def test_figure_shows_itself_once(server: Interpreter, code: str) -> None:
    figure(server, code)


def test_line(server: Interpreter) -> None:
    found = chart(
        server,
        "plt.plot([0, 1, 2], [0.5, np.nan, 2], label='a'); plt.plot([0, 1, 2], [1, 1, 1]); plt.axhline(1); plt.grid(True)\n"
        "plt.title('T'); plt.xlabel('time (s)'); plt.ylabel('size [mm]'); plt.yscale('log'); plt.show()",
    )
    assert (found["type"], found["title"]) == ("line", "T")
    assert (found["x_label"], found["x_unit"], found["y_label"], found["y_unit"]) == ("time (s)", "s", "size [mm]", "mm")
    assert (found["x_scale"], found["y_scale"]) == ("linear", "log")
    assert found["elements"] == [
        {"label": "a", "points": [[0.0, 0.5], [1.0, None], [2.0, 2.0]]},
        {"label": "Line 1", "points": [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]},
    ]
    assert all(isinstance(tick, float) for tick in found["x_ticks"])
    assert len(found["x_ticks"]) == len(found["x_tick_labels"])


def test_dates_and_categories(server: Interpreter) -> None:
    days = "[datetime.date(2024, 1, day) for day in (1, 2, 3)]"
    found = chart(server, f"plt.plot({days}, ['A', 'B', 'C'], label='x'); plt.show()")
    assert (found["x_scale"], found["y_scale"]) == ("datetime", "categorical")
    assert found["x_ticks"][0].startswith("2024-01-01")
    assert found["elements"][0]["points"][0] == ["2024-01-01", "A"]


def test_scatter(server: Interpreter) -> None:
    found = chart(server, "plt.scatter([1, 2], [3, 4], label='a'); plt.scatter([5], [6], label='b'); plt.show()")
    assert found["type"] == "scatter"
    assert found["elements"] == [{"label": "a", "points": [[1.0, 3.0], [2.0, 4.0]]}, {"label": "b", "points": [[5.0, 6.0]]}]


@pytest.mark.parametrize("kind", ["bar", "barh"])
@pytest.mark.parametrize("values", [[1, 2.5], [3, 3]])
def test_bars(server: Interpreter, kind: str, values: list[float]) -> None:
    labels = ("plt.xlabel('who'); plt.ylabel('n (kg)')", "plt.ylabel('who'); plt.xlabel('n (kg)')")[kind == "barh"]
    found = chart(server, f"plt.{kind}(['A', 'B'], {values}, label='g'); {labels}; plt.show()")
    assert (found["type"], found["x_label"], found["y_label"], found["y_unit"]) == ("bar", "who", "n (kg)", "kg")
    assert found["elements"] == [
        {"label": "A", "group": "g", "value": float(values[0])},
        {"label": "B", "group": "g", "value": float(values[1])},
    ]


def test_grouped_bars_have_the_tick_of_their_place(server: Interpreter) -> None:
    found = chart(
        server,
        "x = np.arange(2); plt.bar(x - 0.2, [1, 2], 0.4, label='a'); plt.bar(x + 0.2, [3, 4], 0.4); plt.xticks(x, ['A', 'B']); plt.show()",
    )
    assert [(bar["label"], bar["group"], bar["value"]) for bar in found["elements"]] == [
        ("A", "a", 1.0),
        ("B", "a", 2.0),
        ("A", "Group 1", 3.0),
        ("B", "Group 1", 4.0),
    ]


def test_pie(server: Interpreter) -> None:
    found = chart(server, "plt.pie([90, 10], labels=['yes', 'no'], autopct='%1.1f%%', startangle=90); plt.title('P'); plt.show()")
    assert found == {
        "type": "pie",
        "title": "P",
        "elements": [{"label": "yes", "angle": 324.0, "radius": 1.0}, {"label": "no", "angle": 36.0, "radius": 1.0}],
    }


@pytest.mark.parametrize("upright", [True, False])
@pytest.mark.parametrize("patches", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_boxes(server: Interpreter, upright: bool, patches: bool, count: int) -> None:
    data = [[85, 90, 78, 92, 88], [95, 89, 76, 91, 84, 87]][-count:]
    ticks = f"plt.{'x' if upright else 'y'}ticks({list(range(1, count + 1))}, {['A', 'B'][-count:]})"
    names = "plt.xlabel('c'); plt.ylabel('v')" if upright else "plt.ylabel('c'); plt.xlabel('v')"
    found = chart(server, f"plt.boxplot({data}, vert={upright}, patch_artist={patches}); {ticks}; {names}; plt.show()")
    assert (found["type"], found["x_label"], found["y_label"]) == ("box_and_whisker", "c", "v")
    wanted = [
        {"label": "A", "min": 78, "first_quartile": 85, "median": 88, "third_quartile": 90, "max": 92, "outliers": []},
        {"label": "B", "min": 84, "first_quartile": 84.75, "median": 88, "third_quartile": 90.5, "max": 95, "outliers": [76]},
    ]
    assert found["elements"] == wanted[-count:]


def test_several_axes(server: Interpreter) -> None:
    found = chart(
        server,
        "fig, axs = plt.subplots(1, 2); fig.suptitle('Both'); axs[0].plot([1, 2]); axs[0].set_title('L')\n"
        "axs[1].scatter([1], [2]); plt.show()",
    )
    assert (found["type"], found["title"]) == ("superchart", "Both")
    assert [(part["type"], part["title"]) for part in found["elements"]] == [("line", "L"), ("scatter", None)]


def test_colour_bar_is_no_chart(server: Interpreter) -> None:
    found = chart(server, "s = plt.scatter([1, 2], [3, 4], c=[1, 2]); plt.colorbar(s); plt.show()")
    assert found["type"] == "scatter"


def test_what_no_type_fits_is_unknown(server: Interpreter) -> None:
    found = chart(server, "fig, ax = plt.subplots(); ax.add_artist(plt.Circle((0, 0), 1)); ax.set_title('C'); plt.show()")
    assert found == {"type": "unknown", "title": "C", "elements": []}


@pytest.mark.parametrize("code", ["fig, ax = plt.subplots(); plt.show()", "plt.scatter(range(200_000), range(200_000)); plt.show()"])
def test_empty_or_huge_figures_have_only_their_image(server: Interpreter, code: str) -> None:
    assert "chart" not in figure(server, code)


def test_images_show_themselves(server: Interpreter) -> None:
    make = "from PIL import Image; image = Image.new('RGB', (4, 4))\n"
    for code in ("image", "image.show(); print('x')", f"image.save({str(server.home / 'i.png')!r})"):
        results = [line for line in server.run(make + code) if line["type"] == "result"]
        assert [base64.b64decode(result["png"])[:4] for result in results] == [b"\x89PNG"]
    assert server.run(make + "import io; image.save(io.BytesIO(), 'png')")[1:] == []


def test_own_representations(server: Interpreter) -> None:
    code = """
    class Own:
        def _repr_e2b_data_(self): return {"a": [1]}
        def _repr_e2b_chart_(self): return {"type": "line", "title": None, "elements": []}
        def _repr_png_(self): raise RuntimeError("no picture")
    Own()
    """
    lines = server.run(code)
    (result,) = [line for line in lines if line["type"] == "result"]
    assert result["data"] == {"a": [1]}
    assert result["chart"]["type"] == "line"
