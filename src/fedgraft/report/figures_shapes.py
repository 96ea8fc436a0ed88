"""Figures made of shapes: bars, matrices in colour, boxes, and points of cost against gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgraft.report.figures_canvas import INK, PALETTE, canvas, dress, need, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation


def bars(
    path: Path | str, groups: Mapping[str, Mapping[str, Any]], *, xlabel: str = "", ylabel: str = "", title: str = ""
) -> Path:
    """Bars with error bars: `{series: {category: value or (value, error)}}`; one series needs no legend."""
    need(groups, "bars")
    categories = list(dict.fromkeys(category for group in groups.values() for category in group))
    width = 0.8 / len(groups)
    crowded = len(categories) > 6 or max(len(c) for c in categories) * len(categories) > 60
    with canvas(path, title, (max(5.0, 1.6 + 0.9 * len(categories) ** 0.9), 4.2)) as figure:
        axes = figure.add_subplot()
        for i, (name, group) in enumerate(groups.items()):
            values, errors = zip(*(_pair(group.get(category)) for category in categories), strict=True)
            at = np.arange(len(categories)) + (i - (len(groups) - 1) / 2) * width
            style: dict[str, Any] = {
                "color": PALETTE[i % len(PALETTE)],
                "error_kw": {"ecolor": INK, "elinewidth": 1.2},
                "capsize": 3,
            }
            drawn = axes.bar(
                at, values, width * 0.92, yerr=errors if any(errors) else None, label=plain_text(name), **style
            )
            if len(categories) * len(groups) <= 12:
                axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=9)
        axes.set_xticks(range(len(categories)), [plain_text(c) for c in categories], rotation=35 * crowded)
        if crowded:
            for label in axes.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
        dress(axes, xlabel, ylabel)
        if len(groups) > 1:
            columns = 2 if figure.get_figwidth() < 8 else 4
            figure.legend(loc="outside lower center", ncols=min(columns, len(groups)))
    return Path(path)


def heatmaps(
    path: Path | str,
    matrices: Mapping[str, Any],
    *,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    labels: tuple[Sequence[object], Sequence[object]] | None = None,
    scale: str = "",
) -> Path:
    """Matrices side by side on one colour scale; `labels` names rows and columns, `scale` the colour bar."""
    need(matrices, "matrices")
    grids = {name: np.atleast_2d(np.asarray(matrix, dtype=float)) for name, matrix in matrices.items()}
    finite = np.concatenate([grid[np.isfinite(grid)].ravel() for grid in grids.values()])
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    rows, columns = next(iter(grids.values())).shape
    each = float(np.clip(0.32 * columns, 3.2, 8.0))
    tall = float(np.clip(0.32 * rows, 2.6, 8.0)) + 1.1
    with canvas(path, title, (each * len(grids) + 1.6, tall)) as figure:
        every, image = [], None
        for context, (name, grid) in enumerate(grids.items(), 1):
            axes = figure.add_subplot(1, len(grids), context)
            image = axes.imshow(grid, cmap="YlGnBu", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
            dress(axes, xlabel, ylabel if context == 1 else "", plain_text(name) if len(grids) > 1 else "")
            axes.grid(visible=False)
            if labels:
                _name_cells(axes, labels)
            if columns * rows <= 150 and columns * len(grids) <= 16:
                _number_cells(axes, grid, low + 0.55 * (high - low))
            every.append(axes)
        assert image is not None
        figure.colorbar(image, ax=every, label=scale, shrink=0.9, pad=0.02)
    return Path(path)


def heatmap(path: Path | str, matrix: Any, **options: Any) -> Path:
    """One matrix in colours; the options are those of `heatmaps`."""
    return heatmaps(path, {"": matrix}, **options)


def distribution(
    path: Path | str, groups: Mapping[str, Sequence[float]], *, xlabel: str = "", ylabel: str = "", title: str = ""
) -> Path:
    """A box with its points per group, for example the scores of all clients at each layer."""
    need(groups, "groups")
    values = [np.asarray(group, dtype=float) for group in groups.values()]
    with canvas(path, title, (max(5.0, 1.5 + 0.55 * len(groups)), 4.2)) as figure:
        axes = figure.add_subplot()
        boxes = axes.boxplot(values, widths=0.55, patch_artist=True, showfliers=False, medianprops={"color": INK})
        for box in boxes["boxes"]:
            box.set(facecolor=PALETTE[5], alpha=0.55, edgecolor=PALETTE[0])
        for at, group in enumerate(values, 1):
            # Points are laid side by side by rank, not by chance: the same data gives the same picture.
            beside = at + 0.36 * (np.argsort(np.argsort(group, kind="stable")) * 0.618 % 1 - 0.5)
            axes.plot(beside, group, "o", markersize=2.6, color=PALETTE[0], alpha=0.6, markeredgewidth=0)
        crowded = len(groups) > 8 or max(len(str(name)) for name in groups) > 6
        axes.set_xticks(range(1, len(groups) + 1), [plain_text(n) for n in groups], rotation=40 if crowded else 0)
        axes.grid(axis="x", visible=False)
        dress(axes, xlabel, ylabel)
    return Path(path)


def scatter_front(
    path: Path | str, points: Mapping[str, tuple[float, float]], *, xlabel: str = "", ylabel: str = "", title: str = ""
) -> Path:
    """Cost against gain, cost on a logarithmic axis, with the points nothing else beats joined by a line."""
    need(points, "points")
    front = pareto(points)
    with canvas(path, title) as figure:
        axes = figure.add_subplot()
        axes.step([points[n][0] for n in front], [points[n][1] for n in front], where="post", color="#AAAAAA", zorder=1)
        for name, (cost, gain) in points.items():
            best = name in front
            axes.plot(cost, gain, "o", markersize=8, color=PALETTE[1 if best else 0], alpha=1 if best else 0.55)
        if all(cost > 0 for cost, _ in points.values()):
            axes.set_xscale("log")
        axes.margins(x=0.14, y=0.12)
        dress(axes, xlabel, ylabel)
        figure.draw_without_rendering()  # fixes the limits, so that labels can be placed
        _name_points(axes, points, front)
    return Path(path)


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names of the points that no other beats in both cost (smaller) and gain (larger), cheapest first."""
    front: list[str] = []
    for name in sorted(points, key=lambda n: (points[n][0], -points[n][1])):
        if not front or points[name][1] > points[front[-1]][1]:
            front.append(name)
    return front


