"""Edits as files: what a run did to its base, saved small, and what can be done with such files.

An edit that leaves the head alone is bound to the backbone only (scope `backbone.`), so it fits any network with that
backbone, whatever its head. One that moves the head is bound to the whole base, head included. A base is a network by
name or folder, or a run folder, which stands for what that run began with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.aggregate import merging
from fedgraft.client.observe import squared_gradients
from fedgraft.core.errors import FedgraftError
from fedgraft.core.network_digest import digest
from fedgraft.core.ranges import Rest, Share, number
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import EditSpace, select
from fedgraft.data.pixels.transforms import rule_for
from fedgraft.edit import edit_file as task_file
from fedgraft.edit import lora
from fedgraft.edit import task_vectors as task
from fedgraft.edit.task_vectors import Edit
from fedgraft.metrics.evaluate import Evaluation, evaluate
from fedgraft.models.backbones import load_network
from fedgraft.models.card import Card
from fedgraft.models.network import VisionNetwork
from fedgraft.runs.adapted import Adapted, adapted
from fedgraft.runs.task import Task

BACKBONE = "backbone."
HALF = 1e-3
"""By how much a stored edit may differ from its run: float16 keeps 11 bits of each value."""


def plain_space(found: Adapted, base: VisionNetwork) -> EditSpace:
    """The run's coordinates by the names of the plain network; low-rank factors become the weights they change."""
    space = found.opened.space
    layers = lora.adapter_layers(found.network)
    if not layers:
        return space
    plain = {name for name, _ in base.named_parameters()}
    names = {f"{name}.weight" for name in layers} | (plain & {part.name for part in space.parts})
    return select(base, lambda name: name in names, buffers=False)


def edit_of_run(folder: Path | str, last: bool = False) -> Edit:
    """What a run did to its base, by its best model on validation or its last; low-rank factors count as merged."""
    return edit_of(adapted(folder, data=False), Path(folder).resolve().name, last)


def edit_of(found: Adapted, name: str, last: bool = False) -> Edit:
    """What an opened run did to its base."""
    if last:
        found.opened.context.load_model(found.last)
    base = found.base()
    space = plain_space(found, base)
    scope = BACKBONE if all(part.name.startswith(BACKBONE) for part, _, _ in space.ranges) else ""
    edit = task.capture(name, base, space, space.gather(found.plain()), scope)
    if not edit.values.any():
        raise FedgraftError(
            f"the {'last' if last else 'best'} model of {name} is the one it began with, so there is no edit to save"
            + ("." if last else "; fedgraft edit save --last takes the model of its last round.")
        )
    return edit


@dataclass(frozen=True)
class Base:
    """Where an edit goes: a network's name or folder, or a run folder; the rest says how to build a named one."""

    model: str
    classes: int | None = None
    image_size: int | None = None
    seed: int = 0

    def load(self, edit: Edit) -> tuple[VisionNetwork, list[str] | None, dict[str, Any]]:
        """The network, unedited, the names of its classes where they are known, and its preprocessing."""
        if (Path(self.model) / "run.json").is_file():
            found = adapted(Path(self.model), data=False)
            return found.base(), list(found.classes), found.setup.task.transform.preprocessor
        moved = {part.name: part.shape for part, _, _ in edit.space.ranges}
        classes = self.classes or moved.get("head.weight", (None,))[0]
        try:
            network = load_network(self.model, classes, self.image_size, seed=self.seed)
            return network, None, rule_for(network).to_preprocessor(network.mean, network.std)
        except FedgraftError as error:
            if classes is not None or "no stored head" not in str(error):
                raise
            raise FedgraftError(
                f"{self.model!r} has no head of its own and the edit {edit.name!r} brings none: give --classes for a "
                "fresh one, or a run folder as the model for the head that run began with."
            ) from None


def apply_to_folder(edit: Edit, base: Base, to: Path, scale: float = 1.0) -> Path:
    """Write base + scale * edit as a `transformers` folder; a base the edit does not fit is refused."""
    from fedgraft.models.export import export_model

    network, names, preprocessor = base.load(edit)
    task.apply_edit(network, edit, scale)
    card = Card(f"{base.model} with the edit {edit.name}", "see the edit", network.source, network.licence)
    return export_model(network, to, names, preprocessor, card.text())


WAYS: Mapping[str, tuple[str, ...]] = {
    "sum": (),
    "ties": ("share",),
    "dare": ("share", "seed"),
    "fisher": ("runs", "seed"),
}
"""How edits become one, and which options that has."""
SHARES: Mapping[str, tuple[Any, float]] = {"ties": (Share, 0.2), "dare": (Rest, 0.5)}


