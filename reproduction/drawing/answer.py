"""The figure of an answer, read in seconds: effects with numbers and verdicts above, what they come from below.

Colour says what the word beside it says: blue supported, orange contradicted, dark equivalent or undecided, and grey
where the gate is not met, so that the number decides nothing. At most 600 pixels high.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from fedgraft.report.figures import INK, MARKERS, PALETTE, canvas, plain_text
from reproduction.drawing.palette import to_palette
from reproduction.verdicts import CONTRADICTED, SUPPORTED, UNMET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Interval = tuple[float, float, float]
"""A number with its lower and upper limit."""
Point = tuple[float | str, Interval]
"""Where on the x axis, and the number there."""
_WIDTH, _TALLEST = 6.9, 3.74
"""Inches, at 160 dots: 1104 pixels wide, at most 600 high."""
_EFFECT, _FRAME, _TITLE = 0.18, 0.5, 0.25
"""Inches for a row of effects, for the titles and axis around them, and for the title of all."""
_SMALL = 7.5
_GREY = "#9A9A9A"
_LETTERS = 44


@dataclass(frozen=True)
class Shown:
    """One effect: its interval, the smallest that matters, and what may be said of it."""

    name: str
    effect: Interval
    margin: float
    word: str
    primary: bool = False

    @property
    def colour(self) -> str:
        """Blue supported, orange contradicted, grey where the gate is not met, else dark."""
        if self.word in UNMET:
            return _GREY
        if self.word.startswith(SUPPORTED):
            return PALETTE[0]
        if self.word.startswith(CONTRADICTED):
            return PALETTE[1]
        return INK

    @property
    def numbers(self) -> str:
        """The effect with its interval and the verdict's words."""
        value, low, high = self.effect
        return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]  {self.word}"


@dataclass(frozen=True)
class Panel:
    """Numbers on real axes: lines or points by name; `rows` instead is one row for each name."""

    title: str
    xlabel: str
    ylabel: str
    series: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    log: bool = False
    joined: bool = True
    rows: Mapping[str, Interval] = field(default_factory=dict)


def answer(path: Path, effects: Sequence[Shown], panels: Sequence[Panel], title: str = "") -> Path:
    """Draw the effects above and the panels side by side below."""
    upper = _FRAME + _EFFECT * len(effects) if effects else 0.0
    lower = _TALLEST - _TITLE - upper if panels else 0.0
    if panels and panels[0].rows:
        lower = min(lower, _FRAME + 0.15 * max(len(panel.rows) for panel in panels))
    height = min(_TALLEST, upper + lower + _TITLE)
    with canvas(path, "", (_WIDTH, height)) as figure:
        figure.suptitle(plain_text(title), x=0.01, ha="left", fontweight="bold", fontsize=9.5)
        parts = [size for size in (upper, lower) if size]
        grid = figure.add_gridspec(len(parts), 1, height_ratios=parts)
        if effects:
            _draw_effects(figure.add_subplot(grid[0]), effects)
        if panels:
            _draw_panels(figure, grid[len(parts) - 1], panels)
    if path.suffix == ".png":
        to_palette(path)
    return path


def _draw_effects(axes: Axes, effects: Sequence[Shown]) -> None:
    """Draw one row for each effect, its margin as a band, its numbers and verdict at the right."""
    places = range(len(effects), 0, -1)
    for place, shown in zip(places, effects, strict=True):
        value, low, high = shown.effect
        axes.barh(place, 2 * shown.margin, left=-shown.margin, height=0.84, color="#EDEDED", zorder=0)
        axes.plot([low, high], [place, place], color=shown.colour, linewidth=2, solid_capstyle="butt")
        axes.plot([value], [place], "o", color=shown.colour, markersize=4.5)
        axes.annotate(
            plain_text(shown.numbers),
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=_SMALL,
            color=shown.colour,
            fontweight="bold" if shown.primary else "normal",
        )
    axes.axvline(0, color=INK, linewidth=0.8, zorder=1)
    axes.set_yticks(list(places), [plain_text(fill(shown.name, _LETTERS)) for shown in effects])
    axes.set_ylim(0.4, len(effects) + 0.6)
    axes.tick_params(labelsize=_SMALL)
    axes.grid(visible=False, axis="y")
    axes.set_title("difference in points, interval, verdict (band: too small to matter)", fontsize=_SMALL, loc="left")


