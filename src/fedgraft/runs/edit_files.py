"""Edits as files: what a run changed in its base, stored small, and what can be done with such files.

An edit that leaves the head alone is bound to the backbone only (scope `backbone.`), so it fits any network with that
backbone, whatever its head. One that changes the head is bound to the whole base, head included. A base is a network by
name or folder, or a run folder, which stands for the network that the run began with.
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
from fedgraft.edit import edit_file, lora, task_vectors
from fedgraft.edit.task_vectors import Edit
from fedgraft.metrics.evaluate import Evaluation, evaluate
from fedgraft.models.backbones import load_network
from fedgraft.models.card import Card
from fedgraft.models.network import VisionNetwork
from fedgraft.runs.adapted import Adapted, adapted
from fedgraft.runs.task import Task

BACKBONE = "backbone."
HALF = 1e-3
"""By how much a stored edit may differ from its run: float16 has 11 bits of each value."""


def plain_space(run: Adapted, base: VisionNetwork) -> EditSpace:
    """Return the trained coordinates of a run as an edit space of `base`, a network without adapters.

    Where the run trained low-rank factors, these are the weights that the factors are merged into.
    """
    space = run.opened.space
    layers = lora.adapter_layers(run.network)
    if not layers:
        return space
    plain_names = {name for name, _ in base.named_parameters()}
    trained_names = {part.name for part in space.parts}
    merged_names = {f"{layer}.weight" for layer in layers}
    names = merged_names | (plain_names & trained_names)
    return select(base, lambda name: name in names, buffers=False)


def edit_of_run(folder: Path | str, last: bool = False) -> Edit:
    """Return the difference of a run's best model, or with `last` its last one, to its base; factors are merged."""
    return edit_of(adapted(folder, data=False), Path(folder).resolve().name, last)


def edit_of(run: Adapted, name: str, last: bool = False) -> Edit:
    """Return the difference of an opened run's best model or, with `last`, its last one to its base, called `name`.

    The chosen model stays loaded in the run's network. Raises if it equals the base.
    """
    if last:
        run.opened.context.load_model(run.last)
    base = run.base()
    space = plain_space(run, base)
    scope = ""
    if all(part.name.startswith(BACKBONE) for part, _, _ in space.ranges):
        scope = BACKBONE
    edit = task_vectors.capture(name, base, space, space.gather(run.plain()), scope)
    if not edit.values.any():
        raise _no_edit(name, last)
    return edit


def _no_edit(name: str, last: bool) -> FedgraftError:
    """Return the error for a run, called `name`, whose best (or last) model is the one it began with."""
    model = "best"
    hint = "fedgraft edit save --last takes the model of its last round"
    if last:
        model = "last"
        hint = ""
    return FedgraftError(
        "E-RUN-NO-EDIT",
        f"the {model} model of {name} is the one it began with, so there is no edit to save",
        hint,
        run=name,
        model=model,
    )


@dataclass(frozen=True)
class EditBase:
    """The network an edit is applied to: a name, a folder, or a run folder; the other fields build a named one."""

    model: str
    classes: int | None = None
    image_size: int | None = None
    seed: int = 0

    def load(self, edit: Edit) -> tuple[VisionNetwork, list[str] | None, dict[str, Any]]:
        """Return the unedited network, the names of its classes (None: unknown), and its preprocessing.

        The edit tells the number of classes where the base has no head.
        """
        if (Path(self.model) / "run.json").is_file():
            run = adapted(Path(self.model), data=False)
            return run.base(), list(run.classes), run.setup.task.transform.preprocessor
        classes = self.classes or _classes_of_head(edit)
        try:
            network = load_network(self.model, classes, self.image_size, seed=self.seed)
        except FedgraftError as error:
            if classes is not None or error.code != "E-MODELS-NO-HEAD":
                raise
            raise FedgraftError(
                "E-RUN-EDIT-NO-HEAD",
                f"{self.model!r} has no usable head ({error.message}), and the edit {edit.name!r} brings none",
                "give --classes for a fresh one, or a run folder as the model for the head that run began with",
                model=self.model,
            ) from None
        return network, None, rule_for(network).to_preprocessor(network.mean, network.std)


def _classes_of_head(edit: Edit) -> int | None:
    """Return the number of classes of the head that an edit changes; None if it changes none."""
    for part, _, _ in edit.space.ranges:
        if part.name == "head.weight":
            return part.shape[0]
    return None


def apply_to_folder(edit: Edit, base: EditBase, to: Path, scale: float = 1.0) -> Path:
    """Write base + scale * edit as the new `transformers` folder `to` and return it.

    Raises for a base that the edit does not fit.
    """
    from fedgraft.models.export import export_model

    network, names, preprocessor = base.load(edit)
    task_vectors.apply_edit(network, edit, scale)
    card = Card(f"{base.model} with the edit {edit.name}", "see the edit", network.source, network.licence)
    return export_model(network, to, names, preprocessor, card.text())


MERGE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "sum": (),
    "ties": ("share",),
    "dare": ("share", "seed"),
    "fisher": ("runs", "seed"),
}
"""The rules by which edits are merged, and the options of each."""
SHARES: Mapping[str, tuple[Any, float]] = {"ties": (Share, 0.2), "dare": (Rest, 0.5)}
"""The range and the default of `share` by rule."""


