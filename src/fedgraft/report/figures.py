"""Figures for papers, from plain data to a PNG, SVG or PDF file: curves, bars, heat maps, cost against gain.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart. The same data gives the same bytes, and
matplotlib's global settings stay as they were. Charts of the HTML report are drawn by the page itself (`charts`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = Mapping[str, Sequence[Any]]
"""`{label: (x, y)}` or `{label: (x, y, spread)}`; spread is drawn as a band of plus and minus that much."""
Levels = Mapping[str, float] | None
"""Heights that are drawn across the whole figure, by name."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")  # yellow vanishes on white
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK = "#222222"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "figure.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedgraft",
    "pdf.fonttype": 42,
}
_UNDATED: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}


def curves(
    path: Path | str, series: Series, *, xlabel: str = "", ylabel: str = "", title: str = "", levels: Levels = None
) -> Path:
    """Lines with a band for the spread, named beside the axes in the order in which they end."""
    with canvas(path, title) as figure:
        axes = figure.add_subplot()
        _draw_levels(axes, levels)
        handles = plot_lines(axes, series, dict(zip(series, looks(), strict=False)))
        dress(axes, xlabel, ylabel)
        if len(series) > 1:
            ends = {name: line.get_ydata()[-1:] for name, line in handles.items()}
            names = sorted(handles, key=lambda name: -float(ends[name][0]) if len(ends[name]) else math.inf)
            figure.legend([handles[name] for name in names], map(plain_text, names), loc="outside right center")
    return Path(path)


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
            style: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "label": plain_text(name), "capsize": 3}
            bound: dict[str, Any] = {
                "yerr": errors if any(errors) else None,
                "error_kw": {"ecolor": INK, "elinewidth": 1.2},
            }
            drawn = axes.bar(at, values, width * 0.92, **style, **bound)
            if len(categories) * len(groups) <= 12:
                axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=9)
        turned: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        axes.set_xticks(range(len(categories)), [plain_text(c) for c in categories], **turned)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
        dress(axes, xlabel, ylabel)
        if len(groups) > 1:
            columns = 2 if figure.get_figwidth() < 8 else 4
            figure.legend(loc="outside lower center", ncols=min(columns, len(groups)))
    return Path(path)


def heatmaps(path: Path | str, matrices: Mapping[str, Any], *, title: str = "", **texts: Any) -> Path:
    """Matrices side by side on one colour scale; texts: `xlabel`, `ylabel`, `scale` and `labels`, rows then columns."""
    need(matrices, "matrices")
    grids = {name: np.atleast_2d(np.asarray(matrix, dtype=float)) for name, matrix in matrices.items()}
    rows, columns = next(iter(grids.values())).shape
    each, tall = (float(np.clip(0.32 * count, least, 8.0)) for count, least in ((columns, 3.2), (rows, 2.6)))
    with canvas(path, title, (each * len(grids) + 1.6, tall + 1.1)) as figure:
        _paint(figure, grids, **texts)
    return Path(path)


def heatmap(path: Path | str, matrix: Any, **options: Any) -> Path:
    """One matrix in colours; the options are those of `heatmaps`."""
    return heatmaps(path, {"": matrix}, **options)


def scatter_front(
    path: Path | str,
    points: Mapping[str, tuple[float, float]],
    *,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    levels: Levels = None,
) -> Path:
    """Cost against gain, cost on a logarithmic axis, with the points nothing else beats joined by a line."""
    need(points, "points")
    front = pareto(points)
    with canvas(path, title) as figure:
        axes = figure.add_subplot()
        _draw_levels(axes, levels)
        axes.step([points[n][0] for n in front], [points[n][1] for n in front], where="post", color="#AAAAAA", zorder=1)
        for name, (cost, gain) in points.items():
            best = name in front
            axes.plot(cost, gain, "o", markersize=8, color=PALETTE[1 if best else 0], alpha=1 if best else 0.55)
        if all(cost > 0 for cost, _ in points.values()):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.5g}")
        axes.margins(x=0.14, y=0.12)
        dress(axes, xlabel, ylabel)
        figure.draw_without_rendering()  # fixes the limits, so that labels can be placed
        _name_points(axes, points, front)
    return Path(path)


