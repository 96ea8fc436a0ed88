"""Figures about what moved: density by layer and by kind of tensor, overlap of masks, accuracy by sparsity and traffic.

Every run is seen as a mask over all parameters of its network, so runs of different scopes can be laid side by side.
Low-rank factors choose no coordinates; such runs appear only where accuracy is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.config.load import Config
from fedgraft.edit.lora import adapted as adapters
from fedgraft.edit.masks import Mask, density_by, overlap
from fedgraft.edit.space import EditSpace
from fedgraft.messages import unpack_bits
from fedgraft.models.network import VisionNetwork
from fedgraft.report.figures import draw
from fedgraft.runs.adapted import adapted
from fedgraft.runs.run_folder import RunFolder


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


def figures_of_runs(runs: Sequence[Path], out: Path, suffix: str = ".png") -> list[Path]:
    """Draw every figure these runs have the data for; returns the files."""
    folders = [RunFolder.open(path) for path in runs]
    seen = [_see(folder) for folder in folders]
    names = _distinct([one.label for one in seen], [folder.path.name for folder in folders])
    seen = [Seen(name, s.folder, s.network, s.mask, s.own) for name, s in zip(names, seen, strict=True)]
    return [
        *_densities([s for s in seen if s.mask is not None], out, suffix),
        *_overlaps(seen, out, suffix),
        *_accuracies(seen, out, suffix),
    ]


def _see(folder: RunFolder) -> Seen:
    run = adapted(folder.path)
    space, stored = run.opening.space, run.opening.opened.stored
    mask = None if adapters(run.network) else whole_mask(run.network, space)
    bits = {name.removeprefix("own/"): value for name, value in stored.items() if name.startswith("own/")}
    own = {f"client {k}": unpack_bits(value, space.trained) for k, value in bits.items()}
    return Seen(label_of(run.job.config), folder, run.network, mask, own)


def label_of(config: Config) -> str:
    """What a run trained, in a few words."""
    trainable = config.trainable
    if trainable.kind == "lora":
        return f"LoRA r={trainable.lora.rank} {trainable.lora.aggregate}"
    if trainable.kind != "sparse":
        return f"last {trainable.blocks} blocks" if trainable.kind == "last_blocks" else str(trainable.kind or "head")
    start = trainable.sparse.adaptive_start
    sparsity = f"{'' if start is None else f'{100 * start:g}-'}{100 * trainable.sparse.sparsity:g} %"
    return f"{trainable.sparse.strategy.replace('_', ' ')} {sparsity}{' own' if trainable.sparse.per_client else ''}"


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


def _densities(seen: Sequence[Seen], out: Path, suffix: str) -> list[Path]:
    """Percent that moves, by layer and by kind of tensor."""
    if not seen:
        return []
    layers = {s.label: _percent(s, lambda n, s=s: layer_name(s.network, n), s.network.block_of) for s in seen}  # type: ignore[misc]
    kinds = {s.label: _percent(s, s.network.layer_kind, s.network.layer_kind) for s in seen}
    moving = {kind for group in kinds.values() for kind, share in group.items() if share}
    kinds = {label: {k: share for k, share in group.items() if k in moving} for label, group in kinds.items()}
    by_kind = {"title": "Share of coordinates that move, by kind of tensor", "xlabel": "kind of tensor"}
    return [
        draw("layer_density", out / f"density_by_layer{suffix}", layers),
        draw("layer_density", out / f"density_by_kind{suffix}", kinds, **by_kind),
    ]


def _percent(one: Seen, group_of: Callable[[str], object], order: Callable[[str], Any]) -> dict[str, float]:
    """Density of each group in percent, groups in order."""
    assert one.mask is not None
    ordered = dict.fromkeys(group_of(name) for name in sorted(one.mask, key=order))
    found = density_by(one.mask, group_of)
    return {str(group): 100 * found[group] for group in ordered}


def _overlaps(seen: Sequence[Seen], out: Path, suffix: str) -> list[Path]:
    """Jaccard index between runs of one network, and between the clients of each run with masks of their own."""
    made = []
    masks = {s.label: s.mask for s in seen if s.mask is not None}
    if len(masks) > 1 and len({str(mask.shapes) for mask in masks.values()}) == 1:
        made.append(_overlap(out / f"overlap_of_runs{suffix}", masks, "Overlap of what the runs train"))
    for s in seen:
        if s.own:
            own = {name: Mask({"space": bits}) for name, bits in s.own.items()}
            file = out / f"overlap_of_clients_{s.folder.path.name}{suffix}"
            made.append(_overlap(file, own, "Overlap of the clients' masks"))
    return made


def _overlap(file: Path, masks: Mapping[str, Mask], title: str) -> Path:
    texts: dict[str, Any] = {"title": title, "xlabel": "", "ylabel": "", "labels": (list(masks), list(masks))}
    return draw("mask_overlap", file, overlap(list(masks.values())).numpy(), **texts)


def _accuracies(seen: Sequence[Seen], out: Path, suffix: str) -> list[Path]:
    """Validation accuracy over rounds, and test accuracy against traffic for runs that are finished."""
    series = {}
    for s in seen:
        lines = [line for line in s.folder.metrics() if line.get("accuracy") is not None]
        if lines:
            series[s.label] = ([x["round"] for x in lines], [100 * x["accuracy"] for x in lines])
    made = []
    if series:
        texts = {"title": "Validation accuracy by what moves", "ylabel": "validation accuracy (%)"}
        made.append(draw("F12", out / f"accuracy_by_round{suffix}", series, **texts))
    points = {}
    for s in seen:
        summary = s.folder.summary()
        sent = (summary.get("bytes_up", 0) + summary.get("bytes_down", 0)) / 1e6
        if sent and "test" in summary:
            points[s.label] = (sent, 100 * summary["test"]["accuracy"])
    return [*made, draw("bytes_accuracy", out / f"accuracy_by_traffic{suffix}", points)] if points else made
