"""The look all figures share: a palette that colour-blind readers can tell apart, sizes, end labels, writing a file."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.errors import FedgraftError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, which vanishes on white; further series repeat it with another dash.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK = "#222222"
SUFFIXES = (".png", ".svg", ".pdf")
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 11, "axes.titlesize": 12, "axes.labelsize": 11,
    "xtick.labelsize": 10, "ytick.labelsize": 10, "legend.fontsize": 10, "figure.titlesize": 13,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888", "text.color": INK,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.titlelocation": "left", "legend.frameon": False,
    "savefig.dpi": 160, "svg.fonttype": "none", "svg.hashsalt": "fedgraft", "pdf.fonttype": 42,
}  # fmt: skip


@contextlib.contextmanager
def canvas(path: Path | str, title: str = "", size: tuple[float, float] = (7.0, 4.2)) -> Iterator[Figure]:
    """A figure that is written to `path` at the end, as PNG, SVG or PDF by suffix; the same data, the same bytes."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise FedgraftError(f"a figure cannot be written as {path.name!r}; end its name in .png, .svg or .pdf.")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        if title:
            figure.suptitle(plain_text(title), x=0.01, ha="left", fontweight="bold")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix]
        figure.savefig(path, metadata=undated)


def plain_text(label: object) -> str:
    """A label as written: a dollar sign in a name is no formula."""
    return str(label).replace("$", r"\$")


def looks() -> Iterator[tuple[str, str, str]]:
    """Colour, dash and marker for one series after another."""
    for dash in itertools.cycle(DASHES):
        for colour, marker in zip(PALETTE, MARKERS, strict=True):
            yield colour, dash, marker


def end_labels(axes: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Name each line (label, last x, last y, colour) at its right end, pushed apart where lines end close together."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # fixes the limits
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends, key=lambda end: end[2])
    places = spread([float(to_axes.transform((x, y))[1]) for _, x, y, _ in ends], 0.068)
    for (name, x, y, colour), context in zip(ends, places, strict=True):
        axes.annotate(
            plain_text(name), xy=(x, y), xytext=(1.02, context), xycoords="data", textcoords="axes fraction",
            va="center", color=colour, fontsize=10, fontweight="bold", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "alpha": 0.7},
        )  # fmt: skip


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions at least `gap` apart, in the same order, as close to the wanted ones as blocks of neighbours allow."""
    blocks: list[tuple[float, int]] = []  # (centre, number of labels)
    for context in wanted:
        centre, count = context, 1
        while blocks and blocks[-1][0] + gap * blocks[-1][1] / 2 > centre - gap * count / 2:
            other, number = blocks.pop()
            centre, count = (other * number + centre * count) / (number + count), number + count
        blocks.append((centre, count))
    return [centre + gap * (i - (count - 1) / 2) for centre, count in blocks for i in range(count)]


def dress(axes: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    """Name the axes, and the panel if it has a title."""
    axes.set(xlabel=plain_text(xlabel), ylabel=plain_text(ylabel))
    if xlabel in {"round", "epoch"}:  # there is no round 2.5
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title)


def need(data: Any, what: str) -> None:
    """Refuse to draw nothing."""
    if not len(data):
        raise FedgraftError(f"there is nothing to draw: no {what} were given.")