def _draw_levels(axes: Axes, levels: Levels) -> None:
    for dashes, (name, height) in zip(itertools.cycle(DASHES[1:]), (levels or {}).items()):
        axes.axhline(height, color="#888888", linestyle=dashes, linewidth=1.2, zorder=0)
        at = axes.get_yaxis_transform()
        axes.text(0.01, height, plain_text(name), transform=at, fontsize=8, color="#666666", va="bottom")


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names of the points that no other beats in both cost (smaller) and gain (larger), cheapest first.

    Costs within a percent count as the same: a few bytes less are no reason to take the worse.
    """
    front: list[str] = []
    for name in sorted(points, key=lambda n: (points[n][0], -points[n][1])):
        if front and points[name][1] <= points[front[-1]][1]:
            continue
        while front and points[name][0] <= 1.01 * points[front[-1]][0]:
            front.pop()
        front.append(name)
    return front


@contextlib.contextmanager
def canvas(path: Path | str, title: str = "", size: tuple[float, float] = (7.0, 4.2)) -> Iterator[Figure]:
    """A figure that is written to `path` at the end, as PNG, SVG or PDF by suffix."""
    path = Path(path)
    if path.suffix not in _UNDATED:
        raise FedgraftError(f"a figure cannot be written as {path.name!r}; end its name in .png, .svg or .pdf.")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        if title:
            figure.suptitle(plain_text(title), x=0.01, ha="left", fontweight="bold")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata=_UNDATED[path.suffix])


def plain_text(label: object) -> str:
    """A label as written: a dollar sign in a name is no formula."""
    return str(label).replace("$", r"\$")


def looks() -> Iterator[tuple[str, str, str]]:
    """Colour, dash and marker for one series after another."""
    for dash in itertools.cycle(DASHES):
        for colour, marker in zip(PALETTE, MARKERS, strict=True):
            yield colour, dash, marker


def plot_lines(axes: Axes, series: Series, styles: Mapping[str, tuple[str, str, str]]) -> dict[str, Any]:
    """Draw the lines; words on the x axis keep the order in which they first appear."""
    need(series, "series")
    every = [x for s in series.values() for x in s[0]]
    # One word among numbers makes all of them names, as in 1, 5, 10, 50, IID.
    names = list(dict.fromkeys(map(str, every))) if any(isinstance(x, str) for x in every) else []
    if names:
        axes.set_xticks(range(len(names)), [plain_text(name) for name in names])
    handles = {}
    for label, (xs, ys, *rest) in series.items():
        x, y = np.array([names.index(str(v)) if names else v for v in xs], dtype=float), _numbers(ys)
        if len(x) != len(y):
            raise FedgraftError(f"the series {label!r} has {len(x)} x values and {len(y)} y values; they must pair up.")
        colour, dash, marker = styles[label]
        seen = np.isfinite(y)  # rounds without an evaluation leave no gap in the line
        mark = marker if seen.sum() <= 15 else ""
        handles[label] = axes.plot(x[seen], y[seen], dash, color=colour, marker=mark, lw=1.8, ms=5)[0]
        if rest and rest[0] is not None:
            band = _numbers(rest[0])[seen]
            axes.fill_between(x[seen], y[seen] - band, y[seen] + band, color=colour, alpha=0.18, linewidth=0)
    return handles


def dress(axes: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    """Name the axes, and the panel if it has a title."""
    axes.set(xlabel=plain_text(xlabel), ylabel=plain_text(ylabel))
    if xlabel in {"round", "epoch"}:  # there is no round 2.5
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(plain_text(title))


def need(data: Any, what: str) -> None:
    """Refuse to draw nothing."""
    if not len(data):
        raise FedgraftError(f"there is nothing to draw: no {what} were given.")


def _paint(
    figure: Figure,
    grids: Mapping[str, np.ndarray],
    xlabel: str = "",
    ylabel: str = "",
    scale: str = "",
    labels: tuple[Sequence[object], Sequence[object]] | None = None,
) -> None:
    """Every matrix in its panel, numbers in the cells where they fit, and one colour bar."""
    finite = np.concatenate([grid[np.isfinite(grid)].ravel() for grid in grids.values()])
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    image = None
    for at, (name, grid) in enumerate(grids.items(), 1):
        axes = figure.add_subplot(1, len(grids), at)
        image = axes.imshow(grid, cmap="YlGnBu", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        dress(axes, xlabel, ylabel if at == 1 else "", name)
        axes.grid(visible=False)
        if labels:
            _name_cells(axes, labels)
        if grid.size <= 150 and grid.shape[1] * len(grids) <= 16:
            _number_cells(axes, grid, low + 0.55 * (high - low))
    assert image is not None
    figure.colorbar(image, ax=figure.axes, label=scale, shrink=0.9, pad=0.02)


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


def _numbers(values: Sequence[Any]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _pair(value: Any) -> tuple[float, float]:
    """Value and error of a bar; a missing bar is a gap."""
    number, error = value if isinstance(value, Sequence) else (value, 0.0)
    return float("nan") if number is None else float(number), float(error or 0.0)


CROWD = 12
"""Points from which on a scatter does not name those that lie on top of each other."""


def _name_points(axes: Axes, points: Mapping[str, tuple[float, float]], bold: Sequence[str]) -> None:
    """Put each name beside its point, at the first of four corners where it covers no point and no earlier name.

    In a crowd a name without such a corner is left out, the bold ones never: letters on letters name nothing.
    """
    from matplotlib.transforms import Bbox

    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in axes.transData.transform(list(points.values()))]
    for name, point in points.items():
        weight = "bold" if name in bold else "normal"
        crowded = len(points) > CROWD and name not in bold
        for dx, dy in ((7, 5), (7, -12), (-7, 5), (-7, -12)):
            look: dict[str, Any] = {"fontsize": 9, "fontweight": weight, "ha": "left" if dx > 0 else "right"}
            text = axes.annotate(plain_text(name), point, (dx, dy), textcoords="offset points", **look)
            box = text.get_window_extent()
            free = not any(box.overlaps(other) for other in taken)
            if free or ((dx, dy) == (-7, -12) and not crowded):
                taken.append(box)
                break
            text.remove()
