"""Figures for papers, from plain data to a PNG, SVG or PDF file: curves, bars, heat maps, cost against gain.

Colours are those of Okabe and Ito, which colour-blind readers can distinguish. The same data gives the same bytes, and
matplotlib's global settings stay unchanged. Charts of the HTML report are drawn by the page itself (`charts`).
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
"""Reference heights that are drawn across the whole figure, by name."""
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
    """Draw lines with a band for the spread and write the figure; return its path.

    The legend has the order in which the lines end. `levels` are named heights that are drawn across.
    """
    with canvas(path, title) as figure:
        axes = figure.add_subplot()
        _draw_levels(axes, levels)
        handles = plot_lines(axes, series, dict(zip(series, line_styles(), strict=False)))
        label_axes(axes, xlabel, ylabel)
        if len(series) > 1:
            names = sorted(handles, key=lambda name: _last_height(handles[name]))
            figure.legend([handles[name] for name in names], map(plain_text, names), loc="outside right center")
    return Path(path)


def _last_height(line: Any) -> float:
    """Return the sort key of a line in the legend: the highest end first, empty lines last."""
    heights = line.get_ydata()
    if not len(heights):
        return math.inf
    return -float(heights[-1])


def bars(
    path: Path | str, groups: Mapping[str, Mapping[str, Any]], *, xlabel: str = "", ylabel: str = "", title: str = ""
) -> Path:
    """Draw bars with error bars, `{series: {category: value or (value, error)}}`, and return the path."""
    require_data(groups, "bars")
    names: dict[str, None] = {}
    for group in groups.values():
        names |= dict.fromkeys(group)
    categories = list(names)
    width = 0.8 / len(groups)
    crowded = len(categories) > 6 or max(map(len, categories)) * len(categories) > 60
    with canvas(path, title, (max(5.0, 1.6 + 0.9 * len(categories) ** 0.9), 4.2)) as figure:
        axes = figure.add_subplot()
        for i, (name, group) in enumerate(groups.items()):
            values = []
            errors = []
            for category in categories:
                value, error = _pair(group.get(category))
                values.append(value)
                errors.append(error)
            error_bars = None
            if any(errors):
                error_bars = errors
            drawn = axes.bar(
                np.arange(len(categories)) + (i - (len(groups) - 1) / 2) * width,
                values,
                width * 0.92,
                color=PALETTE[i % len(PALETTE)],
                label=plain_text(name),
                capsize=3,
                yerr=error_bars,
                error_kw={"ecolor": INK, "elinewidth": 1.2},
            )
            if len(categories) * len(groups) <= 12:
                axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=9)
        turned: dict[str, Any] = {}
        if crowded:
            turned = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(categories)), [plain_text(category) for category in categories], **turned)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
        label_axes(axes, xlabel, ylabel)
        if len(groups) > 1:
            columns = 4
            if figure.get_figwidth() < 8:
                columns = 2
            figure.legend(loc="outside lower center", ncols=min(columns, len(groups)))
    return Path(path)


def heatmaps(path: Path | str, matrices: Mapping[str, Any], *, title: str = "", **texts: Any) -> Path:
    """Draw matrices side by side on one colour scale and return the path.

    `texts` are `xlabel`, `ylabel`, `scale` (the label of the colour bar) and `labels` (of rows, of columns).
    """
    require_data(matrices, "matrices")
    grids = {}
    for name, matrix in matrices.items():
        grids[name] = np.atleast_2d(np.asarray(matrix, dtype=float))
    rows, columns = next(iter(grids.values())).shape
    panel_width = float(np.clip(0.32 * columns, 3.2, 8.0))
    panel_height = float(np.clip(0.32 * rows, 2.6, 8.0))
    with canvas(path, title, (panel_width * len(grids) + 1.6, panel_height + 1.1)) as figure:
        _draw_heatmaps(figure, grids, **texts)
    return Path(path)


def heatmap(path: Path | str, matrix: Any, **options: Any) -> Path:
    """Draw one matrix and return the path; the options are those of `heatmaps`."""
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
    """Draw points (cost, gain), cost on a logarithmic axis, with the Pareto front as a line; return the path.

    `levels` are named heights that are drawn across.
    """
    require_data(points, "points")
    front = pareto(points)
    with canvas(path, title) as figure:
        axes = figure.add_subplot()
        _draw_levels(axes, levels)
        front_costs = []
        front_gains = []
        for name in front:
            cost, gain = points[name]
            front_costs.append(cost)
            front_gains.append(gain)
        axes.step(front_costs, front_gains, where="post", color="#AAAAAA", zorder=1)
        for name, (cost, gain) in points.items():
            colour = PALETTE[0]
            alpha = 0.55
            if name in front:
                colour = PALETTE[1]
                alpha = 1
            axes.plot(cost, gain, "o", markersize=8, color=colour, alpha=alpha)
        if all(cost > 0 for cost, _ in points.values()):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.5g}")
        axes.margins(x=0.14, y=0.12)
        label_axes(axes, xlabel, ylabel)
        figure.draw_without_rendering()  # fixes the limits, so that labels can be placed
        _name_points(axes, points, front)
    return Path(path)


def _draw_levels(axes: Axes, levels: Levels) -> None:
    """Draw named heights as dashed lines across the axes."""
    for dashes, (name, height) in zip(itertools.cycle(DASHES[1:]), (levels or {}).items()):
        axes.axhline(height, color="#888888", linestyle=dashes, linewidth=1.2, zorder=0)
        transform = axes.get_yaxis_transform()
        axes.text(0.01, height, plain_text(name), transform=transform, fontsize=8, color="#666666", va="bottom")


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the points that no other beats in both cost (smaller) and gain (larger), cheapest first.

    Costs within a percent count as equal: a few bytes less are no reason to take the worse.
    """
    front: list[str] = []
    for name in sorted(points, key=lambda point: (points[point][0], -points[point][1])):
        if front and points[name][1] <= points[front[-1]][1]:
            continue
        while front and points[name][0] <= 1.01 * points[front[-1]][0]:
            front.pop()
        front.append(name)
    return front


