"""Sparse fine-tuning as a trainable: selected coordinates of the blocks (Fisher masks, TaLoS calibration).

The mask is calibrated from sums of squared gradients that clients send, never from examples; or it follows from the
weights or the seed alone. There is one common mask, one mask per client, or a sparsity that rises as drift decreases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from fedgraft.aggregate.slots import count_mean
from fedgraft.core import ranges
from fedgraft.core.arguments import checked_names
from fedgraft.core.capabilities import Capabilities, Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import pack_bits
from fedgraft.core.protocols import Network
from fedgraft.core.ranges import Count, Few, Inner, Number, Positive, Rest, Unit
from fedgraft.core.registry import TRAINABLES
from fedgraft.core.roles import WORDS
from fedgraft.core.space import EditSpace, masked, select
from fedgraft.core.state import EVERYONE, ServerState
from fedgraft.edit.adaptive import AdaptiveSparsity
from fedgraft.edit.calibrate import Calibration, CalibrationMode, average, calibrate, merge_masks, oneshot, progressive
from fedgraft.edit.choose import choose, coordinate_budget, strategy_named
from fedgraft.edit.fisher import Scores
from fedgraft.edit.masks import Mask, union
from fedgraft.edit.scope import Scope, matches, resolve
from fedgraft.edit.trainable import (
    Ask,
    Rates,
    RoundRobinMasks,
    TrainableSetup,
    affordable_units,
    check_blocks,
    frozen_early,
    is_head,
    required_to_combine,
    training,
)

_BATCH_LABELS = {"batch_gradient": "batch_gradient", "single_batch": "single_batch_abs"}
"""Values of the option `labels` that name an estimator over batches instead."""

Active = Callable[[ServerState], Mapping[int, Tensor]]
"""The coordinates that may change in the coming round by client, as packed bits."""


@checked_names("sparse")
@dataclass(frozen=True)
class Sparse:
    """Train a fraction 1 - `sparsity` of the weights in scope, chosen by `strategy`; `head` is trained whole."""

    strategy: str = "least_sensitive"
    """least_sensitive, most_sensitive, lowest_magnitude, highest_magnitude, random, saliency (score times weight), or
    a registered name"""
    sparsity: Rest = 0.9
    """fraction of the weights in scope that is frozen"""
    scope: tuple[str, ...] = ("blocks",)
    """tensors that the mask chooses from: blocks, qk, attention, mlp, norm, bias, globs"""
    dense: tuple[str, ...] = ()
    """tensors that are trained whole beside the mask"""
    threshold: Literal["global", "per_tensor", "per_block"] = "global"
    """over which weights the scores are compared"""
    floor: Rest = 0.0
    """least fraction trained in every tensor; the total stays the same"""
    labels: Literal["true", "sampled", "expected", "rademacher", "logit", "batch_gradient", "single_batch"] = (
        "rademacher"
    )
    """estimator of the Fisher information"""
    samples: Count = 1024
    """images that are scored, over all clients"""
    batch: Count = 16
    """images of one batch of scores; `labels="single_batch"` scores each client's first batch alone"""
    calibration: Literal["oneshot", "average", "progressive"] = "progressive"
    """how the mask follows from the scores of several rounds"""
    rounds: Count = 4
    """calibration rounds"""
    schedule: Literal["exponential", "linear"] = "exponential"
    """how fast the mask shrinks over the calibration rounds"""
    soft: Unit = 0.1
    """factor on excluded weights between calibration rounds"""
    per_client: bool = False
    """each client has its own mask"""
    merge: Literal["score_mean", "union", "intersection", "vote"] = "score_mean"
    """how the clients' scores become one mask"""
    fill: Literal["count", "zero"] = "count"
    """per_client: average a coordinate over the clients that train it, or over all clients"""
    adaptive_start: Rest | None = None
    """start at this sparsity and rise to `sparsity` as the clients' drift decreases"""
    adaptive_step: Inner = 0.1
    """adaptive_start: increase of the sparsity at a time"""
    adaptive_drift: Positive = 0.5
    """adaptive_start: relative drift below which a round counts as calm"""
    adaptive_patience: Count = 2
    """adaptive_start: calm rounds in a row before the sparsity rises"""
    budgets: tuple[Few, ...] = ()
    """bytes of the clients' updates, assigned in turn; each client trains the part of the mask that fits"""
    head: bool = True
    freeze_blocks: Number = 0
    seed: int = 0
    kind = "sparse"
    rates = Rates(0.1, 0.001, small=True)  # insensitive weights have to move far

    def __post_init__(self) -> None:
        ranges.check_ranges(self, "trainable.sparse")
        if self.per_client and self.merge != "score_mean":
            self._refuse("merge", "own masks (per_client) are not merged", "leave merge at 'score_mean'")
        if self.per_client and self.adaptive_start is not None:
            self._refuse("adaptive_start", "adaptive sparsity shrinks one common mask", "leave per_client off")
        if self.budgets and (self.per_client or self.adaptive_start is not None):
            self._refuse("budgets", "budgets cut one common mask to size", "leave per_client and adaptive_start out")
        if self.adaptive_start is not None and self.adaptive_start > self.sparsity:
            self._refuse("adaptive_start", "the sparsity starts at adaptive_start and rises", "lower adaptive_start")

    @staticmethod
    def _refuse(option: str, reason: str, hint: str) -> NoReturn:
        """Raise the error about options that exclude each other."""
        raise FedgraftError("E-EDIT-SPARSE-OPTIONS", f"trainable.sparse.{option}: {reason}", hint, option=option)

    @property
    def provides(self) -> Capabilities:
        """What is trained. Coordinates differ with own masks, budgets or a rising sparsity; own masks are counted."""
        own_masks = self.per_client or bool(self.budgets)
        return training(
            self.head,
            body=True,
            fixed_coordinates=not own_masks and self.adaptive_start is None,
            averaged_updates=not own_masks or self.fill == "zero",
        )

    @property
    def requires(self) -> Capabilities:
        """Each update where coordinates differ."""
        return required_to_combine(self.provides)

    @property
    def instead(self) -> str:
        """The setting under which all clients train the same coordinates."""
        if self.per_client:
            return "trainable.sparse.per_client=false"
        if self.budgets:
            return "trainable.sparse.budgets=[]"
        if self.adaptive_start is not None:
            return "trainable.sparse.adaptive_start=none"
        return ""

    @property
    def label(self) -> str:
        """Strategy and sparsity."""
        strategy = self.strategy.replace("_", " ")
        percent = f"{100 * self.sparsity:g}"
        if self.adaptive_start is not None:
            percent = f"{100 * self.adaptive_start:g}-{percent}"
        label = f"{strategy} {percent} %"
        if self.per_client:
            label += " own"
        return label

    @property
    def asks(self) -> Mapping[str, int]:
        """The client actions that opening needs: each client's mask, or sums of scores, one more if adaptive."""
        actions = {}
        score_sums = 0
        if self.per_client or self.merge != "score_mean":
            actions["own_mask"] = 1
        else:
            score_sums += self.rounds
        if self.adaptive_start is not None:
            score_sums += 1
        if self.scores_data and score_sums:
            actions["fisher_scores"] = score_sums
        return actions

    @property
    def scores_data(self) -> bool:
        """Whether the scores are computed from the clients' images."""
        return strategy_named(self.strategy).scores is None

    def check(self, network: Network) -> None:
        """Raise an error for more blocks than the network has, and for an unknown strategy."""
        check_blocks(network, freeze_blocks=self.freeze_blocks)
        strategy_named(self.strategy)

    def open(self, network: Network, ask: Ask | None, saved: Mapping[str, Tensor] | None = None) -> TrainableSetup:
        """Return the edit space of the mask: as in `saved`, as cached on this machine, or calibrated now.

        `ask` sends the requests for scores to the clients; None is possible only with a saved mask.
        """
        self.check(network)
        stored: dict[str, Tensor] = dict(saved or {})
        notes: tuple[str, ...] = ()
        if "mask" not in stored:
            if ask is None:
                raise FedgraftError(
                    "E-EDIT-SPARSE-MASK",
                    "a sparse edit has no mask, and no client can be asked for scores here",
                    "pass the tensors that were stored when the space was opened",
                )
            stored, notes = self._choose(network, ask)
        mask = Mask.from_bits(stored["mask"], self._shapes(network))
        space = masked(network, dict(mask.items()))
        aggregator = None
        if Capability.AVERAGED_UPDATES not in self.provides:
            aggregator = count_mean()
        return TrainableSetup(space, stored, self._active(network, stored), aggregator, mask=mask, notes=notes)

    def _active(self, network: Network, stored: Mapping[str, Tensor]) -> Active | None:
        """Return the function that gives the active coordinates of a round; None if all are always active.

        `stored` holds what calibration left: scores, or the clients' own masks as bits.
        """
        if self.adaptive_start is not None and not self.per_client:
            return self._rising_sparsity(network, stored["scores"])
        if self.per_client:
            own_bits: dict[int, Tensor] = {}
            for name, bits in stored.items():
                if name.startswith("own/"):
                    own_bits[int(name.removeprefix("own/"))] = bits
            return lambda state: own_bits
        if self.budgets:
            budget_bits = self._within_budgets(network, stored["scores"])
            return lambda state: budget_bits
        return None

    # ---- choosing -------------------------------------------------------------------------------------------------

    def _choose(self, network: Network, ask: Ask) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return the tensors to store about the chosen mask (`TrainableSetup.stored`), and notes for the log.

        The clients are asked for scores or masks, unless a common mask is cached on this machine.
        """
        if self.per_client:
            own_masks = self._own_masks(network, ask)
            common = union(list(own_masks.values()))
            space = masked(network, dict(common.items()))
            own_stored = {"mask": common.bits()}
            for client, mask in own_masks.items():
                own_stored[f"own/{client}"] = pack_bits(on_space(space, mask).bool())
            return own_stored, ()
        notes: list[str] = []

        def make() -> dict[str, Tensor]:
            """Return the common mask, calibrated now."""
            return {"mask": self._common_mask(network, ask, notes).bits()}

        recipe = asdict(self)
        del recipe["budgets"]  # they do not change the mask
        stored = ask.cached([json.dumps(recipe, sort_keys=True)], make)
        if self.adaptive_start is not None or self.budgets:
            mask = Mask.from_bits(stored["mask"], self._shapes(network))
            stored["scores"] = self._scores_on_mask(network, ask, mask)
        return stored, tuple(notes)

    def _common_mask(self, network: Network, ask: Ask, notes: list[str]) -> Mask:
        """Return one mask for all clients: from summed scores, or merged from the clients' own masks.

        A sentence about a calibrated mask is appended to `notes`.
        """
        scope = self.scope_on(network)
        if self.merge == "score_mean":
            calibration = self.calibrated(network, lambda draw: self._scores(network, ask, draw), ask.seed)
            mask = calibration.mask
            share = 100 * scope.density(mask)
            without_effect = sum(calibration.negligible.values())
            notes.append(
                f"mask {self.strategy}: {mask.count} of {mask.total} coordinates move ({share:.2f} % of "
                f"the network), energy share {calibration.energy:.3g}, {without_effect} without effect"
            )
            return mask
        own_masks = self._own_masks(network, ask).values()
        restricted = [Mask(scope.restrict(mask)) for mask in own_masks]  # dense parts do not vote
        density = None
        if self.merge == "vote":
            density = 1 - self.sparsity
        return scope.expand(merge_masks(restricted, self.merge, density=density))

    def _own_masks(self, network: Network, ask: Ask) -> dict[int, Mask]:
        """Return a mask for each client, requested from it and calibrated on its own images."""
        all_parameters = select(network, lambda name: True, buffers=False)
        shapes = self._shapes(network)
        size = sum(math.prod(shape) for shape in shapes.values())
        answers = ask.each("own_mask", all_parameters.gather(network), self.settings(network, 1, ask), size)
        received = {}
        for client in sorted(answers):
            received[client] = Mask.from_bits(answers[client]["mask"], shapes)
        if not received:
            raise FedgraftError(
                "E-EDIT-NO-CLIENT-MASK",
                "no client sent a usable mask, so there is nothing to train",
                "check why the clients refused, or use one common mask (trainable.sparse.per_client=false)",
            )
        # A client without a valid response works with the mask of the first client that has one.
        fallback = received[min(received)]
        masks = {}
        for client in range(ask.clients):
            masks[client] = received.get(client, fallback)
        return masks

    def calibrated(
        self, network: Network, scores: Callable[[int], Mapping[str, Tensor]], seed: int | None = None
    ) -> Calibration:
        """Return the mask that these scores give, summed over clients or one client's own, and figures about it.

        `scores(round)` returns the scores by tensor in a calibration round; strategies that need no data ignore it.
        `seed` is that of a random mask; None: `self.seed`. Weights are scaled in place during progressive calibration
        and restored.
        """
        scope = self.scope_on(network)
        weights = self._maskable_weights(network)
        strategy = strategy_named(self.strategy)
        scores_by_draw = lambda draw: strategy.finish(scores(draw), weights)  # noqa: E731
        if strategy.scores is not None:  # scores of the weights alone, the same on every machine
            if seed is None:
                seed = self.seed
            fixed_scores = strategy.scores(weights, seed)
            scores_by_draw = lambda draw: fixed_scores  # noqa: E731
        start = self.sparsity
        if self.adaptive_start is not None:
            start = self.adaptive_start
        rule = {"threshold": self.threshold, "floor": self.floor, "block_of": network.block_of}
        return calibrate(scores_by_draw, self.strategy, 1 - start, self.mode, scope=scope, weights=weights, **rule)

    def _maskable_weights(self, network: Network) -> dict[str, Tensor]:
        """Return the maskable parameters by name, in the network's order."""
        maskable = self.scope_on(network).maskable
        weights: dict[str, Tensor] = {}
        for name, parameter in network.named_parameters():
            if name in maskable:
                weights[name] = parameter
        return weights

    @property
    def mode(self) -> CalibrationMode:
        """How many rounds of scores are computed, and how the mask shrinks between them."""
        if self.calibration == "average":
            return average(self.rounds)
        if self.calibration == "progressive":
            return progressive(self.rounds, self.schedule, self.soft)
        return oneshot()

    def settings(self, network: Network, draw: int, ask: Ask) -> dict[str, Any]:
        """Return the settings of a request for scores, by name; `draw` numbers the draw of images.

        The share of images is that of `samples` among all (`ask.examples`).
        """
        labels = self.labels
        if labels in _BATCH_LABELS:
            labels = "true"
        return {
            "estimator": _BATCH_LABELS.get(self.labels, "per_sample"),
            "labels": labels,
            "draw": draw,
            "share": min(1.0, self.samples / ask.examples),
            "batch": self.batch,
            "names": "\n".join(self.scope_on(network).maskable),
        }

    def _scores(self, network: Network, ask: Ask, draw: int) -> Mapping[str, Tensor]:
        """Return the clients' summed scores, per sample, for the network's present (perhaps softened) weights.

        The clients are asked; `draw` numbers the draw of images.
        """
        all_parameters = select(network, lambda name: True, buffers=False)
        settings = self.settings(network, draw, ask)
        sums = ask.sums("fisher_scores", all_parameters.gather(network), settings)["scores"]
        shapes = {name: tuple(weight.shape) for name, weight in self._maskable_weights(network).items()}
        return Scores.from_vector(sums.float(), shapes).mean()

    # ---- scope and adaptive sparsity --------------------------------------------------------------------------------

    def scope_on(self, network: Network) -> Scope:
        """Return which tensors the mask may touch, which are trained densely, and which are frozen.

        A name or glob in `dense` is trained whole even in frozen blocks (the class token beside `freeze_blocks`); a
        keyword such as "norm" speaks of the blocks that are not frozen.
        """
        shapes = {}
        head = []
        early = []
        for name, parameter in network.named_parameters():
            shapes[name] = tuple(parameter.shape)
            if is_head(network, name):
                head.append(name)
            elif frozen_early(network, name, self.freeze_blocks):
                early.append(name)
        keywords = [pattern for pattern in self.dense if pattern in WORDS]
        globs = [pattern for pattern in self.dense if pattern not in WORDS]
        frozen = [name for name in (early if self.head else early + head) if not matches(name, globs)]
        dense = head if self.head else []
        dense += [name for name in shapes if matches(name, keywords) and name not in frozen]
        unknown = [word for word in keywords if not any(matches(name, [word]) for name in shapes)]  # refused there
        return resolve(shapes, self.scope, frozen, [*dense, *globs, *unknown])

    def first_block(self, network: Network) -> int:
        """Return the first block with a maskable or densely trained tensor."""
        return min(network.block_of(name) for name in self._shapes(network))

    def _shapes(self, network: Network) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the maskable and densely trained tensors."""
        scope = self.scope_on(network)
        names = {*scope.maskable, *scope.dense}
        shapes = {}
        for name, parameter in network.named_parameters():
            if name in names:
                shapes[name] = tuple(parameter.shape)
        return shapes

    def _scores_on_mask(self, network: Network, ask: Ask, mask: Mask) -> Tensor:
        """Return one score per coordinate of the mask's space, by which it shrinks; dense tensors rank first."""
        strategy = strategy_named(self.strategy)
        if strategy.scores is not None:
            scores = dict(strategy.scores(self._maskable_weights(network), ask.seed))
        else:
            scores = dict(strategy.finish(self._scores(network, ask, 1), self._maskable_weights(network)))
        best_score = -math.inf
        if strategy.largest:
            best_score = math.inf
        scope = self.scope_on(network)
        for name in scope.dense:
            scores[name] = torch.full(scope.shapes[name], best_score)
        return on_space(masked(network, dict(mask.items())), scores)

    def _within_budgets(self, network: Network, scores: Tensor) -> Mapping[int, Tensor]:
        """Return by client, as packed bits, the coordinates that fit its budget in bytes.

        These are all dense ones, then the best by score.
        """
        scope = self.scope_on(network)
        dense = sum(math.prod(scope.shapes[name]) for name in scope.dense)
        counts = []
        for units in affordable_units(self.budgets, dense):
            counts.append(min(len(scores), dense + units))
        bits = {count: self._best_coordinates(scores, count) for count in set(counts)}
        return RoundRobinMasks([bits[count] for count in counts])

    def _best_coordinates(self, scores: Tensor, count: int) -> Tensor:
        """Return the `count` best coordinates of the space by the strategy, as packed bits."""
        largest = strategy_named(self.strategy).largest
        return pack_bits(choose({"space": scores}, k=count, largest=largest)["space"])

    def _rising_sparsity(self, network: Network, scores: Tensor) -> Active:
        """Return the function from the server's state to the active coordinates: fewer as the clients' drift decreases.

        Other coordinates keep their value. The schedule reads the drifts of all rounds so far, so a resumed run arrives
        at the same sparsity.
        """
        scope = self.scope_on(network)
        sizes = {name: math.prod(shape) for name, shape in scope.shapes.items()}
        maskable = 0
        for name in scope.maskable:
            if name in scope.rows:
                maskable += sizes[name] // scope.shapes[name][0] * scope.rows[name]
            else:
                maskable += sizes[name]
        dense = sum(sizes[name] for name in scope.dense)
        assert self.adaptive_start is not None
        schedule = AdaptiveSparsity(
            self.adaptive_start, self.sparsity, self.adaptive_step, self.adaptive_drift, self.adaptive_patience
        )

        def active(state: ServerState) -> Mapping[int, Tensor]:
            """Return the coordinates that train in the coming round as packed bits, under `EVERYONE`."""
            adaptive = schedule.begin()
            for drift in state.drifts:
                adaptive = schedule.after(adaptive, drift)
            count = min(len(scores), dense + coordinate_budget(maskable, 1 - adaptive.sparsity))
            return {EVERYONE: self._best_coordinates(scores, count)}

        return active


def on_space(space: EditSpace, scores: Mapping[str, Tensor] | Mask) -> Tensor:
    """Return values given by tensor name as one vector over the trained coordinates of a space."""
    values = []
    for part in space.parts:
        flat = scores[part.name].reshape(-1)
        if part.index is not None:
            flat = flat[part.index]
        values.append(flat)
    return torch.cat(values)


TRAINABLES["sparse"] = Sparse
