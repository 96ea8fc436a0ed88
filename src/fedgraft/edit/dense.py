"""Dense trainables: whole tensors are trained - everything, the head, the body, or the last blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedgraft.core.capabilities import NOTHING, Capabilities
from fedgraft.core.protocols import Network
from fedgraft.core.ranges import Count, Number, in_range
from fedgraft.core.registry import TRAINABLES
from fedgraft.core.space import select
from fedgraft.edit.trainable import HEAD, Ask, Rates, TrainableSetup, check_blocks, frozen_early, is_head, training

PLAIN = Rates()
DEEP = Rates(0.001, 0.0001)


@dataclass(frozen=True)
class Dense:
    """A trainable of all tensors for which `selected(network, name)` is true."""

    kind: str
    selected: Callable[[Network, str], bool]
    trains_head: bool
    trains_body: bool
    freeze_blocks: int = 0
    blocks: int = 0
    """How many blocks the network must have at least."""
    rates: Rates = PLAIN
    scores_data = False
    instead: ClassVar[str] = ""
    asks: ClassVar[Mapping[str, int]] = {}
    requires: ClassVar[Capabilities] = NOTHING

    @property
    def provides(self) -> Capabilities:
        """Which parts are trained; clients train the same coordinates, and their updates may be averaged."""
        return training(self.trains_head, self.trains_body)

    @property
    def label(self) -> str:
        """The name in reports: which blocks, or the kind."""
        if self.blocks:
            return f"last {self.blocks} blocks"
        return self.kind

    def check(self, network: Network) -> None:
        """Raise an error if the network has fewer blocks than are needed."""
        check_blocks(network, freeze_blocks=self.freeze_blocks, blocks=self.blocks)

    def first_block(self, network: Network) -> int:
        """Return the first block with a trained tensor."""
        return self.open(network).space.first_block(network)

    def open(
        self, network: Network, ask: Ask | None = None, saved: Mapping[str, Tensor] | None = None
    ) -> TrainableSetup:
        """Return the setup whose edit space has the selected tensors.

        Which tensors these are follows from the network and the options alone, so `ask` (questions to the clients) and
        `saved` (what an earlier opening stored) are not used.
        """
        self.check(network)

        def included(name: str) -> bool:
            """Return whether this parameter is trained: selected, and not in a frozen early block."""
            if not is_head(network, name) and frozen_early(network, name, self.freeze_blocks):
                return False
            return self.selected(network, name)

        return TrainableSetup(select(network, included))


@in_range
def everything(freeze_blocks: Number = 0) -> Dense:
    """Return the kind that trains all weights except the first `freeze_blocks` blocks and the layers before them."""
    return Dense("everything", lambda network, name: True, True, True, freeze_blocks, rates=DEEP)


def head() -> Dense:
    """Return the kind that trains the linear head; the features of the frozen backbone are computed once."""
    return Dense("head", is_head, True, False, rates=Rates(HEAD, 0.001))


@in_range
def body(freeze_blocks: Number = 0) -> Dense:
    """Return the kind that trains everything except the head."""
    return Dense("body", lambda network, name: not is_head(network, name), False, True, freeze_blocks, rates=DEEP)


@in_range
def last_blocks(blocks: Count = 2, head: bool = True) -> Dense:
    """Train the last `blocks` blocks and the final norm, with or without the head."""

    def selected(network: Network, name: str) -> bool:
        """Return whether a parameter lies in the last blocks, the final norm or, if wanted, the head."""
        if is_head(network, name):
            return head
        return network.block_of(name) >= network.depth - blocks

    return Dense("last_blocks", selected, head, True, blocks=blocks, rates=Rates(0.001, 0.0003))


TRAINABLES |= {"everything": everything, "head": head, "body": body, "last_blocks": last_blocks}
