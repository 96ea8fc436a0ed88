"""Whole tensors that may change: everything, the head, the body, or the last blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedgraft.core.protocols import Network
from fedgraft.core.ranges import Count, Number, in_range
from fedgraft.core.registry import TRAINABLES
from fedgraft.core.space import select
from fedgraft.edit.trainable import HEAD, Ask, Rates, TrainableSetup, check_blocks, frozen_early, is_head

PLAIN, DEEP = Rates(), Rates(0.001, 0.0001)


@dataclass(frozen=True)
class Dense:
    """Every tensor that `wanted(network, name)` picks."""

    kind: str
    wanted: Callable[[Network, str], bool]
    trains_head: bool
    trains_body: bool
    freeze_blocks: int = 0
    blocks: int = 0
    """For the check: how many blocks the network must have."""
    rates: Rates = PLAIN
    partial = False
    needs_each = ""
    scores_data = False
    asks: ClassVar[Mapping[str, int]] = {}

    @property
    def label(self) -> str:
        """Which blocks, or the kind's name."""
        return f"last {self.blocks} blocks" if self.blocks else self.kind

    def check(self, network: Network) -> None:
        """Refuse more blocks than the network has."""
        check_blocks(network, freeze_blocks=self.freeze_blocks, blocks=self.blocks)

    def first_block(self, network: Network) -> int:
        """The block of the first picked tensor."""
        return self.open(network).space.first_block(network)

    def open(
        self, network: Network, ask: Ask | None = None, saved: Mapping[str, Tensor] | None = None
    ) -> TrainableSetup:
        """The space of the picked tensors; nobody is asked."""
        self.check(network)

        def picked(name: str) -> bool:
            early = not is_head(network, name) and frozen_early(network, name, self.freeze_blocks)
            return not early and self.wanted(network, name)

        return TrainableSetup(select(network, picked))


@in_range
def everything(freeze_blocks: Number = 0) -> Dense:
    """All weights, but for the first `freeze_blocks` blocks and what lies before them."""
    return Dense("everything", lambda network, name: True, True, True, freeze_blocks, rates=DEEP)


def head() -> Dense:
    """The linear head; features of the fixed backbone are computed once."""
    return Dense("head", is_head, True, False, rates=Rates(HEAD, 0.001))


@in_range
def body(freeze_blocks: Number = 0) -> Dense:
    """Everything but the head."""
    return Dense("body", lambda network, name: not is_head(network, name), False, True, freeze_blocks, rates=DEEP)


@in_range
def last_blocks(blocks: Count = 2, head: bool = True) -> Dense:
    """The last so many blocks and the final norm, with or without the head."""

    def wanted(network: Network, name: str) -> bool:
        return head if is_head(network, name) else network.block_of(name) >= network.depth - blocks

    return Dense("last_blocks", wanted, head, True, blocks=blocks, rates=Rates(0.001, 0.0003))


TRAINABLES |= {"everything": everything, "head": head, "body": body, "last_blocks": last_blocks}
