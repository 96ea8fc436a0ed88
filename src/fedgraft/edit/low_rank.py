"""Low-rank adaptation (Hu et al. 2022) as a kind of what may change; how factors are combined: `lora_aggregate.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgraft.aggregate.slots import Aggregator, Answers
from fedgraft.edit.lora import attach
from fedgraft.edit.lora_aggregate import LoraLayout, Mode, aggregate_lora, lora_layout
from fedgraft.edit.trainable import Ask, Opened, Rates, check_blocks, is_head
from fedgraft.messages import pack_bits
from fedgraft.protocols import Network
from fedgraft.registry import TRAINABLES
from fedgraft.state import EVERYONE, ServerState


@dataclass(frozen=True)
class LowRank:
    """Factors of this rank beside chosen linear layers; the weights themselves stay."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q", "v")
    dropout: float = 0.0
    aggregate: Mode = "mean"
    head: bool = True
    freeze_blocks: int = 0
    seed: int = 0
    kind = "lora"
    rates = Rates(0.03, 0.003, small=True)
    trains_body = True
    scores_data = False

    @property
    def trains_head(self) -> bool:
        """Whether the head trains along."""
        return self.head

    @property
    def partial(self) -> bool:
        """Alternating factors move by turns."""
        return self.aggregate == "alternate"

    @property
    def needs_each(self) -> str:
        """Stacked and exactly averaged factors are multiplied client by client."""
        if self.aggregate not in ("stack", "residual"):
            return ""
        return (
            "stacked and exact low-rank averaging multiply each client's factors; use clear sums, the plain server "
            "rule and no robust rule, or trainable.lora.aggregate='frozen_a'"
        )

    def check(self, network: Network) -> None:
        """Refuse more blocks than the network has."""
        check_blocks(network, freeze_blocks=self.freeze_blocks)

    def open(self, network: Network, ask: Ask | None = None, saved: Mapping[str, Tensor] | None = None) -> Opened:
        """Attach the factors, drawn from the seed, and open their space."""
        self.check(network)
        attach(network, self.rank, self.alpha, self.targets, self.seed, self.dropout, self.freeze_blocks)
        dense = [n for n, _ in network.named_parameters() if is_head(network, n)] if self.head else ()
        layout = lora_layout(network, self.aggregate, dense)
        return Opened(
            layout.space,
            active=(lambda state: self._active(layout, state)) if self.partial else None,
            aggregate=self._aggregator(layout) if layout.needs_each_client else None,
            sends_buffers=False,
        )

    def _active(self, layout: LoraLayout, state: ServerState) -> Mapping[int, Tensor]:
        chosen = torch.zeros(layout.space.trained, dtype=torch.bool)
        chosen[layout.active(state.round)] = True
        return {EVERYONE: pack_bits(chosen)}

    def _aggregator(self, layout: LoraLayout) -> Aggregator:
        def update(answers: Answers, weights: Tensor) -> Tensor:
            assert answers.start is not None
            fresh = layout.fresh(self.seed, answers.round) if layout.mode == "stack" else None
            return aggregate_lora(layout, answers.start, answers.updates, weights.tolist(), fresh) - answers.start

        return Aggregator(f"lora:{layout.mode}", update, linear=False, of_trainable=True)


TRAINABLES["lora"] = LowRank