@contextlib.contextmanager
def canvas(path: Path | str, title: str = "", size: tuple[float, float] = (7.0, 4.2)) -> Iterator[Figure]:
    """Yield a figure of `size` inches that is written to `path` at the end, as PNG, SVG or PDF by suffix."""
    path = Path(path)
    if path.suffix not in _UNDATED:
        raise FedgraftError(
            "E-REPORT-FIGURE-SUFFIX",
            f"a figure cannot be written as {path.name!r}",
            "end its name in .png, .svg or .pdf",
            path=str(path),
        )
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
    """Return a label in which a dollar sign does not begin a formula."""
    return str(label).replace("$", r"\$")


def line_styles() -> Iterator[tuple[str, str, str]]:
    """Yield colour, dash and marker for one series after another."""
    for dash in itertools.cycle(DASHES):
        for colour, marker in zip(PALETTE, MARKERS, strict=True):
            yield colour, dash, marker


def plot_lines(axes: Axes, series: Series, styles: Mapping[str, tuple[str, str, str]]) -> dict[str, Any]:
    """Draw the series on these axes and return the line objects by label.

    `styles` gives colour, dash and marker by label. If an x is a text, all are names, in the order in which they first
    appear.
    """
    require_data(series, "series")
    all_x: list[Any] = []
    for values in series.values():
        all_x += values[0]
    names: list[str] = []
    # One text among numbers makes all of them names, as in 1, 5, 10, 50, IID.
    if any(isinstance(x, str) for x in all_x):
        names = list(dict.fromkeys(map(str, all_x)))
    if names:
        axes.set_xticks(range(len(names)), [plain_text(name) for name in names])
    handles = {}
    for label, (xs, ys, *rest) in series.items():
        if names:
            xs = [names.index(str(x)) for x in xs]
        x = np.array(list(xs), dtype=float)
        y = _numbers(ys)
        if len(x) != len(y):
            raise FedgraftError(
                "E-REPORT-SERIES-LENGTH",
                f"the series {label!r} has {len(x)} x values and {len(y)} y values",
                "pass as many of each",
                series=label,
            )
        colour, dash, marker = styles[label]
        present = np.isfinite(y)  # rounds without an evaluation leave no gap in the line
        if present.sum() > 15:
            marker = ""
        handles[label] = axes.plot(x[present], y[present], dash, color=colour, marker=marker, lw=1.8, ms=5)[0]
        if rest and rest[0] is not None:
            band = _numbers(rest[0])[present]
            low = y[present] - band
            high = y[present] + band
            axes.fill_between(x[present], low, high, color=colour, alpha=0.18, linewidth=0)
    return handles


