"""Many arms side by side: what each reaches, with its interval, and what that costs; every one has a row of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedgraft.report.figures import PALETTE, canvas, label_axes
from reproduction.drawing.answer import Interval, dots

_ROW = 0.26
"""Inches for one row."""


@dataclass(frozen=True)
class Arm:
    """What an arm reaches, and its costs by name; None where it has none."""

    reached: Interval
    costs: Mapping[str, float | None]


def ranking(
    path: Path | str,
    arms: Mapping[str, Arm],
    *,
    ylabel: str = "",
    title: str = "",
    levels: Mapping[str, float] | None = None,
) -> Path:
    """Rows from the best to the worst: accuracy with interval and level lines, then a panel for each cost."""
    names = sorted(arms, key=lambda name: -arms[name].reached[0])
    costs = list(next(iter(arms.values())).costs)
    places = range(len(names), 0, -1)
    with canvas(path, title, (10.0, 1.5 + _ROW * len(names))) as figure:
        grid = figure.add_gridspec(1, 1 + len(costs), width_ratios=[2.2, *(1 for _ in costs)])
        axes = figure.add_subplot(grid[0])
        dots(axes, {name: arms[name].reached for name in names}, levels or {}, 5)
        label_axes(axes, ylabel, "")
        if levels:
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=1, borderaxespad=0.1)
        for i, cost in enumerate(costs, 1):
            beside = figure.add_subplot(grid[i], sharey=axes)
            for place, name in zip(places, names, strict=True):
                value = arms[name].costs[cost]
                if value is not None and value > 0:
                    beside.plot([value], [place], "o", color=PALETTE[1], markersize=5)
            beside.set_xscale("log")
            beside.tick_params(labelleft=False)
            label_axes(beside, cost, "")
    return Path(path)
