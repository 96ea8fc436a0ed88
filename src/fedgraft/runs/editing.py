"""Opening the edit space of a run: plain parts of the network, a calibrated mask, or low-rank factors.

A mask is calibrated after step 0, through the engine: clients send sums of squared gradients, never examples. The
result is kept on this machine, keyed by everything it depends on, and stored with the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.edit.adaptive import AdaptiveSparsity
from fedgraft.edit.calibrate import Calibration, Mode, average, calibrate, merge, oneshot, progressive
from fedgraft.edit.choose import STRATEGIES, budget, choose, magnitude_scores, random_scores
from fedgraft.edit.fisher import Scores
from fedgraft.edit.masks import Mask, union
from fedgraft.edit.scope import Scope, resolve
from fedgraft.edit.space import EditSpace, masked, select
from fedgraft.errors import FedgraftError
from fedgraft.config import options
from fedgraft.runs.files import keep
from fedgraft.messages import Order, Reply
from fedgraft.models.network import VisionNetwork
from fedgraft.secure_round import Sums

log = logging.getLogger("fedgraft")


@dataclass(frozen=True)
class Opened:
    """A mask with what came of calibrating it; `own` are the clients' masks over the space, where they differ."""

    mask: Mask
    kept: tuple[int, ...] = ()
    energy: float = float("nan")
    negligible: int = 0
    own: Mapping[int, Mask] | None = None


def scope_of(trainable: options.Trainable, network: VisionNetwork) -> Scope:
    """Which tensors the mask may touch, which train densely, which stay frozen."""
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    early = [n for n in shapes if network.block_of(n) < trainable.freeze_blocks] if trainable.freeze_blocks else []
    head = [n for n in shapes if network.block_of(n) > network.depth]
    dense = [*trainable.sparse.dense, *(head if trainable.head_too else ())]
    frozen = [n for n in (*early, *(() if trainable.head_too else head)) if n not in dense]
    return resolve(shapes, trainable.sparse.scope, frozen, dense)


class Calibrator:
    """Asks clients for sensitivities and turns them into a mask."""

    def __init__(self, config: options.Config, network: VisionNetwork, sums: Sums, examples: int) -> None:
        self.config, self.network, self.sums = config, network, sums
        self.scope = scope_of(config.trainable, network)
        self.recipe = config.trainable.sparse
        self.sparsity = self.recipe.sparsity if self.recipe.adaptive_start is None else self.recipe.adaptive_start
        self.share = min(1.0, self.recipe.samples / examples)
        self.whole = select(network, lambda name: True, buffers=False)

    @property
    def mode(self) -> Mode:
        """How many rounds of scores, and what happens between them."""
        r = self.recipe
        if r.calibration == "average":
            return average(r.rounds)
        return progressive(r.rounds, r.schedule, r.soft) if r.calibration == "progressive" else oneshot()

    def settings(self, draw: int) -> dict[str, Any]:
        """What clients are told about scoring."""
        special = {"batch_gradient": "batch_gradient", "single_batch": "single_batch_abs"}
        labels = self.recipe.labels
        return {
            "estimator": special.get(labels, "per_sample"), "labels": "true" if labels in special else labels,
            "draw": draw, "share": self.share, "batch": 16, "names": "\n".join(self.scope.maskable),
        }  # fmt: skip

    def ask(self, draw: int) -> Tensor:
        """The clients' scores for the network's present (perhaps softened) weights, summed."""
        return self.sums.ask("fisher_scores", self.whole.gather(self.network), self.settings(draw))["scores"]

    def own_masks(self, draw: int) -> list[Reply]:
        """Every client's own mask; these cannot be summed."""
        vector, settings = self.whole.gather(self.network), self.settings(draw)
        orders = [Order(self.sums.run, -1, k, "own_mask", "", vector, {}, settings) for k in self.sums.clients]
        return sorted((r for r in self.sums.exchange(orders) if isinstance(r, Reply)), key=lambda r: r.client)

    def scores(self, draw: int) -> Mapping[str, Tensor]:
        """Scores of this draw: summed over clients, or from the weights alone."""
        source = STRATEGIES[self.recipe.strategy].source
        weights = {n: p for n, p in self.network.named_parameters() if n in self.scope.maskable}
        if source == "magnitude":
            return magnitude_scores(weights)
        if source == "random":
            return random_scores({n: tuple(p.shape) for n, p in weights.items()}, self.config.seed)
        shapes = {n: tuple(p.shape) for n, p in weights.items()}
        return Scores.from_vector(self.ask(draw).float(), shapes).mean()

    def calibrate(self, scores: Callable[[int], Mapping[str, Tensor]] | None = None) -> Calibration:
        """The mask these scores give, whether they are everyone's or one client's."""
        r = self.recipe
        weights = {n: p for n, p in self.network.named_parameters() if n in self.scope.maskable}
        rule = {"threshold": r.threshold, "floor": r.floor, "block_of": self.network.block_of}
        if STRATEGIES[r.strategy].source != "fisher":  # the weights decide, whoever asks
            scores = self.scores
        return calibrate(
            scores or self.scores, r.strategy, 1 - self.sparsity, self.mode, scope=self.scope, weights=weights, **rule
        )

    def open(self) -> Opened:
        """One common mask, or the clients' own, merged or kept."""
        r = self.recipe
        if not r.per_client and r.merge == "score_mean":
            found = self.calibrate()
            return Opened(found.mask, found.kept, found.energy, sum(found.negligible.values()))
        shapes = {
            n: tuple(p.shape)
            for n, p in self.network.named_parameters()
            if n in (*self.scope.maskable, *self.scope.dense)
        }
        own = {reply.client: Mask.from_bits(reply.evidence["mask"], shapes) for reply in self.own_masks(1)}
        masks = list(own.values())
        if r.per_client:
            return Opened(union(masks), own=own)
        chosen = [Mask(self.scope.restrict(mask)) for mask in masks]  # tensors trained densely have no vote
        density = 1 - self.sparsity if r.merge == "vote" else None
        return Opened(self.scope.expand(merge(chosen, r.merge, density=density)))

    def lasting(self, space: EditSpace) -> Tensor:
        """Scores of the first draw over a space, by which adaptive sparsity shrinks it; what is dense ranks first."""
        always = math.inf if STRATEGIES[self.recipe.strategy].largest else -math.inf
        dense = {name: torch.full(self.scope.shapes[name], always) for name in self.scope.dense}
        return scores_on(space, {**self.scores(1), **dense})


