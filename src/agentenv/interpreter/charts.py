"""What a matplotlib figure shows, as the charts that E2B's client knows: line, scatter, bar, pie, box_and_whisker, superchart.

Read from the artists of each axes. The shapes are those that the client's parser takes (contract section 4):

    every chart     type, title, elements
    with axes       x_label, y_label, x_unit, y_unit (the part of a label in parentheses or brackets)
    line, scatter   x_ticks, x_tick_labels, x_scale, and the same for y; elements {label, points: [[x, y], ...]}
    bar             elements {label, group, value}
    pie             elements {label, angle (degrees), radius}
    box_and_whisker elements {label, min, first_quartile, median, third_quartile, max, outliers}
    superchart      elements are the charts of its axes
    unknown         elements empty

A figure that cannot be read is no reason to fail a cell: it is then without a chart, and its image is there all the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import date
from typing import Any

_UNIT = re.compile(r"\s\(([^)]*)\)|\[([^\]]*)\]")
_POINTS_MAX = 100_000
"""Points of one chart that are told; a figure with more has its image."""

Chart = dict[str, Any]


def describe(figure: Any) -> Chart | None:
    """The chart of a figure; None when it shows no data, too much, or something that cannot be read."""
    try:
        axes = [ax for ax in figure.get_axes() if not _is_colour_bar(ax)]
        if not any(_has_content(ax) for ax in axes):
            return None
        charts = [_chart_of(ax) for ax in axes]
    except Exception:  # noqa: BLE001  # matplotlib's artists are the user's: any of them may be of any shape
        return None
    if sum(len(element.get("points", ())) for chart in charts for element in chart["elements"]) > _POINTS_MAX:
        return None
    if len(charts) == 1:
        return charts[0]
    title = getattr(figure, "_suptitle", None)
    return {"type": "superchart", "title": (title.get_text() or None) if title is not None else None, "elements": charts}


def _is_colour_bar(ax: Any) -> bool:
    return getattr(ax, "_colorbar", None) is not None


def _has_content(ax: Any) -> bool:
    return bool(ax.lines or ax.patches or ax.collections or ax.images or ax.artists)


def _chart_of(ax: Any) -> Chart:
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer
    from matplotlib.patches import PathPatch, Wedge

    wedges = [patch for patch in ax.patches if isinstance(patch, Wedge)]
    boxes = [patch for patch in ax.patches if isinstance(patch, PathPatch)]
    bars = [container for container in ax.containers if isinstance(container, BarContainer)]
    points: list[Any] = [item for item in ax.collections if isinstance(item, PathCollection)]
    if wedges:
        return {"type": "pie", "title": _title(ax), "elements": [_wedge(wedge) for wedge in wedges]}
    if bars:
        return _bar_chart(ax, bars)
    if boxes or _has_box_lines(ax):
        return _box_chart(ax, boxes)
    lines: list[Any] = [line for line in ax.get_lines() if not _is_guide(line)]
    if lines:
        series: list[tuple[str, Any]] = [
            (str(line.get_label()), list(zip(line.get_xdata(), line.get_ydata(), strict=False))) for line in lines
        ]
        return _point_chart(ax, "line", series)
    if points:
        return _point_chart(ax, "scatter", [(str(item.get_label()), list(item.get_offsets())) for item in points])
    return {"type": "unknown", "title": _title(ax), "elements": []}


# --- what all charts have ------------------------------------------------------------------------------------------------


def _title(ax: Any) -> str | None:
    return ax.get_title() or None


def _labels(ax: Any) -> Chart:
    found: Chart = {"title": _title(ax)}
    for name, text in (("x", ax.get_xlabel()), ("y", ax.get_ylabel())):
        unit = _UNIT.search(text)
        found[f"{name}_label"] = text or None
        found[f"{name}_unit"] = (unit.group(1) or unit.group(2)) if unit else None
    return found


def _swapped(labels: Chart) -> Chart:
    return {**labels, "x_label": labels["y_label"], "y_label": labels["x_label"], "x_unit": labels["y_unit"], "y_unit": labels["x_unit"]}


def _number(value: Any) -> float:
    """Rounded to what a reader means: quartiles come back from drawn paths with the noise of a few additions."""
    number = float(value)
    return number if number == 0 or not math.isfinite(number) else float(f"{number:.9g}")


# --- lines and points ----------------------------------------------------------------------------------------------------


def _point_chart(ax: Any, kind: str, series: Iterable[tuple[str, Iterable[Any]]]) -> Chart:
    chart: Chart = {"type": kind, **_labels(ax), **_axis("x", ax.xaxis, ax.get_xscale()), **_axis("y", ax.yaxis, ax.get_yscale())}
    chart["elements"] = [
        {"label": _series_label(label, number), "points": [[_coordinate(x), _coordinate(y)] for x, y in points]}
        for number, (label, points) in enumerate(series)
    ]
    return chart


def _series_label(label: str, number: int) -> str:
    """matplotlib names series without a label `_child0` and the like."""
    return f"Line {number}" if str(label).startswith("_child") else str(label)


def _coordinate(value: Any) -> Any:
    if isinstance(value, date):
        return value.isoformat()
    if getattr(getattr(value, "dtype", None), "kind", "") == "M":  # numpy's datetime64
        return str(value.astype("datetime64[s]"))
    if isinstance(value, str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _axis(name: str, axis: Any, scale: str) -> Chart:
    positions = [float(tick) for tick in axis.get_majorticklocs()]
    texts = [label.get_text() for label in axis.get_majorticklabels()]
    ticks: list[Any] = positions
    if _is_dates(axis):
        from matplotlib.dates import num2date

        scale, ticks = "datetime", [num2date(position).isoformat() for position in positions]
    elif scale == "linear" and _is_categories(axis):
        scale = "categorical"
    return {f"{name}_ticks": ticks, f"{name}_tick_labels": texts, f"{name}_scale": scale}


def _converter(axis: Any) -> Any:
    getter = getattr(axis, "get_converter", None)  # matplotlib 3.10 and newer
    return getter() if getter is not None else axis.converter


def _is_dates(axis: Any) -> bool:
    return "Date" in type(_converter(axis)).__name__


def _is_categories(axis: Any) -> bool:
    return type(_converter(axis)).__name__ == "StrCategoryConverter"


def _is_guide(line: Any) -> bool:
    """A straight line along an axis (axhline, grid lines drawn as lines) is no data."""
    xs, ys = list(line.get_xdata()), list(line.get_ydata())
    return len(xs) == len(ys) == 2 and (xs[0] == xs[1] or ys[0] == ys[1])


# --- pies, bars ----------------------------------------------------------------------------------------------------------


def _wedge(wedge: Any) -> Chart:
    return {"label": wedge.get_label(), "angle": _number(f"{abs(wedge.theta2 - wedge.theta1):.4f}"), "radius": _number(wedge.r)}


def _bar_chart(ax: Any, containers: list[Any]) -> Chart:
    sideways = all(container.orientation == "horizontal" for container in containers)
    axis = ax.yaxis if sideways else ax.xaxis
    names = {_number(place): label.get_text() for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False)}
    elements = []
    for number, container in enumerate(containers):
        group = str(container.get_label())
        group = f"Group {number}" if group.startswith("_container") else group
        for position, bar in enumerate(container):
            middle = bar.get_y() + bar.get_height() / 2 if sideways else bar.get_x() + bar.get_width() / 2
            label = _bar_label(names, _number(middle), position, len(container))
            elements.append({"label": label, "group": group, "value": _number(bar.get_width() if sideways else bar.get_height())})
    labels = _labels(ax)
    return {"type": "bar", **(_swapped(labels) if sideways else labels), "elements": elements}


def _bar_label(names: dict[float, str], middle: float, position: int, count: int) -> str:
    """The tick at the bar; of grouped bars beside a tick, the tick of their place; else where the bar stands."""
    if names.get(middle):
        return names[middle]
    if len(names) == count:
        return list(names.values())[position] or f"{middle:g}"
    return f"{middle:g}"


# --- boxes and whiskers --------------------------------------------------------------------------------------------------


def _has_box_lines(ax: Any) -> bool:
    """Boxes drawn as lines: a closed path of five points each."""
    return any(_is_box(line) for line in ax.get_lines())


def _is_box(line: Any) -> bool:
    xs, ys = list(line.get_xdata()), list(line.get_ydata())
    return len(xs) == 5 and (xs[0], ys[0]) == (xs[-1], ys[-1]) and len(set(map(_number, xs))) == len(set(map(_number, ys))) == 2


def _box_chart(ax: Any, patches: list[Any]) -> Chart:
    """Each box is an outline, a median inside it, two whiskers along the values, caps at their ends and outliers beyond.

    The values run along y, or along x when the boxes lie: then everything is read with x and y exchanged.
    """
    outlines = [_extent(patch.get_path().vertices) for patch in patches]
    outlines += [_extent(list(zip(line.get_xdata(), line.get_ydata(), strict=True))) for line in ax.get_lines() if _is_box(line)]
    lies = len(outlines) > 1 and len({_number((low + high) / 2) for (low, high), _ in outlines}) == 1
    lies = lies or _whiskers_along_x(ax, outlines)
    axis = ax.yaxis if lies else ax.xaxis
    names = {_number(place): label.get_text() for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False)}
    elements = []
    for across, along in (tuple(reversed(outline)) if lies else outline for outline in outlines):
        middle = _number(sum(across) / 2)
        elements.append({"label": names.get(middle) or f"{middle:g}", **_box(ax, across, along, lies)})
    labels = _labels(ax)
    return {"type": "box_and_whisker", **(_swapped(labels) if lies else labels), "elements": elements}


def _extent(vertices: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    xs, ys = [float(x) for x, _ in vertices], [float(y) for _, y in vertices]
    return (_number(min(xs)), _number(max(xs))), (_number(min(ys)), _number(max(ys)))


def _whiskers_along_x(ax: Any, outlines: list[Any]) -> bool:
    """Whether some line with one y leaves a box sideways, from the middle of its height."""
    for (left, right), (low, high) in outlines:
        for xs, ys in _segments(ax, False):
            middle = _number((low + high) / 2)
            if ys[0] == ys[1] == middle and (max(xs) == left or min(xs) == right) and max(xs) != min(xs):
                return True
    return False


def _segments(ax: Any, exchanged: bool) -> Iterable[tuple[list[float], list[float]]]:
    for line in ax.get_lines():
        xs, ys = [_number(x) for x in line.get_xdata()], [_number(y) for y in line.get_ydata()]
        if len(xs) == 2:
            yield (ys, xs) if exchanged else (xs, ys)


def _box(ax: Any, across: tuple[float, float], along: tuple[float, float], lies: bool) -> Chart:
    """The figures of the box that spans `across` on the category axis and `along` on the value axis."""
    first, third = along
    found = {"min": first, "first_quartile": first, "median": first, "third_quartile": third, "max": third}
    middle = _number(sum(across) / 2)
    for places, values in _segments(ax, lies):
        if not all(across[0] <= place <= across[1] for place in places):
            continue
        if values[0] == values[1] and sorted(places) == sorted(across) and first <= values[0] <= third:
            found["median"] = values[0]
        elif places[0] == places[1] == middle:
            low, high = sorted(values)
            if high == first:
                found["min"] = low
            elif low == third:
                found["max"] = high
    outliers = []
    for line in ax.get_lines():
        places, values = line.get_xdata(), line.get_ydata()
        places, values = (values, places) if lies else (places, values)
        if line.get_marker() not in (None, "None", "", " ") and all(_number(place) == middle for place in places):
            outliers += [_number(value) for value in values]
    return {**found, "outliers": outliers}