def label_axes(axes: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    """Write the labels of both axes and the title of the panel; rounds and epochs get whole numbers."""
    axes.set(xlabel=plain_text(xlabel), ylabel=plain_text(ylabel))
    if xlabel in {"round", "epoch"}:  # there is no round 2.5
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(plain_text(title))


def require_data(data: Any, what: str) -> None:
    """Raise if there is no data to draw; `what` names the data in the error."""
    if not len(data):
        raise FedgraftError("E-REPORT-NOTHING-TO-DRAW", f"there are no {what} to draw", "pass at least one")


def _draw_heatmaps(
    figure: Figure,
    grids: Mapping[str, np.ndarray],
    xlabel: str = "",
    ylabel: str = "",
    scale: str = "",
    labels: tuple[Sequence[object], Sequence[object]] | None = None,
) -> None:
    """Draw every matrix in its panel, numbers in the cells if they fit, and one colour bar.

    `grids` are the matrices by title, `scale` is the label of the colour bar, `labels` name rows and columns.
    """
    finite = np.concatenate([grid[np.isfinite(grid)].ravel() for grid in grids.values()])
    low = 0.0
    high = 1.0
    if finite.size:
        low = float(finite.min())
        high = float(finite.max())
    image = None
    for panel, (name, grid) in enumerate(grids.items(), 1):
        axes = figure.add_subplot(1, len(grids), panel)
        image = axes.imshow(grid, cmap="YlGnBu", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        if panel == 1:
            label_axes(axes, xlabel, ylabel, name)
        else:
            label_axes(axes, xlabel, "", name)
        axes.grid(visible=False)
        if labels:
            _name_cells(axes, labels)
        if grid.size <= 150 and grid.shape[1] * len(grids) <= 16:
            _number_cells(axes, grid, low + 0.55 * (high - low))
    assert image is not None
    figure.colorbar(image, ax=figure.axes, label=scale, shrink=0.9, pad=0.02)


def _name_cells(axes: Axes, labels: tuple[Sequence[object], Sequence[object]]) -> None:
    """Write the names of rows and columns, `labels`, at the axes, with at most thirty names per side."""
    rows = [plain_text(name) for name in labels[0]]
    columns = [plain_text(name) for name in labels[1]]
    row_step = max(1, -(-len(rows) // 30))
    column_step = max(1, -(-len(columns) // 30))
    rotation = 0
    if max(map(len, columns), default=0) > 3:
        rotation = 90
    axes.set_yticks(range(0, len(rows), row_step), rows[::row_step])
    axes.set_xticks(range(0, len(columns), column_step), columns[::column_step], rotation=rotation)


def _number_cells(axes: Axes, grid: np.ndarray, middle: float) -> None:
    """Write each cell's number, in white above `middle`."""
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            text = f"{value:.2f}"
            if float(value).is_integer():
                text = f"{value:.0f}"
            ink = INK
            if value > middle:
                ink = "white"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink)


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """Return the values as floats, NaN for None."""
    return np.array(values, dtype=float)  # numpy turns None into NaN


def _pair(value: Any) -> tuple[float, float]:
    """Return value and error of a bar; NaN, which is a gap, for a missing one."""
    number = value
    error = 0.0
    if isinstance(value, Sequence):
        number, error = value
    if number is None:
        number = math.nan
    return float(number), float(error or 0.0)


_CORNERS = (((7, 5), "left"), ((7, -12), "left"), ((-7, 5), "right"), ((-7, -12), "right"))
"""Offsets and alignments of a point's name, in the order in which they are tried."""
CROWD = 12
"""With more points than this, a scatter does not name points whose names would overlap."""


def _name_points(axes: Axes, points: Mapping[str, tuple[float, float]], bold: Sequence[str]) -> None:
    """Write each name beside its point, at the first of four corners where it covers no point and no earlier name.

    With many points, a name without such a corner is left out, unless it is in `bold`.
    """
    from matplotlib.transforms import Bbox

    taken = []
    for x, y in axes.transData.transform(list(points.values())):
        taken.append(Bbox.from_bounds(x - 6, y - 6, 12, 12))
    for name, point in points.items():
        weight = "normal"
        may_be_left_out = len(points) > CROWD
        if name in bold:
            weight = "bold"
            may_be_left_out = False
        for offset, align in _CORNERS:
            text = axes.annotate(
                plain_text(name),
                point,
                offset,
                textcoords="offset points",
                fontsize=9,
                fontweight=weight,
                ha=align,
            )
            box = text.get_window_extent()
            free = not any(box.overlaps(other) for other in taken)
            is_last_corner = (offset, align) == _CORNERS[-1]
            if free or (is_last_corner and not may_be_left_out):
                taken.append(box)
                break
            text.remove()