@dataclass(frozen=True)
class MergeRule:
    """How edits become one: their sum, or a merging rule with its number and, for Fisher, the runs they came from."""

    rule: str = "sum"
    share: float | None = None
    """ties: retained of each edit (0.2); dare: dropped (0.5)."""
    runs: tuple[Path, ...] = ()
    samples: int = 256
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.rule not in MERGE_OPTIONS:
            raise FedgraftError(
                "E-RUN-MERGE-RULE",
                f"there is no rule {self.rule!r} to merge edits",
                f"choose {', '.join(MERGE_OPTIONS)}",
                rule=self.rule,
            )
        if self.share is not None:
            self._check_option("share")
            number(f"--share of {self.rule}", SHARES[self.rule][0], self.share)
        if self.runs:
            self._check_option("runs")
        if self.seed is not None:
            self._check_option("seed")

    def _check_option(self, option: str) -> None:
        """Refuse an option that this rule does not have."""
        if option in MERGE_OPTIONS[self.rule]:
            return
        rules = [rule for rule, options in MERGE_OPTIONS.items() if option in options]
        raise FedgraftError(
            "E-RUN-MERGE-OPTION",
            f"--how {self.rule} has no --{option}, which is for {' and '.join(rules)}",
            "leave it out",
            rule=self.rule,
            option=option,
        )

    def merge(self, edits: Sequence[Edit]) -> task_vectors.Merge | None:
        """Return the rule as a function of stacked edits and their weights; None for the sum."""
        if self.rule == "sum":
            return None
        if self.rule == "fisher":
            return self._fisher(edits)
        share = SHARES[self.rule][1]
        if self.share is not None:
            share = self.share
        if self.rule == "ties":
            return lambda rows, weights: merging.ties(rows, weights, share)
        stream = torch_stream(self.seed or 0, "dare")
        return lambda rows, weights: merging.dare(rows, weights, share, stream)

    def _fisher(self, edits: Sequence[Edit]) -> task_vectors.Merge:
        """Return the mean weighted by the Fisher information of each edit's own model on its own images."""
        if len(self.runs) != len(edits):
            raise FedgraftError(
                "E-RUN-MERGE-RUNS",
                "--how fisher weighs by images",
                f"give --runs, the run folder of each of the {len(edits)} edits",
                edits=len(edits),
                runs=len(self.runs),
            )
        models = [model_of_edit(edit, run) for edit, run in zip(edits, self.runs, strict=True)]
        space = task_vectors.union_space([edit.space for edit in edits])
        seed = self.seed or 0
        information = torch.stack([fisher(network, task, space, self.samples, seed) for network, task in models])
        return lambda rows, weights: merging.fisher_mean(rows, weights, information)


def model_of_edit(edit: Edit, folder: Path) -> tuple[VisionNetwork, Task]:
    """Return the model that an edit was saved from, the run's best or last, with its task; refuse another run."""
    run = adapted(folder)
    base = run.base()
    if digest(base, scope=edit.scope, code=False) == edit.base:
        before = edit.space.gather(base)
        for vector in (None, run.last):  # the best is in the network already
            if vector is not None:
                run.opened.context.load_model(vector)
            model = run.plain()
            gap = edit.space.gather(model) - before - edit.values
            if gap.norm() <= HALF * edit.values.norm():
                return model, run.setup.task
    raise FedgraftError(
        "E-RUN-EDIT-OTHER-RUN",
        f"{folder} is not the run of the edit {edit.name!r}: the edit is of neither its best model nor its last",
        "name the run that it was saved from (a sum of edits has none)",
        path=str(folder),
        edit=edit.name,
    )


def fisher(network: VisionNetwork, task: Task, space: EditSpace, samples: int, seed: int) -> Tensor:
    """Return the diagonal Fisher information of a model on the space's coordinates, (space.size,), zero for buffers.

    It is computed on `samples` random training images of its task. The network is bound to the space.
    """
    rows = task.data.train_rows
    order = torch.randperm(len(rows), generator=torch_stream(seed, "fisher_merge"))
    drawn = rows[order[:samples]]
    information = squared_gradients(network, space.bind(network), task.eval_images, drawn)
    return torch.cat([information, torch.zeros(space.size - space.trained)])


def add_files(
    files: Sequence[Path],
    scales: Sequence[float] | None,
    to: Path,
    half: bool = False,
    rule: MergeRule | None = None,
) -> Edit:
    """Merge edits of one base into the new file `to` and return the merged edit; by default it is their sum.

    `scales` multiply the edits, or are the weights of a merging rule; `half` stores float16.
    """
    rule = rule or MergeRule()
    edits = [edit_file.load_edit(file) for file in files]
    if rule.rule != "sum" and scales:
        are_weights = min(scales) >= 0 and 0 < sum(scales) < math.inf
        if not are_weights:
            raise FedgraftError(
                "E-RUN-MERGE-SCALES",
                f"--how {rule.rule} is a mean, so --scales are weights",
                "give none below 0, and not only 0",
                rule=rule.rule,
            )
    merged = task_vectors.add_edits(edits, scales, merge=rule.merge(edits))
    edit_file.save_edit(merged, to, half)
    return merged


def sweep_on_run(edit: Edit, folder: Path, lambdas: Sequence[float]) -> list[tuple[float, Evaluation]]:
    """Return the evaluation of base + lambda * edit on a run's validation images, with the head that run began with."""
    run = adapted(folder)
    rows = run.setup.task.data.validation_rows
    images = run.setup.task.train_images
    if not len(rows):
        raise FedgraftError(
            "E-RUN-NO-VALIDATION",
            f"{folder} held out no validation images to choose a strength by",
            "set data.validation",
            path=str(folder),
        )
    return task_vectors.sweep_scale(run.base(), edit, lambdas, lambda network: evaluate(network, images, rows))
