"""Low-rank adaptation (Hu et al. 2022) as a kind of what may change; how factors are combined: `lora_aggregate.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedgraft.aggregate.slots import Aggregator, Answers
from fedgraft.core import ranges
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import pack_bits
from fedgraft.core.protocols import Network
from fedgraft.core.ranges import Count, Few, Number, Positive, Rest
from fedgraft.core.registry import TRAINABLES
from fedgraft.core.state import EVERYONE, ServerState
from fedgraft.edit.lora import attach, target_layers
from fedgraft.edit.lora_aggregate import LoraLayout, Mode, aggregate_lora, lora_layout
from fedgraft.edit.lora_core import core_space, fix_factors, gradient_directions, weight_directions
from fedgraft.edit.trainable import Ask, InTurn, Rates, TrainableSetup, affordable, check_blocks, is_head


@dataclass(frozen=True)
class LowRank:
    """Factors of this rank beside chosen linear layers; the weights themselves stay."""

    rank: Count = 8
    alpha: Positive = 16.0
    targets: tuple[str, ...] = ("q", "v")
    dropout: Rest = 0.0
    aggregate: Mode = "mean"
    head: bool = True
    freeze_blocks: Number = 0
    seed: int = 0
    ranks: tuple[Count, ...] = ()
    """aggregate=svd: ranks that clients train, dealt in turn; client k has ranks[k mod n], at most `rank`."""
    core_from: Literal["gradient", "weights"] = "gradient"
    """aggregate=core: whose top directions the fixed factors are."""
    core_images: Count = 1024
    budgets: tuple[Few, ...] = ()
    """aggregate=svd: bytes of the clients' updates, dealt in turn; each trains the rank that fits, at most `rank`."""
    kind = "lora"
    trains_body = True

    def __post_init__(self) -> None:
        ranges.check(self, "trainable.lora")
        if self.budgets and (self.ranks or self.aggregate != "svd"):
            raise FedgraftError(
                "trainable.lora.budgets say the clients' ranks: set aggregate='svd' and leave ranks out."
            )
        if self.ranks and (self.aggregate != "svd" or max(self.ranks) > self.rank):
            raise FedgraftError(
                f"ranks of the clients' own need trainable.lora.aggregate='svd' and lie from 1 to rank ({self.rank}); "
                f"they are {list(self.ranks)} under {self.aggregate!r}."
            )

    @property
    def label(self) -> str:
        """Rank and rule."""
        return f"LoRA r={self.rank} {self.aggregate}"

    @property
    def asks(self) -> Mapping[str, int]:
        """Gradients, for fixed factors."""
        return {"gradient": 1} if self.scores_data else {}

    @property
    def scores_data(self) -> bool:
        """Fixed factors are made from the clients' gradients."""
        return self.aggregate == "core" and self.core_from == "gradient"

    @property
    def trains_head(self) -> bool:
        """Whether the head trains along."""
        return self.head

    @property
    def partial(self) -> bool:
        """Alternating factors move by turns; with ranks of their own clients move different directions."""
        return self.aggregate == "alternate" or bool(self.ranks or self.budgets)

    @property
    def needs_each(self) -> str:
        """Stacked and exactly averaged factors are multiplied client by client."""
        if self.aggregate not in ("stack", "residual", "svd"):
            return ""
        return (
            "stacked, refactored and exact low-rank averaging multiply each client's factors; use clear sums, the "
            "plain server rule and no robust rule, or trainable.lora.aggregate='frozen_a'"
        )

    @property
    def rates(self) -> Rates:
        """A core lies along the steepest directions, where factors that are drawn hardly lie: it needs a tenth."""
        return Rates(0.003, 0.0003, small=True) if self.aggregate == "core" else Rates(0.03, 0.003, small=True)

    def check(self, network: Network) -> None:
        """Refuse more blocks than the network has, targets that it does not have, and cores wider than its layers."""
        check_blocks(network, freeze_blocks=self.freeze_blocks)
        names = target_layers(network, self.targets, self.freeze_blocks)
        sides = {n: min(p.shape) for n, p in network.named_parameters() if n.removesuffix(".weight") in names}
        if self.aggregate == "core" and (narrow := [name for name, side in sides.items() if side < self.rank]):
            raise FedgraftError(
                f"{narrow[0]!r} has no {self.rank} directions; lower the rank (algorithm.rank of fedsb, else "
                "trainable.lora.rank)."
            )

    def first_block(self, network: Network) -> int:
        """The block of the first layer that has factors."""
        names = target_layers(network, self.targets, self.freeze_blocks)
        return min(network.block_of(f"{name}.weight") for name in names)

    def open(
        self, network: Network, ask: Ask | None = None, saved: Mapping[str, Tensor] | None = None
    ) -> TrainableSetup:
        """Attach the factors, drawn from the seed, and open their space."""
        self.check(network)
        if self.aggregate == "core":
            return self._open_core(network, ask, saved)
        attach(network, self.rank, self.alpha, self.targets, self.seed, self.dropout, self.freeze_blocks)
        dense = [n for n, _ in network.named_parameters() if is_head(network, n)] if self.head else ()
        layout = lora_layout(network, self.aggregate, dense)
        self._ranks(layout)  # a budget that holds nothing is said before anybody works
        return TrainableSetup(
            layout.space,
            active=(lambda state: self._active(layout, state)) if self.partial else None,
            aggregate=self._aggregator(layout) if layout.needs_each_client else None,
            sends_buffers=False,
        )

    def _open_core(self, network: Network, ask: Ask | None, saved: Mapping[str, Tensor] | None) -> TrainableSetup:
        """Fix the factors and open the space of the cores between them."""
        names = target_layers(network, self.targets, self.freeze_blocks)
        dense = [n for n, _ in network.named_parameters() if is_head(network, n)] if self.head else []
        if saved:
            found = dict(saved)
        elif self.core_from == "weights":
            found = weight_directions(network, names, self.rank)
        else:
            assert ask is not None
            found = ask.kept(
                ["core", str(self.rank), str(self.core_images), *names],
                lambda: gradient_directions(network, names, ask, self.rank, self.core_images),
            )
        attach(network, self.rank, self.alpha, self.targets, self.seed, self.dropout, self.freeze_blocks)
        fix_factors(network, found)
        return TrainableSetup(core_space(network, dense), found, sends_buffers=False)

    def _active(self, layout: LoraLayout, state: ServerState) -> Mapping[int, Tensor]:
        if ranks := self.ranks or self._ranks(layout):
            by_rank = {r: pack_bits(layout.first_directions(r)) for r in set(ranks)}
            return InTurn([by_rank[r] for r in ranks])
        chosen = torch.zeros(layout.space.trained, dtype=torch.bool)
        chosen[layout.active(state.round)] = True
        return {EVERYONE: pack_bits(chosen)}

    def _ranks(self, layout: LoraLayout) -> list[int]:
        """The ranks that the budgets afford."""
        fixed = layout.b_begin - layout.a_end  # what trains densely lies between the factors
        each = (layout.space.trained - fixed) // self.rank
        return [min(r, self.rank) for r in affordable(self.budgets, fixed, each)] if self.budgets else []

    def _aggregator(self, layout: LoraLayout) -> Aggregator:
        def update(answers: Answers, weights: Tensor) -> Tensor:
            assert answers.start is not None
            fresh = layout.fresh(self.seed, answers.round) if layout.mode == "stack" else None
            return aggregate_lora(layout, answers.start, answers.updates, weights.tolist(), fresh) - answers.start

        return Aggregator(f"lora:{layout.mode}", update, linear=False, of_trainable=True)


TRAINABLES["lora"] = LowRank