def open_masked(calibrator: Calibrator, cache: Path, identity: Sequence[str]) -> Opened:
    """The mask of this run, from the cache where the same calibration was done before."""
    c = calibrator
    if c.recipe.per_client:
        return c.open()
    recipe = c.config.trainable.model_dump_json(include={"sparse", "freeze_blocks", "head_too"})
    hidden = ["secure"] if c.config.privacy.aggregation == "secure" else []  # rounded sums give other last bits
    key = hashlib.blake2b(json.dumps([*identity, recipe, c.config.seed, *hidden]).encode(), digest_size=12).hexdigest()
    path = cache / "masks" / f"{key}.safetensors"
    if path.exists():
        try:
            return Opened(Mask.load(path))
        except FedgraftError as error:
            log.warning("the kept mask is unusable and is made anew: %s", error)
    opened = c.open()
    if c.sums.lost:  # not the mask of all clients, so not one for other runs
        return opened
    keep(path, opened.mask.save)
    return opened


def masked_space(network: VisionNetwork, mask: Mask) -> EditSpace:
    """The space of a mask's coordinates."""
    return masked(network, dict(mask.items()))


def own_active(space: EditSpace, own: Mapping[int, Mask]) -> dict[int, Tensor]:
    """Each client's mask as booleans over the coordinates of the common space."""
    return {client: scores_on(space, mask) for client, mask in own.items()}


class Adaptive:
    """Adaptive sparsity: as the clients' drift calms down, fewer coordinates of the space stay active.

    What leaves keeps the value it has and never moves again. The schedule reads the drifts of the rounds so far, so
    a resumed run comes to the same sparsity without state of its own.
    """

    def __init__(self, recipe: options.Sparse, scores: Tensor, scope: Scope) -> None:
        assert recipe.adaptive_start is not None
        self.scores = scores
        sizes = {name: torch.Size(shape).numel() for name, shape in scope.shapes.items()}
        part = {name: sizes[name] // scope.shapes[name][0] * count for name, count in scope.rows.items()}
        self.maskable = sum(part.get(name, sizes[name]) for name in scope.maskable)
        self.dense = sum(sizes[name] for name in scope.dense)
        self.largest = STRATEGIES[recipe.strategy].largest
        self.rule = AdaptiveSparsity(
            recipe.adaptive_start,
            recipe.sparsity,
            recipe.adaptive_step,
            recipe.adaptive_drift,
            recipe.adaptive_patience,
        )

    def active(self, drifts: Sequence[float]) -> Tensor:
        """Booleans over the space after rounds with these drifts."""
        state = self.rule.begin()
        for drift in drifts:
            state = self.rule.after(state, drift)
        count = min(len(self.scores), self.dense + budget(self.maskable, 1 - state.sparsity))
        return choose({"space": self.scores}, k=count, largest=self.largest)["space"]


def scores_on(space: EditSpace, scores: Mapping[str, Tensor]) -> Tensor:
    """Scores by name as one vector over a space."""
    pieces = []
    for part in space.parts:
        flat = scores[part.name].reshape(-1)
        pieces.append(flat if part.index is None else flat[part.index])
    return torch.cat(pieces)
