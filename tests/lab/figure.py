"""One measured value, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One measured value with its bound, if it has one: `least` or `most`."""

    name: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None

    @property
    def holds(self) -> bool:
        """Whether it is within its bound."""
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    def line(self) -> str:
        """As a line of a table."""
        bound = f"at most {self.most:g}" if self.most is not None else f"at least {self.least:g}" if self.least is not None else ""
        return f"    {self.name:64} {self.value:10.2f} {self.unit:8} {bound} {'' if self.holds else '<- NOT HELD'}".rstrip()
