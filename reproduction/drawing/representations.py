"""Figures about representations, from what a run leaves: alignment by client and layer, and mixing matrices.

Alignment stands in every line of metrics.jsonl (FedAlignAvg with scores of the clients): its distribution by layer
(F22), by client and layer (F23), and its distance to one over rounds (F24). Of mixing (FedSHIBU) the matrices of a few
rounds lie beside the run and are drawn side by side (F27).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.report.figures import (
    INK,
    PALETTE,
    canvas,
    curves,
    heatmap,
    heatmaps,
    label_axes,
    plain_text,
    require_data,
)
from fedgraft.report.representation_figures import by_client, read_mixing
from fedgraft.report.run_view import read_config
from fedgraft.runs.folder import RunFolder

Lines = Sequence[Mapping[str, Any]]


def draw_of_run(name: str, run: Path, path: Path, **texts: str) -> bool:
    """Draw `svcca_layers`, `svcca_clients`, `drift` or `mixing` of a run; False where it has no such numbers."""
    folder = RunFolder.open(run)
    lines = [line for line in folder.metrics() if line.get("alignment")]
    if name == "mixing":
        kept = read_mixing(run, read_config(folder)["partition"]["clients"])
        return bool(kept) and bool(heatmaps(path, kept, **texts))
    if not lines:
        return False
    means = by_client(lines)
    layers = list(next(iter(means.values())))
    if name == "svcca_clients":
        matrix = [[scores[layer] for layer in layers] for scores in means.values()]
        heatmap(path, matrix, labels=(list(means), layers), **texts)
    elif name == "svcca_layers":
        distribution(path, {layer: [scores[layer] for scores in means.values()] for layer in layers}, **texts)
    else:
        curves(path, drift(lines), **texts)
    return True


def drift(lines: Lines) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """1 - SVCCA by layer over rounds: the mean over the round's clients, and their standard deviation."""
    rounds = [line["round"] for line in lines]
    series = {}
    for layer in lines[0]["alignment"]:
        scores = [np.asarray(line["alignment"][layer], dtype=float) for line in lines]
        series[layer] = (rounds, [float(1 - s.mean()) for s in scores], [float(s.std()) for s in scores])
    return series


def distribution(
    path: Path | str, groups: Mapping[str, Sequence[float]], *, xlabel: str = "", ylabel: str = "", title: str = ""
) -> Path:
    """A box with its points per group, for example the scores of all clients at each layer."""
    require_data(groups, "groups")
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
        label_axes(axes, xlabel, ylabel)
    return Path(path)
