"""Figures about what was trained: density by layer and by kind of tensor, overlap of masks, accuracy and traffic.

Every run is seen as a mask over all parameters of its network, so runs of different scopes can be laid side by side.
Low-rank factors choose no coordinates; such runs appear only where accuracy is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.core.messages import unpack_bits
from fedgraft.core.space import EditSpace
from fedgraft.edit.lora import adapter_layers as adapters
from fedgraft.edit.masks import Mask, density_by, overlap
from fedgraft.models.network import VisionNetwork
from fedgraft.report.figures import bars, curves, heatmap, scatter_front
from fedgraft.runs.adapted import adapted
from fedgraft.runs.folder import RunFolder

_SHARE = "Share of weights that are trained"


@dataclass(frozen=True)
class Seen:
    """One run as the figures need it."""

    label: str
    folder: RunFolder
    network: VisionNetwork
    mask: Mask | None
    """Over every parameter of the network; None for low-rank factors."""
    own: Mapping[str, Tensor] = field(default_factory=dict)
    """The clients' own masks over the space, where they differ."""


def figures_of_runs(runs: Sequence[Path], out: Path) -> list[Path]:
    """Draw every figure these runs have the data for; returns the files."""
    folders = [RunFolder.open(path) for path in runs]
    seen = [_see(folder) for folder in folders]
    names = _distinct([one.label for one in seen], [folder.path.name for folder in folders])
    seen = [replace(one, label=name) for name, one in zip(names, seen, strict=True)]
    return [*_densities([s for s in seen if s.mask is not None], out), *_overlaps(seen, out), *_results(seen, out)]


def _see(folder: RunFolder) -> Seen:
    run = adapted(folder.path)
    space, stored = run.opened.space, run.opened.trainable.stored
    mask = None if adapters(run.network) else whole_mask(run.network, space)
    bits = {name.removeprefix("own/"): value for name, value in stored.items() if name.startswith("own/")}
    own = {f"client {k}": unpack_bits(value, space.trained) for k, value in bits.items()}
    return Seen(run.setup.algorithm.trainable.label, folder, run.network, mask, own)


def _distinct(labels: Sequence[str], names: Sequence[str]) -> list[str]:
    """Labels where they tell the runs apart, else the folders' names, else numbered ones."""
    chosen = list(labels) if len(set(labels)) == len(labels) else list(names)
    return chosen if len(set(chosen)) == len(chosen) else [f"{name} ({i})" for i, name in enumerate(chosen, 1)]


def whole_mask(network: VisionNetwork, space: EditSpace) -> Mask:
    """The trained coordinates of a space as a mask over every parameter of the network."""
    mask = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in network.named_parameters()}
    for part in space.parts:
        flat = mask[part.name].view(-1)
        flat[slice(None) if part.index is None else part.index] = True
    return Mask(mask)


def layer_name(network: VisionNetwork, name: str) -> str:
    """The layer of a parameter, in words."""
    block = network.block_of(name)
    return {-1: "embeddings", network.depth: "final norm", network.depth + 1: "head"}.get(block, f"block {block}")


def _densities(seen: Sequence[Seen], out: Path) -> list[Path]:
    """Percent that is trained, by layer and by kind of tensor."""
    if not seen:
        return []
    layers = {s.label: _percent(s, lambda n, s=s: layer_name(s.network, n), s.network.block_of) for s in seen}  # type: ignore[misc]
    kinds = {s.label: _percent(s, s.network.layer_kind, s.network.layer_kind) for s in seen}
    trained = {kind for group in kinds.values() for kind, share in group.items() if share}
    kinds = {label: {k: share for k, share in group.items() if k in trained} for label, group in kinds.items()}
    return [
        bars(out / f"density_by_{file}.png", groups, xlabel=what, ylabel="trained (%)", title=f"{_SHARE}, by {what}")
        for file, what, groups in (("layer", "layer", layers), ("kind", "kind of tensor", kinds))
    ]


def _percent(one: Seen, group_of: Callable[[str], object], order: Callable[[str], Any]) -> dict[str, float]:
    """Density of each group in percent, groups in order."""
    assert one.mask is not None
    ordered = dict.fromkeys(group_of(name) for name in sorted(one.mask, key=order))
    found = density_by(one.mask, group_of)
    return {str(group): 100 * found[group] for group in ordered}


def _overlaps(seen: Sequence[Seen], out: Path) -> list[Path]:
    """Jaccard index between runs of one network, and between the clients of each run with masks of their own."""
    made = []
    masks = {s.label: s.mask for s in seen if s.mask is not None}
    if len(masks) > 1 and len({str(mask.shapes) for mask in masks.values()}) == 1:
        made.append(_overlap(out / "overlap_of_runs.png", masks, "Overlap of what the runs train"))
    for s in seen:
        if s.own:
            own = {name: Mask({"space": bits}) for name, bits in s.own.items()}
            file = out / f"overlap_of_clients_{s.folder.path.name}.png"
            made.append(_overlap(file, own, "Overlap of the clients' masks"))
    return made


def _overlap(file: Path, masks: Mapping[str, Mask], title: str) -> Path:
    names = (list(masks), list(masks))
    return heatmap(file, overlap(list(masks.values())).numpy(), title=title, scale="Jaccard index", labels=names)


def _results(seen: Sequence[Seen], out: Path) -> list[Path]:
    """Validation accuracy and loss over rounds, and test accuracy against traffic for runs that are finished."""
    made = []
    for key, ylabel, factor in (("accuracy", "validation accuracy (%)", 100), ("loss", "validation loss", 1)):
        lines = {s.label: [line for line in s.folder.metrics() if line.get(key) is not None] for s in seen}
        series = {n: ([x["round"] for x in f], [factor * x[key] for x in f]) for n, f in lines.items() if f}
        if series:
            title = f"Validation {key} by what is trained"
            made.append(curves(out / f"{key}_by_round.png", series, xlabel="round", ylabel=ylabel, title=title))
    points = {}
    for s in seen:
        summary = s.folder.summary()
        sent = (summary.get("bytes_up", 0) + summary.get("bytes_down", 0)) / 1e6
        if sent and "test" in summary:
            points[s.label] = (sent, 100 * summary["test"]["accuracy"])
    if points:
        title, xlabel, ylabel = "Accuracy against traffic", "megabytes up and down", "test accuracy (%)"
        file = out / "accuracy_by_traffic.png"
        made.append(scatter_front(file, points, title=title, xlabel=xlabel, ylabel=ylabel))
    return made