@dataclass(frozen=True)
class How:
    """How edits become one: their sum, or a merging rule with its number and, for Fisher, the runs they came from."""

    rule: str = "sum"
    share: float | None = None
    """ties: kept of each edit (0.2); dare: dropped (0.5)."""
    runs: tuple[Path, ...] = ()
    samples: int = 256
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.rule not in WAYS:
            raise FedgraftError(f"edits are added as {', '.join(WAYS)}, not {self.rule!r}.")
        for option, said in (("share", self.share), ("runs", self.runs or None), ("seed", self.seed)):
            if said is not None and option not in WAYS[self.rule]:
                takers = " and ".join(rule for rule, own in WAYS.items() if option in own)
                raise FedgraftError(f"--how {self.rule} has no --{option}, which is for {takers}; leave it out.")
        if self.share is not None:
            number(f"--share of {self.rule}", SHARES[self.rule][0], self.share)

    def merge(self, edits: Sequence[Edit]) -> task.Merge | None:
        """The rule on stacked edits; None for the sum."""
        seed, usual = self.seed or 0, SHARES.get(self.rule, (None, 0.0))[1]
        share = usual if self.share is None else self.share
        if self.rule == "sum":
            return None
        if self.rule == "ties":
            return lambda rows, weights: merging.ties(rows, weights, share)
        if self.rule == "dare":
            stream = torch_stream(seed, "dare")
            return lambda rows, weights: merging.dare(rows, weights, share, stream)
        if len(self.runs) != len(edits):
            raise FedgraftError(
                f"--how fisher weighs by images: give --runs, the run folder of each of the {len(edits)} edits."
            )
        found = [own_model(edit, run) for edit, run in zip(edits, self.runs, strict=True)]
        space = task.union_space([edit.space for edit in edits])
        information = torch.stack([fisher(one, space, self.samples, seed) for one in found])
        return lambda rows, weights: merging.fisher_mean(rows, weights, information)


def own_model(edit: Edit, folder: Path) -> tuple[VisionNetwork, Task]:
    """The model that the edit is of, its run's best or last, by the values the edit holds; another's run is refused."""
    found = adapted(folder)
    base = found.base()
    if digest(base, scope=edit.scope, code=False) == edit.base:
        before = edit.space.gather(base)
        for vector in (None, found.last):  # the best is in the network already
            if vector is not None:
                found.opened.context.load_model(vector)
            model = found.plain()
            gap = edit.space.gather(model) - before - edit.values
            if gap.norm() <= HALF * edit.values.norm():
                return model, found.setup.task
    raise FedgraftError(
        f"{folder} is not the run of the edit {edit.name!r}: the edit is of neither its best model nor its last; "
        "name the run that it was saved from (a sum of edits has none)."
    )


def fisher(model: tuple[VisionNetwork, Task], space: EditSpace, samples: int, seed: int) -> Tensor:
    """The diagonal Fisher information of a model on these coordinates, on the training images of its task."""
    network, images = model[0], model[1].eval_images
    rows = model[1].data.train_rows
    rows = rows[torch.randperm(len(rows), generator=torch_stream(seed, "fisher_merge"))[:samples]]
    known = squared_gradients(network, space.bind(network), images, rows)
    return torch.cat([known, torch.zeros(space.size - space.trained)])


def add_files(
    files: Sequence[Path], scales: Sequence[float] | None, to: Path, half: bool = False, how: How | None = None
) -> Edit:
    """Edits of one base as one new file: their sum, or what a merging rule makes of them."""
    edits, how = [task_file.load_edit(file) for file in files], how or How()
    if how.rule != "sum" and scales and not (min(scales) >= 0 < sum(scales) < math.inf):
        raise FedgraftError(f"--how {how.rule} is a mean, so --scales are weights: give none below 0, and not only 0.")
    total = task.add_edits(edits, scales, merge=how.merge(edits))
    task_file.save_edit(total, to, half)
    return total


def sweep_on_run(edit: Edit, folder: Path, lambdas: Sequence[float]) -> list[tuple[float, Evaluation]]:
    """Accuracy of base + lambda * edit on a run's validation images, with the head that run began with."""
    found = adapted(folder)
    rows, images = found.setup.task.data.validation_rows, found.setup.task.train_images
    if not len(rows):
        raise FedgraftError(f"{folder} held out no validation images to choose a strength by; set data.validation.")
    return task.sweep_scale(found.base(), edit, lambdas, lambda network: evaluate(network, images, rows))
