"""What may change, as a slot that behaves: a kind opens its edit space on a network and says the rest itself.

A kind is a frozen dataclass of its options. `open` may ask the clients (a mask is calibrated from their scores), and
returns the space, what a resumed run or another machine needs to open the very same one, which coordinates are active
in a round where that changes, and a rule of aggregation where the kind brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fedgraft.aggregate.slots import Aggregator
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Scalar
from fedgraft.core.protocols import Network
from fedgraft.core.space import EditSpace
from fedgraft.core.state import ServerState
from fedgraft.edit.masks import Mask
from fedgraft.local.features import first_seen

Scores = Mapping[str, Tensor]


class Ask(Protocol):
    """How a kind asks the federation something before the first round."""

    seed: int
    clients: int
    examples: int
    """Training images of all clients."""

    def sums(self, action: str, vector: Tensor, settings: Mapping[str, Scalar]) -> Mapping[str, Tensor]:
        """The clients' answers, added up by name; hidden where the run hides them."""
        ...

    def each(
        self, action: str, vector: Tensor, settings: Mapping[str, Scalar], coordinates: int
    ) -> Mapping[int, Mapping[str, Tensor]]:
        """The mask over so many coordinates that every client answers by itself; none can be hidden in a sum."""
        ...

    def kept(self, recipe: Sequence[str], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What this machine kept from making the same for the same network and data, else what `make` gives now."""
        ...


@dataclass(frozen=True)
class TrainableSetup:
    """An open edit space."""

    space: EditSpace
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    """What `open` needs to give the same again, here or on another machine."""
    active: Callable[[ServerState], Mapping[int, Tensor]] | None = None
    """What may move in the coming round, as packed bits, where that changes from round to round."""
    aggregate: Aggregator | None = None
    """The kind's own way to combine updates."""
    sends_buffers: bool = True
    """Whether the tail of the vector (batch-norm statistics) is part of an update; base weights under LoRA are not."""
    mask: Mask | None = None
    """The chosen coordinates, where a mask chose them; for figures and files."""
    notes: tuple[str, ...] = ()
    """Sentences for the log."""


class InTurn(dict[int, Tensor]):
    """What each client may move, as packed bits dealt in turn: client k has the (k mod n)-th."""

    def __init__(self, turns: Sequence[Tensor]) -> None:
        super().__init__()
        self.turns = turns

    def get(self, client: int, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        """The bits of this client."""
        return self.turns[client % len(self.turns)] if client >= 0 else default


def affordable(budgets: Sequence[int], fixed: int, unit: int = 1) -> list[int]:
    """How many units of so many numbers each budget (bytes of an update) holds beside the fixed ones; at least one."""
    found = [(budget // 4 - fixed) // unit for budget in budgets]
    if min(found) < 1:
        raise FedgraftError(
            f"a budget of {min(budgets)} bytes an update does not hold the {4 * fixed} bytes that train densely and "
            f"{4 * unit} more; raise it, or leave the head out (trainable.head_too=false)."
        )
    return found


HEAD = 0.003  # of a linear head where nothing is known of its features; else `runs/rates.py` says it


@dataclass(frozen=True)
class Rates:
    """Learning rates that suit a kind, for SGD with momentum and for Adam; docs/defaults.md has the measurements."""

    sgdm: float = 0.01
    adamw: float = 0.001
    small: bool = False
    """The edit needs a rate that no head would stand, so the head keeps its own whatever is said."""


class Trainable(Protocol):
    """A kind of what may change. Flags say what it touches, so that nobody has to know its name."""

    @property
    def kind(self) -> str:
        """Its name in a config."""
        ...

    @property
    def trains_head(self) -> bool:
        """The head moves."""
        ...

    @property
    def trains_body(self) -> bool:
        """Something before the head moves."""
        ...

    @property
    def rates(self) -> Rates:
        """Learning rates that suit it, where none is given."""
        ...

    @property
    def partial(self) -> bool:
        """Clients move only part of the space in a round: own masks, adaptive sparsity, alternating factors."""
        ...

    @property
    def needs_each(self) -> str:
        """Why the server must see every client's update and combine it the kind's own way; empty: it need not."""
        ...

    @property
    def label(self) -> str:
        """What trains, in a few words, for figures."""
        ...

    @property
    def asks(self) -> Mapping[str, int]:
        """What opening asks of clients, and how often."""
        ...

    @property
    def scores_data(self) -> bool:
        """Opening asks clients for something computed from their images."""
        ...

    def check(self, network: Network) -> None:
        """Refuse a network that this kind does not fit."""
        ...

    def first_block(self, network: Network) -> int:
        """The earliest block in which something may move, known before the space is open."""
        ...

    def open(self, network: Network, ask: Ask | None, saved: Mapping[str, Tensor] | None = None) -> TrainableSetup:
        """Open the space; with `saved` exactly as it was stored, without asking anybody."""
        ...


def check_blocks(network: Network, **wanted: int) -> None:
    """Refuse more blocks than the network has."""
    for name, count in wanted.items():
        if count > network.depth:
            raise FedgraftError(f"trainable.{name} is {count}, but the network has {network.depth} blocks")


def is_head(network: Network, name: str) -> bool:
    """Whether a parameter belongs to the head."""
    return network.block_of(name) > network.depth


def layer_ranges(network: Network, space: EditSpace, layers: Sequence[str]) -> tuple[tuple[int, int, int], ...]:
    """(layer, begin, end) of every trained tensor: which of the observed layers is the first to show its change."""
    trained = space.ranges[: len(space.parts)] if layers else ()
    return tuple((first_seen(network, layers, network.block_of(p.name)), begin, end) for p, begin, end in trained)


def frozen_early(network: Network, name: str, freeze_blocks: int) -> bool:
    """Whether a parameter lies in the first blocks that are to stay fixed, or before them."""
    return bool(freeze_blocks) and network.block_of(name) < freeze_blocks
