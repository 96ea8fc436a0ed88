"""A sparse edit as a kind of what may change: chosen coordinates of the blocks (Fisher masks, TaLoS calibration).

The mask is calibrated from sums of squared gradients that clients send, never from examples; or it follows from the
weights or the seed alone. One common mask, masks of the clients' own, or a sparsity that rises as the drift calms down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedgraft.aggregate.slots import count_mean
from fedgraft.core import ranges
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import pack_bits
from fedgraft.core.protocols import Network
from fedgraft.core.ranges import Count, Few, Inner, Number, Positive, Rest, Unit
from fedgraft.core.registry import TRAINABLES
from fedgraft.core.space import EditSpace, masked, select
from fedgraft.core.state import EVERYONE, ServerState
from fedgraft.edit.adaptive import AdaptiveSparsity
from fedgraft.edit.calibrate import Calibration, Mode, average, calibrate, merge, oneshot, progressive
from fedgraft.edit.choose import budget, choose, strategy_named
from fedgraft.edit.fisher import Scores
from fedgraft.edit.masks import Mask, union
from fedgraft.edit.scope import Scope, resolve
from fedgraft.edit.trainable import Ask, InTurn, Rates, TrainableSetup, affordable, check_blocks, frozen_early, is_head

_BATCH_LABELS = {"batch_gradient": "batch_gradient", "single_batch": "single_batch_abs"}


@dataclass(frozen=True)
class Sparse:
    """Train a fraction 1 - `sparsity` of the weights in scope, chosen by `strategy`; `head` trains along, dense."""

    strategy: str = "least_sensitive"
    sparsity: Rest = 0.9
    scope: tuple[str, ...] = ("blocks",)
    dense: tuple[str, ...] = ()
    threshold: str = "global"
    floor: Rest = 0.0
    labels: str = "rademacher"
    samples: Count = 1024
    calibration: str = "progressive"
    rounds: Count = 4
    schedule: str = "exponential"
    soft: Unit = 0.1
    per_client: bool = False
    merge: str = "score_mean"
    fill: str = "count"
    adaptive_start: Rest | None = None
    adaptive_step: Inner = 0.1
    adaptive_drift: Positive = 0.5
    adaptive_patience: Count = 2
    budgets: tuple[Few, ...] = ()
    head: bool = True
    freeze_blocks: Number = 0
    seed: int = 0
    kind = "sparse"
    rates = Rates(0.1, 0.001, small=True)  # what matters little has to move far
    trains_body = True

    def __post_init__(self) -> None:
        ranges.check(self, "trainable.sparse")

    @property
    def trains_head(self) -> bool:
        """Whether the head trains along."""
        return self.head

    @property
    def partial(self) -> bool:
        """Own masks, budgets and a rising sparsity leave part of the space at rest."""
        return self.per_client or bool(self.budgets) or self.adaptive_start is not None

    @property
    def needs_each(self) -> str:
        """Supports that differ are averaged over those who hold a coordinate."""
        if not ((self.per_client or self.budgets) and self.fill == "count"):
            return ""
        return (
            "masks or budgets of the clients' own are averaged coordinate by coordinate; use clear sums, the plain "
            "server rule and no robust rule, or trainable.sparse.fill='zero'"
        )

    @property
    def label(self) -> str:
        """Strategy and sparsity."""
        start = "" if self.adaptive_start is None else f"{100 * self.adaptive_start:g}-"
        own = " own" if self.per_client else ""
        return f"{self.strategy.replace('_', ' ')} {start}{100 * self.sparsity:g} %{own}"

    @property
    def asks(self) -> Mapping[str, int]:
        """Masks of the clients' own, or sums of their scores; adaptive sparsity sums them once more."""
        own = self.per_client or self.merge != "score_mean"
        sums = (0 if own else self.rounds) + (self.adaptive_start is not None)
        return ({"own_mask": 1} if own else {}) | ({"fisher_scores": sums} if self.scores_data and sums else {})

    @property
    def scores_data(self) -> bool:
        """Fisher scores come from the clients' images."""
        return strategy_named(self.strategy).scores is None

    def check(self, network: Network) -> None:
        """Refuse more blocks than the network has, and a strategy that does not exist."""
        check_blocks(network, freeze_blocks=self.freeze_blocks)
        strategy_named(self.strategy)

    def open(self, network: Network, ask: Ask | None, saved: Mapping[str, Tensor] | None = None) -> TrainableSetup:
        """The space of the mask: as saved, as kept on this machine, or calibrated now."""
        self.check(network)
        stored: dict[str, Tensor] = dict(saved or {})
        notes: tuple[str, ...] = ()
        shapes = self._shapes(network)
        if "mask" not in stored:
            if ask is None:
                raise FedgraftError("a sparse edit needs its mask, and nobody can be asked for scores here.")
            stored, notes = self._choose(network, ask)
        mask = Mask.from_bits(stored["mask"], shapes)
        space = masked(network, dict(mask.items()))
        active: Callable[[ServerState], Mapping[int, Tensor]] | None = None
        if self.per_client:
            own: Mapping[int, Tensor] = {
                int(name.removeprefix("own/")): bits for name, bits in stored.items() if name.startswith("own/")
            }
            active = lambda state: own  # noqa: E731
        elif self.adaptive_start is not None:
            active = self._rising(network, stored["scores"])
        elif self.budgets:
            own = self._afforded(network, stored["scores"])
            active = lambda state: own  # noqa: E731
        rule = count_mean() if self.needs_each else None
        return TrainableSetup(space, stored, active, rule, mask=mask, notes=notes)

    # ---- choosing -------------------------------------------------------------------------------------------------

    def _choose(self, network: Network, ask: Ask) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Everything that has to be stored about the choice."""
        if self.per_client:
            own = self._own_masks(network, ask)
            space = masked(network, dict(union(list(own.values())).items()))
            bits = {f"own/{client}": pack_bits(on_space(space, mask).bool()) for client, mask in own.items()}
            return {"mask": union(list(own.values())).bits(), **bits}, ()
        notes: list[str] = []

        def make() -> dict[str, Tensor]:
            return {"mask": self._common(network, ask, notes).bits()}

        told = {name: value for name, value in asdict(self).items() if name != "budgets"}  # they come after the mask
        stored = ask.kept([json.dumps(told, sort_keys=True)], make)
        if self.adaptive_start is not None or self.budgets:
            stored["scores"] = self._lasting(network, ask, Mask.from_bits(stored["mask"], self._shapes(network)))
        return stored, tuple(notes)

    def _common(self, network: Network, ask: Ask, notes: list[str]) -> Mask:
        """One mask for all: from summed scores, or from the clients' own masks, merged."""
        scope = self.scope_on(network)
        if self.merge == "score_mean":
            found = self.calibrated(network, lambda draw: self._scores(network, ask, draw), ask.seed)
            share = 100 * scope.density(found.mask)
            notes.append(
                f"mask {self.strategy}: {found.mask.count} of {found.mask.total} coordinates move ({share:.2f} % of "
                f"the network), energy share {found.energy:.3g}, {sum(found.negligible.values())} without effect"
            )
            return found.mask
        own = [Mask(scope.restrict(mask)) for mask in self._own_masks(network, ask).values()]  # dense parts do not vote
        density = 1 - self.sparsity if self.merge == "vote" else None
        return scope.expand(merge(own, self.merge, density=density))

    def _own_masks(self, network: Network, ask: Ask) -> dict[int, Mask]:
        whole, shapes = select(network, lambda name: True, buffers=False), self._shapes(network)
        size = sum(math.prod(shape) for shape in shapes.values())
        answers = ask.each("own_mask", whole.gather(network), self.settings(network, 1, ask), size)
        own = {client: Mask.from_bits(found["mask"], shapes) for client, found in sorted(answers.items())}
        if not own:
            raise FedgraftError("no client answered with a mask that can be used, so there is nothing to train.")
        # Who did not answer, or lied, works with the mask of one who did.
        return {client: own.get(client, own[min(own)]) for client in range(ask.clients)}

    def calibrated(
        self, network: Network, scores: Callable[[int], Mapping[str, Tensor]], seed: int | None = None
    ) -> Calibration:
        """The mask that these scores give, whether they are everyone's or one client's."""
        scope, by_weights = self.scope_on(network), strategy_named(self.strategy).scores
        weights = {n: p for n, p in network.named_parameters() if n in scope.maskable}
        if by_weights is not None:  # the weights decide, whoever asks
            scores = lambda draw: by_weights(weights, self.seed if seed is None else seed)  # noqa: E731
        start = self.sparsity if self.adaptive_start is None else self.adaptive_start
        rule = {"threshold": self.threshold, "floor": self.floor, "block_of": network.block_of}
        return calibrate(scores, self.strategy, 1 - start, self.mode, scope=scope, weights=weights, **rule)

    @property
    def mode(self) -> Mode:
        """How many rounds of scores, and what happens between them."""
        if self.calibration == "average":
            return average(self.rounds)
        return progressive(self.rounds, self.schedule, self.soft) if self.calibration == "progressive" else oneshot()

    def settings(self, network: Network, draw: int, ask: Ask) -> dict[str, Any]:
        """What clients are told about scoring."""
        return {
            "estimator": _BATCH_LABELS.get(self.labels, "per_sample"),
            "labels": "true" if self.labels in _BATCH_LABELS else self.labels,
            "draw": draw,
            "share": min(1.0, self.samples / ask.examples),
            "batch": 16,
            "names": "\n".join(self.scope_on(network).maskable),
        }

    def _scores(self, network: Network, ask: Ask, draw: int) -> Mapping[str, Tensor]:
        """The clients' scores for the network's present (perhaps softened) weights, summed."""
        scope, whole = self.scope_on(network), select(network, lambda name: True, buffers=False)
        found = ask.sums("fisher_scores", whole.gather(network), self.settings(network, draw, ask))["scores"]
        shapes = {n: tuple(p.shape) for n, p in network.named_parameters() if n in scope.maskable}
        return Scores.from_vector(found.float(), shapes).mean()

    # ---- scope and adaptive sparsity --------------------------------------------------------------------------------

    def scope_on(self, network: Network) -> Scope:
        """Which tensors the mask may touch, which train densely, which stay frozen."""
        shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
        early = [n for n in shapes if not is_head(network, n) and frozen_early(network, n, self.freeze_blocks)]
        head = [n for n in shapes if is_head(network, n)]
        dense = [*self.dense, *(head if self.head else ())]
        frozen = [n for n in (*early, *(() if self.head else head)) if n not in dense]
        return resolve(shapes, self.scope, frozen, dense)

    def first_block(self, network: Network) -> int:
        """The block of the first tensor that the mask may touch or that trains densely."""
        return min(network.block_of(name) for name in self._shapes(network))

    def _shapes(self, network: Network) -> dict[str, tuple[int, ...]]:
        scope = self.scope_on(network)
        names = {*scope.maskable, *scope.dense}
        return {n: tuple(p.shape) for n, p in network.named_parameters() if n in names}

    def _lasting(self, network: Network, ask: Ask, mask: Mask) -> Tensor:
        """Scores over the space, by which adaptive sparsity shrinks it; what is dense ranks first."""
        scope, strategy = self.scope_on(network), strategy_named(self.strategy)
        always = math.inf if strategy.largest else -math.inf
        dense = {name: torch.full(scope.shapes[name], always) for name in scope.dense}
        weights = {n: p for n, p in network.named_parameters() if n in scope.maskable}
        scores = strategy.scores(weights, ask.seed) if strategy.scores else self._scores(network, ask, 1)
        return on_space(masked(network, dict(mask.items())), {**scores, **dense})

    def _afforded(self, network: Network, scores: Tensor) -> Mapping[int, Tensor]:
        """Of the mask, what each client's budget holds: all that is dense, then the best coordinates by score."""
        scope, largest = self.scope_on(network), strategy_named(self.strategy).largest
        always = sum(math.prod(scope.shapes[name]) for name in scope.dense)
        counts = [min(len(scores), always + n) for n in affordable(self.budgets, always)]
        bits = {n: pack_bits(choose({"space": scores}, k=n, largest=largest)["space"]) for n in set(counts)}
        return InTurn([bits[n] for n in counts])

    def _rising(self, network: Network, scores: Tensor) -> Callable[[ServerState], Mapping[int, Tensor]]:
        """Fewer coordinates stay active as the clients' drift calms down; what leaves keeps its value for good.

        The schedule reads the drifts of the rounds so far, so a resumed run comes to the same sparsity by itself.
        """
        scope, largest = self.scope_on(network), strategy_named(self.strategy).largest
        sizes = {name: math.prod(shape) for name, shape in scope.shapes.items()}
        part = {name: sizes[name] // scope.shapes[name][0] * count for name, count in scope.rows.items()}
        maskable = sum(part.get(name, sizes[name]) for name in scope.maskable)
        always = sum(sizes[name] for name in scope.dense)
        assert self.adaptive_start is not None
        rule = AdaptiveSparsity(
            self.adaptive_start, self.sparsity, self.adaptive_step, self.adaptive_drift, self.adaptive_patience
        )

        def active(state: ServerState) -> Mapping[int, Tensor]:
            now = rule.begin()
            for drift in state.drifts:
                now = rule.after(now, drift)
            count = min(len(scores), always + budget(maskable, 1 - now.sparsity))
            return {EVERYONE: pack_bits(choose({"space": scores}, k=count, largest=largest)["space"])}

        return active


def on_space(space: EditSpace, scores: Mapping[str, Tensor] | Mask) -> Tensor:
    """Values by name as one vector over a space."""
    flats = [(scores[part.name].reshape(-1), part.index) for part in space.parts]
    return torch.cat([flat if index is None else flat[index] for flat, index in flats])


TRAINABLES["sparse"] = Sparse
