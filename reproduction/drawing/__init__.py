"""Every figure of the source documents by its number, drawn with `fedgraft.report.figures` from plain data.

`FIGURES` names each kind with its function, title and axes, and `draw("F8", path, data)` makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.report.figures import (
    Series,
    bars,
    canvas,
    curves,
    heatmap,
    heatmaps,
    label_axes,
    line_styles,
    plain_text,
    plot_lines,
    require_data,
    scatter_front,
)
from reproduction.drawing.ranking import ranking
from reproduction.drawing.representations import distribution
from reproduction.drawing.schematics import fedshibu_schematic, pipelines_schematic


@dataclass(frozen=True)
class FigureKind:
    """One kind of figure: what draws it and what stands on it."""

    title: str
    draw: Callable[..., Path]
    xlabel: str = ""
    ylabel: str = ""
    scale: str = ""
    """Label of the colour bar, where there is one."""


def panels(
    path: Path | str, parts: Mapping[str, Series], *, xlabel: str = "", ylabel: str = "", title: str = ""
) -> Path:
    """Several groups of curves side by side on one scale, with one legend for all."""
    require_data(parts, "panels")
    with canvas(path, title, (max(4.2, 3.6 * len(parts)), 4.4)) as figure:
        shared, handles = None, dict[str, Any]()
        styles = dict(
            zip(dict.fromkeys(label for part in parts.values() for label in part), line_styles(), strict=False)
        )
        for at, (name, series) in enumerate(parts.items(), 1):
            axes = figure.add_subplot(1, len(parts), at, sharey=shared)
            shared = shared or axes
            handles |= plot_lines(axes, series, styles)
            label_axes(axes, xlabel, ylabel if at == 1 else "", name)
            axes.tick_params(labelleft=at == 1)
        names = map(plain_text, handles)
        figure.legend(handles.values(), names, loc="outside lower center", ncols=min(5, len(handles)))
    return Path(path)


_ROUND, _ACC, _LOSS, _NC = "round", "accuracy (%)", "loss", "classes per client"
FIGURES: dict[str, FigureKind] = {
    "F1": FigureKind("Validation accuracy by learning rate and scheduler", curves, "epoch", "validation " + _ACC),
    "F2": FigureKind("Test loss by learning rate", curves, "epoch", "test " + _LOSS),
    "F3": FigureKind("Validation accuracy by number of epochs", curves, "epoch", "validation " + _ACC),
    "F4": FigureKind("Sparse centralised training by calibration", panels, "epoch", "validation " + _ACC),
    "F5": FigureKind("Dense against sparse centralised training", curves, "epoch", "validation " + _ACC),
    "F6": FigureKind("FedAvg by local steps J, IID", curves, _ROUND, _ACC),
    "F7": FigureKind("FedAvg by local steps J, IID", curves, _ROUND, _LOSS),
    "F8": FigureKind("FedAvg by classes per client", curves, _ROUND, _ACC),
    "F9": FigureKind("FedAvg by classes per client", curves, _ROUND, _LOSS),
    "F10": FigureKind("FedAvg by local steps J, 10 classes per client", curves, _ROUND, _LOSS),
    "F11": FigureKind("Test accuracy by local steps, IID and non-IID", curves, "local steps J", "test " + _ACC),
    "F12": FigureKind("Sparse FedAvg by sparsity", curves, _ROUND, _ACC),
    "F13": FigureKind("Sparse FedAvg by sparsity", curves, _ROUND, _LOSS),
    "F14": FigureKind("Sparse FedAvg (60 %) by classes per client", curves, _ROUND, _ACC),
    "F15": FigureKind("Global mask strategies", bars, "strategy", "test " + _ACC),
    "F16": FigureKind("Mask strategies, IID", curves, _ROUND, _ACC),
    "F17": FigureKind("Mask strategies, non-IID", curves, _ROUND, _ACC),
    "F18": FigureKind("FedAvg against sparse FedAvg, IID", curves, _ROUND, _ACC),
    "F19": FigureKind("Final accuracy by classes per client", curves, _NC, "test " + _ACC),
    "F20": FigureKind("Centralised and federated training", pipelines_schematic),
    "F21": FigureKind("Secure aggregation against plain FedAvg", bars, "", "test " + _ACC),
    "F22": FigureKind("SVCCA of all clients, by layer", distribution, "layer", "SVCCA"),
    "F23": FigureKind("SVCCA by client and layer", heatmap, "layer", "client", "SVCCA"),
    "F24": FigureKind("Representation drift over rounds", curves, _ROUND, "1 - SVCCA"),
    "F25": FigureKind("Grouped against global extractors", curves, _ROUND, "mean client " + _ACC),
    "F26": FigureKind("FedSHIBU: one round", fedshibu_schematic),
    "F27": FigureKind("Similarity of clients over rounds", heatmaps, "client", "client", "weight"),
    "F28": FigureKind("FedSHIBU against FedBABU by shards per client", curves, "shards per client s", "test " + _ACC),
    "F29": FigureKind("FedAvg with and without similarity weights, s = 5", curves, _ROUND, _ACC),
    "client_classes": FigureKind("Examples by client and class", heatmap, "class", "client", "examples"),
    "layer_density": FigureKind("Share of weights that are trained, by layer", bars, "layer", "density (%)"),
    "mask_overlap": FigureKind("Overlap of masks", heatmap, "mask", "mask", "Jaccard index"),
    "ranking": FigureKind("What each reaches, and what it costs", ranking, "", "test " + _ACC),
    "bytes_accuracy": FigureKind("Accuracy against traffic", scatter_front, "megabytes up and down", "test " + _ACC),
}


def draw(kind: str, path: Path | str, data: Any = None, **options: Any) -> Path:
    """Make a figure of a named kind; options such as `title` or `labels` override the kind's own."""
    if kind not in FIGURES:
        raise FedgraftError(
            "E-REPRODUCTION-FIGURE", f"there is no figure kind {kind!r}", f"there are: {', '.join(FIGURES)}", kind=kind
        )
    arguments = () if data is None else (data,)
    return FIGURES[kind].draw(path, *arguments, **{**texts_of(kind), **options})


def texts_of(kind: str) -> dict[str, str]:
    """Title, axes and scale of a kind, those it has."""
    figure = FIGURES[kind]
    texts = {"title": figure.title, "xlabel": figure.xlabel, "ylabel": figure.ylabel, "scale": figure.scale}
    return {key: text for key, text in texts.items() if text}