def _draw_panels(figure: Figure, place: object, panels: Sequence[Panel]) -> None:
    """Draw the panels side by side, with one scale and one legend for all."""
    grid = place.subgridspec(1, len(panels))  # type: ignore[attr-defined]
    first: Axes | None = None
    for at, panel in enumerate(panels):
        axes = figure.add_subplot(grid[at], sharey=first)
        if panel.rows:
            dots(axes, panel.rows, {}, 4)
        else:
            first = first or axes
            _draw_series(axes, panel)
        axes.set_title(plain_text(panel.title), fontsize=_SMALL + 0.5, loc="left")
        axes.set_ylabel(plain_text(panel.ylabel) if at == 0 else "", fontsize=_SMALL)
        axes.tick_params(labelsize=_SMALL, labelleft=at == 0 or bool(panel.rows))
    figure.supxlabel(plain_text(panels[0].xlabel), fontsize=_SMALL + 0.5)
    last = figure.axes[-1]
    if not panels[-1].rows and panels[-1].joined:
        last.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=_SMALL, borderaxespad=0.2)


def _draw_series(axes: Axes, panel: Panel) -> None:
    """Draw lines, or points that carry their names where they are not joined."""
    for index, (name, points) in enumerate(panel.series.items()):
        colour = PALETTE[index % len(PALETTE)]
        marker = MARKERS[index % len(MARKERS)]
        x = [point[0] for point in points]
        middle = [point[1][0] for point in points]
        below = [point[1][0] - point[1][1] for point in points]
        above = [point[1][2] - point[1][0] for point in points]
        line = "-" if panel.joined else ""
        axes.errorbar(
            x,
            middle,
            [below, above],
            fmt=line + marker,
            color=colour,
            markersize=4,
            linewidth=1.2,
            label=plain_text(name),
        )
    if panel.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda number, place: f"{number:g}")
        axes.xaxis.set_minor_formatter("")  # numbers between the decades would lie over each other
        if panel.joined:
            measured = sorted({float(point[0]) for points in panel.series.values() for point in points})
            axes.set_xticks(measured)
    if not panel.joined:
        _name_points(axes, {name: (float(points[0][0]), points[0][1][0]) for name, points in panel.series.items()})


def _name_points(axes: Axes, places: Mapping[str, tuple[float, float]]) -> None:
    """Write each point's name and height beside it, those that would overlap one above the other."""
    heights = [height for _, height in places.values()]
    room = 0.085 * (max(heights) - min(heights))
    axes.set_ylim(min(heights) - room, max(heights) + room)
    axes.set_xlim(right=axes.get_xlim()[1] * (1.6 if axes.get_xscale() == "log" else 1.15))
    written: list[tuple[float, float]] = []
    for name, (x, height) in sorted(places.items(), key=lambda item: -item[1][1]):
        near = [other for other_x, other in written if abs(other_x - x) <= 0.2 * x]
        crowded = sum(abs(other_x - x) <= 0.2 * x for other_x, _ in places.values()) > 2
        at = min([height + (room if crowded and not near else 0.0), *(other - room for other in near)])
        written.append((x, at))
        axes.annotate(
            plain_text(f"{height:.1f} {name}"),
            (x, height),
            (-8 if crowded else 6, 0) if at == height else (x / 1.05, at),
            textcoords="offset points" if at == height else "data",
            fontsize=_SMALL - 0.5,
            va="center",
            ha="right" if crowded else "left",
        )


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
