"""How values look to clients, beyond what IPython knows: tables, charts, JSON, images that are shown or saved.

Everything works on what is imported already: a cell that prints a number must not pay for pandas.
"""

from __future__ import annotations

import json
import math
import sys
from datetime import date
from typing import Any

from IPython.core.formatters import BaseFormatter, JSONFormatter
from IPython.core.interactiveshell import InteractiveShell
from traitlets import ObjectName, Unicode

from . import charts
from .wire import CHART_TYPE, DATA_TYPE

_CELLS_MAX = 1_000_000
"""Largest table that is also sent as data, in cells: above, its text and HTML (which are cut) must do."""


class _DataFormatter(BaseFormatter):
    """A pandas table as column name -> values."""

    format_type = Unicode(DATA_TYPE)
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict

    def __call__(self, obj: Any) -> Any:
        pandas: Any = sys.modules.get("pandas")
        if pandas is None or not isinstance(obj, pandas.DataFrame):
            return super().__call__(obj)
        if obj.size > _CELLS_MAX:
            return None
        return {str(name): [_plain(value) for value in values] for name, values in obj.to_dict(orient="list").items()}


class _ChartFormatter(BaseFormatter):
    """What a matplotlib figure shows, for clients that draw it themselves."""

    format_type = Unicode(CHART_TYPE)
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    def __call__(self, obj: Any) -> Any:
        figure: Any = sys.modules.get("matplotlib.figure")
        if figure is None or not isinstance(obj, figure.Figure):
            return super().__call__(obj)
        return charts.describe(obj)


class _JsonFormatter(JSONFormatter):
    """Dicts and lists that JSON can carry."""

    def __call__(self, obj: Any) -> Any:
        if isinstance(obj, dict | list):
            try:
                return json.loads(json.dumps(_plain(obj), allow_nan=False))
            except (TypeError, ValueError, RecursionError):
                return None
        return super().__call__(obj)


def _plain(value: Any) -> Any:
    """A value as JSON has it: numbers of numpy as numbers, times as ISO text, no NaN."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, date):  # also datetime, and pandas' Timestamp
        return value.isoformat() if value == value else None  # not-a-time differs from itself
    to_python = getattr(value, "item", None)
    if callable(to_python) and getattr(value, "ndim", None) == 0:
        return _plain(to_python())
    return str(value)


def install(shell: InteractiveShell) -> None:
    """Give `shell` these formatters, and let images of PIL show themselves."""
    formatter = shell.display_formatter
    for made in (_DataFormatter(parent=formatter), _ChartFormatter(parent=formatter), _JsonFormatter(parent=formatter)):
        formatter.formatters[made.format_type] = made
    if "PIL.Image" in sys.modules:
        _show_saved_images()


def _show_saved_images() -> None:
    """`image.save("name")` also shows the image, as E2B's template does; without a screen `image.show()` already displays it."""
    from IPython.display import display

    image: Any = sys.modules["PIL.Image"].Image
    save = image.save

    def save_and_show(self: Any, fp: Any, format: Any = None, **options: Any) -> None:
        if isinstance(fp, str):
            display(self)
        save(self, fp, format, **options)

    image.save = save_and_show
