"""Figures about what was trained: density by layer and by kind of tensor, overlap of masks, accuracy and traffic.

Every run is treated as a mask over all parameters of its network, so runs of different scopes can be compared.
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
from fedgraft.edit.lora import adapter_layers
from fedgraft.edit.masks import Mask, density_by, overlap
from fedgraft.models.network import VisionNetwork
from fedgraft.report.figures import bars, curves, heatmap, scatter_front
from fedgraft.runs.adapted import adapted
from fedgraft.runs.folder import RunFolder


@dataclass(frozen=True)
class MaskedRun:
    """One run as the figures need it."""

    label: str
    folder: RunFolder
    network: VisionNetwork
    mask: Mask | None
    """Over every parameter of the network; None for low-rank factors."""
    client_masks: Mapping[str, Tensor] = field(default_factory=dict)
    """The clients' own masks over the space, where they differ."""


def figures_of_runs(runs: Sequence[Path], out: Path) -> list[Path]:
    """Draw every figure these runs have the data for into the folder `out`; return the files."""
    folders = [RunFolder.open(path) for path in runs]
    opened = [_open(folder) for folder in folders]
    labels = _distinct([run.label for run in opened], [folder.path.name for folder in folders])
    labelled = [replace(run, label=label) for label, run in zip(labels, opened, strict=True)]
    return [
        *_density_figures(labelled, out),
        *_overlap_figures(labelled, out),
        *_validation_figures(labelled, out),
        *_traffic_figures(labelled, out),
    ]


def _open(folder: RunFolder) -> MaskedRun:
    """Open the model of a run folder again and return its masks, as the figures need them."""
    run = adapted(folder.path)
    space = run.opened.space
    mask = None
    if not adapter_layers(run.network):
        mask = whole_mask(run.network, space)
    client_masks = {}
    for name, bits in run.opened.trainable.stored.items():
        if name.startswith("own/"):
            client_masks[f"client {name.removeprefix('own/')}"] = unpack_bits(bits, space.trained)
    return MaskedRun(run.setup.algorithm.trainable.label, folder, run.network, mask, client_masks)


def _distinct(labels: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the labels if they tell the runs apart, else the folders' names, else numbered ones."""
    if len(set(labels)) == len(labels):
        return list(labels)
    if len(set(names)) == len(names):
        return list(names)
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def whole_mask(network: VisionNetwork, space: EditSpace) -> Mask:
    """Return the trained coordinates of a space as a mask over every parameter of the network."""
    mask = {}
    for name, parameter in network.named_parameters():
        mask[name] = torch.zeros(parameter.shape, dtype=torch.bool)
    for part in space.parts:
        flat = mask[part.name].view(-1)
        if part.index is None:
            flat[:] = True
        else:
            flat[part.index] = True
    return Mask(mask)


def _density_figures(runs: Sequence[MaskedRun], out: Path) -> list[Path]:
    """Draw the percentage of weights that is trained, by layer and by kind of tensor; return the files in `out`."""
    by_layer: dict[str, dict[str, float]] = {}
    by_kind: dict[str, dict[str, float]] = {}
    for run in runs:
        if run.mask is not None:
            by_layer[run.label] = _layer_density(run.network, run.mask)
            kind_of = run.network.layer_kind
            by_kind[run.label] = _density(run.mask, kind_of, kind_of)
    if not by_layer:
        return []
    return [
        _density_figure(out / "density_by_layer.png", by_layer, "layer"),
        _density_figure(out / "density_by_kind.png", _trained_groups(by_kind), "kind of tensor"),
    ]


def _density_figure(file: Path, groups: Mapping[str, Mapping[str, float]], dimension: str) -> Path:
    """Draw the percentage of weights that is trained, by run and group, and return `file`.

    `groups` are run -> group -> percent, `dimension` says in words what the groups are ("layer").
    """
    title = f"Share of weights that are trained, by {dimension}"
    return bars(file, groups, xlabel=dimension, ylabel="trained (%)", title=title)


def _layer_density(network: VisionNetwork, mask: Mask) -> dict[str, float]:
    """Return the density of each layer in percent, from the first to the head."""
    return _density(mask, network.layer_name, network.block_of)


def _density(mask: Mask, group_of: Callable[[str], object], order: Callable[[str], Any]) -> dict[str, float]:
    """Return the density of each group in percent, by the group's name.

    `group_of` returns the group of a parameter's name, `order` its sort key.
    """
    densities = density_by(mask, group_of)
    ordered = {}
    for name in sorted(mask, key=order):
        group = group_of(name)
        ordered[str(group)] = 100 * densities[group]
    return ordered


def _trained_groups(by_label: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return run -> group -> density without the groups that no run trains; `by_label` has all of them."""
    trained: set[str] = set()
    for densities in by_label.values():
        trained.update(group for group, percent in densities.items() if percent)
    rest = {}
    for label, densities in by_label.items():
        rest[label] = {group: percent for group, percent in densities.items() if group in trained}
    return rest


def _overlap_figures(runs: Sequence[MaskedRun], out: Path) -> list[Path]:
    """Draw the Jaccard index between runs of one network, and between the clients of each run with own masks.

    Return the files in `out`.
    """
    files = []
    masks = {run.label: run.mask for run in runs if run.mask is not None}
    networks = {str(mask.shapes) for mask in masks.values()}
    if len(masks) > 1 and len(networks) == 1:
        files.append(_overlap_figure(out / "overlap_of_runs.png", masks, "Overlap of what the runs train"))
    for run in runs:
        if run.client_masks:
            client_masks = {name: Mask({"space": bits}) for name, bits in run.client_masks.items()}
            file = out / f"overlap_of_clients_{run.folder.path.name}.png"
            files.append(_overlap_figure(file, client_masks, "Overlap of the clients' masks"))
    return files


def _overlap_figure(file: Path, masks: Mapping[str, Mask], title: str) -> Path:
    """Draw the Jaccard index of each pair of masks as a heat map and return `file`."""
    labels = (list(masks), list(masks))
    return heatmap(file, overlap(list(masks.values())).numpy(), title=title, scale="Jaccard index", labels=labels)


def _validation_figures(runs: Sequence[MaskedRun], out: Path) -> list[Path]:
    """Draw validation accuracy and loss over rounds; return the files in `out`."""
    files = []
    for key, ylabel, factor in (("accuracy", "validation accuracy (%)", 100), ("loss", "validation loss", 1)):
        series = {}
        for run in runs:
            lines = [line for line in run.folder.metrics() if line.get(key) is not None]
            if lines:
                rounds = [line["round"] for line in lines]
                series[run.label] = (rounds, [factor * line[key] for line in lines])
        if series:
            title = f"Validation {key} by what is trained"
            files.append(curves(out / f"{key}_by_round.png", series, xlabel="round", ylabel=ylabel, title=title))
    return files


def _traffic_figures(runs: Sequence[MaskedRun], out: Path) -> list[Path]:
    """Draw test accuracy against traffic for runs that are finished; return the file in `out`, if there is one."""
    points = {}
    for run in runs:
        summary = run.folder.summary()
        megabytes = (summary.get("bytes_up", 0) + summary.get("bytes_down", 0)) / 1e6
        if megabytes and "test" in summary:
            points[run.label] = (megabytes, 100 * summary["test"]["accuracy"])
    if not points:
        return []
    file = scatter_front(
        out / "accuracy_by_traffic.png",
        points,
        title="Accuracy against traffic",
        xlabel="megabytes up and down",
        ylabel="test accuracy (%)",
    )
    return [file]
