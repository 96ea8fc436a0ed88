"""Low-rank adaptation (Hu et al. 2022) as a trainable; how factors are aggregated: `lora_aggregate.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedgraft.aggregate.slots import Aggregator, Answers
from fedgraft.core import ranges
from fedgraft.core.arguments import checked_names
from fedgraft.core.capabilities import Capabilities, Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import pack_bits
from fedgraft.core.protocols import Network
from fedgraft.core.ranges import Count, Few, Number, Positive, Rest
from fedgraft.core.registry import TRAINABLES
from fedgraft.core.state import EVERYONE, ServerState
from fedgraft.edit.lora import attach, target_layers
from fedgraft.edit.lora_aggregate import LoraAggregation, LoraLayout, aggregate_lora, lora_layout
from fedgraft.edit.lora_core import core_space, fix_factors, gradient_directions, weight_directions
from fedgraft.edit.trainable import (
    Ask,
    Rates,
    RoundRobinMasks,
    TrainableSetup,
    affordable_units,
    check_blocks,
    is_head,
    required_to_combine,
    training,
)


@checked_names("lora")
@dataclass(frozen=True)
class LowRank:
    """Train low-rank factors beside selected linear layers; the weights of these layers are frozen."""

    rank: Count = 8
    """rank of the factors"""
    alpha: Positive = 16.0
    """the factors' product is scaled by alpha / rank"""
    targets: tuple[str, ...] = ("q", "v")
    """layers that get factors: q, k, v, o, mlp, globs"""
    dropout: Rest = 0.0
    """before the first factor"""
    aggregate: LoraAggregation = "mean"
    """how the clients' factors are combined; alternate: RoLoRA; svd: FlexLoRA; fair: LoRA-FAIR; rpca: FedRPCA; core:
    Fed-SB, only an r x r matrix between fixed factors trains"""
    head: bool = True
    freeze_blocks: Number = 0
    seed: int = 0
    ranks: tuple[Count, ...] = ()
    """aggregate=svd: ranks of the clients, assigned in turn; client k has ranks[k mod n], at most `rank`"""
    core_from: Literal["gradient", "weights"] = "gradient"
    """aggregate=core: the matrix whose top directions are the fixed factors"""
    core_images: Count = 1024
    """core_from=gradient: images of its gradient, over all clients"""
    penalty: Positive = 0.01
    """aggregate=fair: penalty on the correction of B, relative to the mean diagonal of A Aᵀ"""
    sparse_scale: Positive | None = None
    """aggregate=rpca: factor on the mean of the sparse parts; default: the inverse of their share of the changes"""
    budgets: tuple[Few, ...] = ()
    """aggregate=svd: bytes of the clients' updates, assigned in turn; each client trains the rank that fits"""
    kind = "lora"

    def __post_init__(self) -> None:
        ranges.check_ranges(self, "trainable.lora")
        if self.budgets and (self.ranks or self.aggregate != "svd"):
            raise FedgraftError(
                "E-EDIT-LORA-BUDGETS",
                "trainable.lora.budgets determine the clients' ranks under aggregate='svd' only",
                "set aggregate='svd' and leave ranks out",
            )
        if self.ranks and (self.aggregate != "svd" or max(self.ranks) > self.rank):
            raise FedgraftError(
                "E-EDIT-LORA-RANKS",
                f"trainable.lora.ranks are {list(self.ranks)} with rank {self.rank} under aggregate={self.aggregate!r}",
                f"set trainable.lora.aggregate='svd' and ranks from 1 to {self.rank}",
            )

    @property
    def label(self) -> str:
        """Rank and aggregation rule."""
        return f"LoRA r={self.rank} {self.aggregate}"

    @property
    def asks(self) -> Mapping[str, int]:
        """The client actions that opening needs: a sum of gradients for fixed factors."""
        if not self.scores_data:
            return {}
        return {"gradient": 1}

    @property
    def scores_data(self) -> bool:
        """Whether the fixed factors are computed from the clients' gradients."""
        return self.aggregate == "core" and self.core_from == "gradient"

    @property
    def provides(self) -> Capabilities:
        """What is trained. Coordinates differ with alternating factors or ranks; exact rules multiply the factors."""
        return training(
            self.head,
            body=True,
            fixed_coordinates=self.aggregate != "alternate" and not self.ranks and not self.budgets,
            averaged_updates=self.aggregate not in ("stack", "residual", "svd", "fair", "rpca"),
        )

    @property
    def requires(self) -> Capabilities:
        """Each client's factors, for rules that need more than their sum."""
        return required_to_combine(self.provides)

    @property
    def instead(self) -> str:
        """The setting for factors that can be summed."""
        if not self.requires:
            return ""
        return "trainable.lora.aggregate='frozen_a'"

    @property
    def rates(self) -> Rates:
        """Default learning rates. A core lies along the steepest directions, so it needs a tenth of the others."""
        if self.aggregate == "core":
            return Rates(0.003, 0.0003, small=True)
        return Rates(0.03, 0.003, small=True)

    def check(self, network: Network) -> None:
        """Raise an error for too many blocks, targets without a layer, and cores wider than a layer."""
        check_blocks(network, freeze_blocks=self.freeze_blocks)
        names = target_layers(network, self.targets, self.freeze_blocks)
        if self.aggregate != "core":
            return
        for name, parameter in network.named_parameters():
            if name.removesuffix(".weight") in names and min(parameter.shape) < self.rank:
                raise FedgraftError(
                    "E-EDIT-LORA-RANK",
                    f"{name!r} has fewer than {self.rank} directions",
                    "lower the rank (algorithm.rank of fedsb, else trainable.lora.rank)",
                    name=name,
                    rank=self.rank,
                )

    def first_block(self, network: Network) -> int:
        """Return the block of the first layer with factors."""
        names = target_layers(network, self.targets, self.freeze_blocks)
        return min(network.block_of(f"{name}.weight") for name in names)

    def open(
        self, network: Network, ask: Ask | None = None, saved: Mapping[str, Tensor] | None = None
    ) -> TrainableSetup:
        """Attach the factors, drawn from the seed, to the network in place and return their edit space.

        `ask` and `saved` matter only for `aggregate="core"`, whose fixed factors may be computed from the clients'
        gradients.
        """
        self.check(network)
        if self.aggregate == "core":
            return self._open_core(network, ask, saved)
        attach(network, self.rank, self.alpha, self.targets, self.seed, self.dropout, self.freeze_blocks)
        layout = lora_layout(network, self.aggregate, self._dense_names(network))
        self._affordable_ranks(layout)  # refuse a budget that is too small before any client works
        active: Callable[[ServerState], Mapping[int, Tensor]] | None = None
        if Capability.FIXED_COORDINATES not in self.provides:
            active = lambda state: self._active(layout, state)  # noqa: E731
        aggregator: Aggregator | None = None
        if layout.needs_each_client:
            aggregator = self._aggregator(layout)
        return TrainableSetup(layout.space, active=active, aggregate=aggregator, sends_buffers=False)

    def _dense_names(self, network: Network) -> list[str]:
        """Return the names of the head's parameters, if the head is trained."""
        if not self.head:
            return []
        return [name for name, _ in network.named_parameters() if is_head(network, name)]

    def _open_core(self, network: Network, ask: Ask | None, saved: Mapping[str, Tensor] | None) -> TrainableSetup:
        """Attach adapters to the network in place and return the space of their cores; the outer factors are frozen.

        The factors are those of `saved`, or computed from the weights, or from gradients that clients are asked for.
        """
        names = target_layers(network, self.targets, self.freeze_blocks)
        dense = self._dense_names(network)
        if saved:
            factors = dict(saved)
        elif self.core_from == "weights":
            factors = weight_directions(network, names, self.rank)
        else:
            assert ask is not None
            factors = ask.cached(
                ["core", str(self.rank), str(self.core_images), *names],
                lambda: gradient_directions(network, names, ask, self.rank, self.core_images),
            )
        attach(network, self.rank, self.alpha, self.targets, self.seed, self.dropout, self.freeze_blocks)
        fix_factors(network, factors)
        return TrainableSetup(core_space(network, dense), factors, sends_buffers=False)

    def _active(self, layout: LoraLayout, state: ServerState) -> Mapping[int, Tensor]:
        """Return by client, or for everyone, the coordinates that may change in the coming round, as packed bits."""
        ranks = self.ranks or self._affordable_ranks(layout)
        if ranks:
            by_rank = {}
            for rank in set(ranks):
                by_rank[rank] = pack_bits(layout.first_directions(rank))
            return RoundRobinMasks([by_rank[rank] for rank in ranks])
        active = torch.zeros(layout.space.trained, dtype=torch.bool)
        active[layout.active(state.round)] = True
        return {EVERYONE: pack_bits(active)}

    def _affordable_ranks(self, layout: LoraLayout) -> list[int]:
        """Return the rank that each budget (bytes of an update) affords; [] without budgets."""
        if not self.budgets:
            return []
        dense = layout.b_begin - layout.a_end  # densely trained coordinates lie between the factors
        per_rank = (layout.space.trained - dense) // self.rank
        return [min(rank, self.rank) for rank in affordable_units(self.budgets, dense, per_rank)]

    def _aggregator(self, layout: LoraLayout) -> Aggregator:
        """Return the aggregator that multiplies each client's factors, which lie in the vector as `layout` says."""

        def update(answers: Answers, weights: Tensor) -> Tensor:
            """Return the common update: the aggregated vector minus the one that the round began with."""
            assert answers.start is not None
            fresh: Tensor | None = None
            if layout.mode == "stack":
                fresh = layout.fresh(self.seed, answers.round)
            combined = aggregate_lora(
                layout, answers.start, answers.updates, weights.tolist(), fresh, self.penalty, self.sparse_scale
            )
            return combined - answers.start

        return Aggregator(f"lora:{layout.mode}", update, needs=frozenset({Capability.EACH_UPDATE}))


TRAINABLES["lora"] = LowRank
