"""The figure of an answer: what each arm reaches, start and head-only as lines, and the effects that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING

from fedgraft.report.figures import INK, PALETTE, canvas, label_axes, plain_text
from reproduction.drawing.palette import to_palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Interval = tuple[float, float, float]
"""A number with its lower and upper limit."""
_ROW, _LINE = 0.16, 0.15
"""Inches for one row of a panel, and for each line of its name."""
_LETTERS = 38
"""Of a line of a row's name; a longer one would leave no room for the numbers."""
_TITLE = 56
"""Letters of a line of a panel's title, which begins above the numbers."""
_BELOW = 68
"""Letters that fit below the numbers."""
_FRAME = 1.25
"""Inches for a panel's title and axis."""


@dataclass(frozen=True)
class Rows:
    """One panel: numbers by name from top to bottom, lines across all of them, and a band that does not matter."""

    title: str
    unit: str
    values: Mapping[str, Interval]
    lines: Mapping[str, float] = field(default_factory=dict)
    margins: Sequence[float] = ()
    """By row the smallest effect that matters, drawn as a band around zero."""
    bars: str = "95 % interval over seeds"
    """What the line through a number shows."""


def answer(path: Path, panels: Sequence[Rows], title: str = "") -> Path:
    """Panels below each other, each as high as it has rows."""
    lines = [max(len(wrap(name, _LETTERS)) for name in panel.values) for panel in panels]
    heights = [_FRAME + (_ROW + _LINE * n) * len(panel.values) for n, panel in zip(lines, panels, strict=True)]
    with canvas(path, title, (8.5, sum(heights) + 0.7)) as figure:
        grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(grid[i])
            places = range(len(panel.values), 0, -1)
            for place, margin in zip(places, panel.margins, strict=False):
                axes.barh(place, 2 * margin, left=-margin, height=0.8, color="#EEEEEE", zorder=0)
            if panel.margins:
                axes.axvline(0, color=INK, linewidth=0.8, zorder=1)
            dots(axes, panel.values, panel.lines)
            for place in [] if panel.margins else _borders(list(panel.values)):
                axes.axhline(place, color="#BBBBBB", linewidth=0.8, zorder=0)
            axes.grid(visible=False, axis="y")
            named = fill(panel.title, _TITLE)
            label_axes(axes, _below(panel), "", named)
            if panel.lines:
                axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, borderaxespad=0.1)
                axes.set_title(plain_text(named), pad=24)
    if path.suffix == ".png":
        to_palette(path)
    return path


def _below(panel: Rows) -> str:
    """The unit, and what bars show; on two lines where one would run out of the picture."""
    label = f"{panel.unit}; bars: {panel.bars}"
    return label if len(label) <= _BELOW else label.replace("; bars", "\nbars")


def _borders(names: Sequence[str]) -> list[float]:
    """Heights between rows whose names begin otherwise ("IID, dense" and "N_c=10, dense")."""
    groups = [name.partition(", ")[0] for name in names]
    if len(set(groups)) == len(groups):
        return []
    return [len(names) - i + 0.5 for i in range(1, len(names)) if groups[i] != groups[i - 1]]


def dots(axes: Axes, values: Mapping[str, Interval], lines: Mapping[str, float], size: float = 6) -> None:
    """Numbers with their intervals, one row each from top to bottom, and lines across all of them."""
    places = range(len(values), 0, -1)
    for place, (mean, low, high) in zip(places, values.values(), strict=True):
        axes.plot([low, high], [place, place], color=PALETTE[0], linewidth=2, solid_capstyle="butt")
        axes.plot([mean], [place], "o", color=PALETTE[0], markersize=size)
    for (name, at), dash in zip(lines.items(), ("--", ":", "-."), strict=False):
        axes.axvline(at, color="#777777", linestyle=dash, linewidth=1.2, zorder=0, label=plain_text(name))
    axes.set_yticks(list(places), [plain_text(fill(name, _LETTERS)) for name in values])
    axes.set_ylim(0.4, len(values) + 0.6)
