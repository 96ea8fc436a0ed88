"""Figures made of lines: curves over rounds, lines over a setting, and several such groups side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgraft.errors import FedgraftError
from fedgraft.report.figures_canvas import canvas, dress, end_labels, looks, need, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = Mapping[str, Sequence[Any]]
"""`{label: (x, y)}` or `{label: (x, y, spread)}`; spread is drawn as a band of plus and minus that much."""
_END_LABELS = 8  # more lines than this are named in a legend beside the axes


def curves(path: Path | str, series: Series, *, xlabel: str = "", ylabel: str = "", title: str = "") -> Path:
    """Lines with a band for the spread, each named at its end."""
    with canvas(path, title) as figure:
        _lines(figure.add_subplot(), series, xlabel, ylabel)
    return Path(path)


def panels(
    path: Path | str, parts: Mapping[str, Series], *, xlabel: str = "", ylabel: str = "", title: str = ""
) -> Path:
    """Several groups of curves side by side on one scale, with one legend for all."""
    need(parts, "panels")
    with canvas(path, title, (max(4.2, 3.6 * len(parts)), 4.4)) as figure:
        shared: Axes | None = None
        handles: dict[str, Any] = {}
        styles = dict(zip(dict.fromkeys(label for part in parts.values() for label in part), looks(), strict=False))
        for context, (name, series) in enumerate(parts.items(), 1):
            axes = figure.add_subplot(1, len(parts), context, sharey=shared)
            shared = shared or axes
            handles |= _plot(axes, series, styles)
            dress(axes, xlabel, ylabel if context == 1 else "", plain_text(name))
            axes.tick_params(labelleft=context == 1)
        figure.legend(
            handles.values(), map(plain_text, handles), loc="outside lower center", ncols=min(5, len(handles))
        )
    return Path(path)


def _lines(axes: Axes, series: Series, xlabel: str, ylabel: str) -> None:
    styles = dict(zip(series, looks(), strict=False))
    handles = _plot(axes, series, styles)
    dress(axes, xlabel, ylabel)
    if 1 < len(series) <= _END_LABELS and len({_last(s[0]) for s in series.values()}) == 1:
        drawn = {label: line.get_xydata() for label, line in handles.items()}
        end_labels(axes, [(label, *points[-1], styles[label][0]) for label, points in drawn.items() if len(points)])
    elif len(series) > 1:
        figure = axes.get_figure(root=True)
        assert figure is not None
        figure.legend(handles.values(), map(plain_text, handles), loc="outside right center")


def _plot(axes: Axes, series: Series, styles: Mapping[str, tuple[str, str, str]]) -> dict[str, Any]:
    """Draw the lines; words on the x axis keep the order in which they first appear."""
    need(series, "series")
    overrides = list(dict.fromkeys(x for s in series.values() for x in s[0] if isinstance(x, str)))
    if overrides:  # one word among numbers makes all of them names, as in 1, 5, 10, 50, IID
        overrides = list(dict.fromkeys(str(x) for s in series.values() for x in s[0]))
        axes.set_xticks(range(len(overrides)), [plain_text(word) for word in overrides])
    handles = {}
    for label, (xs, ys, *rest) in series.items():
        x = np.array([overrides.index(str(v)) if overrides else v for v in xs], dtype=float)
        y = np.array([np.nan if v is None else v for v in ys], dtype=float)
        if len(x) != len(y):
            raise FedgraftError(f"the series {label!r} has {len(x)} x values and {len(y)} y values; they must pair up.")
        colour, dash, marker = styles[label]
        seen = np.isfinite(y)  # rounds without an evaluation leave no gap in the line
        mark = marker if seen.sum() <= 15 else ""
        handles[label] = axes.plot(x[seen], y[seen], dash, color=colour, marker=mark, lw=1.8, ms=5)[0]
        if rest and rest[0] is not None:
            band = np.array([np.nan if v is None else v for v in rest[0]], dtype=float)[seen]
            axes.fill_between(x[seen], y[seen] - band, y[seen] + band, color=colour, alpha=0.18, linewidth=0)
    return handles


def _last(values: Sequence[Any]) -> Any:
    return values[-1] if len(values) else None