def _name_cells(axes: Axes, labels: tuple[Sequence[object], Sequence[object]]) -> None:
    rows, columns = ([plain_text(name) for name in names] for names in labels)
    steps = [max(1, -(-len(names) // 30)) for names in (rows, columns)]  # at most thirty names per side
    axes.set_yticks(range(0, len(rows), steps[0]), rows[:: steps[0]])
    turned = max(map(len, columns), default=0) > 3
    axes.set_xticks(range(0, len(columns), steps[1]), columns[:: steps[1]], rotation=90 if turned else 0)


def _number_cells(axes: Axes, grid: np.ndarray, middle: float) -> None:
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            text = f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"
            ink = "white" if value > middle else INK
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink)


def _pair(value: Any) -> tuple[float, float]:
    """Value and error of a bar; a missing bar is a gap."""
    if value is None:
        return float("nan"), 0.0
    number, error = value if isinstance(value, Sequence) else (value, 0.0)
    return float(number), float(error or 0.0)


def _name_points(axes: Axes, points: Mapping[str, tuple[float, float]], bold: Sequence[str]) -> None:
    """Put each name beside its point, at the first of four corners where it covers no point and no earlier name."""
    from matplotlib.transforms import Bbox

    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in axes.transData.transform(list(points.values()))]
    for name, point in points.items():
        weight = "bold" if name in bold else "normal"
        for dx, dy in ((7, 5), (7, -12), (-7, 5), (-7, -12)):
            side = "left" if dx > 0 else "right"
            text: Annotation = axes.annotate(
                plain_text(name), point, (dx, dy), textcoords="offset points", fontsize=9, fontweight=weight, ha=side
            )
            box = text.get_window_extent()
            if (dx, dy) == (-7, -12) or not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        taken.append(box)
