"""The trainable slot of an algorithm: a kind opens its edit space on a network and describes its own needs.

A kind is a frozen dataclass of its options. `open` may ask the clients (a mask is calibrated from their scores), and
returns the space, the tensors that a resumed run or another machine needs to open the same space, the coordinates that
are active in a round where that changes, and an aggregation rule if the kind has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fedgraft.aggregate.slots import Aggregator
from fedgraft.core.capabilities import NOTHING, Capabilities, Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Scalar
from fedgraft.core.protocols import Network
from fedgraft.core.space import EditSpace
from fedgraft.core.state import ServerState
from fedgraft.edit.masks import Mask
from fedgraft.local.features import first_seen


class Ask(Protocol):
    """The requests that a kind can make to the federation before the first round; `runs/open_run.py` implements it."""

    seed: int
    clients: int
    examples: int
    """Training images of all clients."""

    def sums(self, action: str, vector: Tensor, settings: Mapping[str, Scalar]) -> Mapping[str, Tensor]:
        """Return the sums over clients of an action's tensors, by name; by secure aggregation if the run uses it."""
        ...

    def each(
        self, action: str, vector: Tensor, settings: Mapping[str, Scalar], coordinates: int
    ) -> Mapping[int, Mapping[str, Tensor]]:
        """Return each client's own tensors of an action over this many coordinates; they cannot be hidden in a sum."""
        ...

    def cached(self, recipe: Sequence[str], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors cached on this machine for this recipe, network and data, or else those of `make()`."""
        ...


@dataclass(frozen=True)
class TrainableSetup:
    """The edit space that a kind opened on a network, with what goes with it; `Trainable.open` makes it."""

    space: EditSpace
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors that `open` needs to open the same space again, here or on another machine."""
    active: Callable[[ServerState], Mapping[int, Tensor]] | None = None
    """The coordinates that may change in the coming round by client, as packed bits, if that varies by round."""
    aggregate: Aggregator | None = None
    """The kind's own aggregation of updates."""
    sends_buffers: bool = True
    """Whether the tail of the vector (batch-norm statistics) is part of an update; base weights under LoRA are not."""
    mask: Mask | None = None
    """The mask, if the space was chosen by one; for figures and files."""
    notes: tuple[str, ...] = ()
    """Sentences for the log."""


class RoundRobinMasks(dict[int, Tensor]):
    """The coordinates each client may change, as packed bits assigned in turn: client k has the (k mod n)-th.

    Only `get` answers: as a dict it is empty.
    """

    def __init__(self, turns: Sequence[Tensor]) -> None:
        super().__init__()
        self.turns = turns

    def get(self, client: int, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        """Return the bits of this client; `default` for a negative number, which is no client."""
        if client < 0:
            return default
        return self.turns[client % len(self.turns)]


def affordable_units(budgets: Sequence[int], fixed: int, unit: int = 1) -> list[int]:
    """Return how many units of coordinates fit in each budget beside those that are always sent.

    `budgets` are bytes of an update (4 per coordinate), `fixed` is the number of coordinates that train densely, `unit`
    the coordinates of one unit, such as those of one rank. A budget without room for one unit is refused.
    """
    counts = [(budget // 4 - fixed) // unit for budget in budgets]
    if min(counts) < 1:
        raise FedgraftError(
            "E-EDIT-BUDGET-BYTES",
            f"a budget of {min(budgets)} bytes per update has no room for the {4 * fixed} bytes that train densely "
            f"and {4 * unit} more",
            "raise it, or leave the head out (trainable.head_too=false)",
            budget=min(budgets),
        )
    return counts


HEAD = 0.003  # learning rate of a linear head whose features are unknown; else `runs/rates.py` computes it


@dataclass(frozen=True)
class Rates:
    """Default learning rates of a kind, for SGD with momentum and for Adam; docs/defaults.md has the measurements."""

    sgdm: float = 0.01
    adamw: float = 0.001
    small: bool = False
    """The edit needs a rate at which a head would diverge, so the head always keeps its own."""


def training(head: bool, body: bool, fixed_coordinates: bool = True, averaged_updates: bool = True) -> Capabilities:
    """Return the capabilities of a kind that trains the head, the body or both.

    `fixed_coordinates`: clients train the same coordinates in every round. `averaged_updates`: their updates may be
    averaged coordinate by coordinate.
    """
    provided = {Capability.FROZEN_HEAD, Capability.FROZEN_BODY}
    if head:
        provided.remove(Capability.FROZEN_HEAD)
        provided.add(Capability.TRAINED_HEAD)
    if body:
        provided.remove(Capability.FROZEN_BODY)
        provided.add(Capability.TRAINED_BODY)
    if fixed_coordinates:
        provided.add(Capability.FIXED_COORDINATES)
    if averaged_updates:
        provided.add(Capability.AVERAGED_UPDATES)
    return frozenset(provided)


def required_to_combine(provided: Capabilities) -> Capabilities:
    """Return what a kind requires that provides this: each update, unless one sum of all updates will do."""
    if {Capability.FIXED_COORDINATES, Capability.AVERAGED_UPDATES} <= provided:
        return NOTHING
    return frozenset({Capability.EACH_UPDATE})


class Trainable(Protocol):
    """A kind of trainable. What it provides describes what it trains, so that other code need not know its name."""

    @property
    def kind(self) -> str:
        """Name in a config."""
        ...

    @property
    def provides(self) -> Capabilities:
        """What is trained, and whether clients train the same coordinates and may average them; see `training`."""
        ...

    @property
    def requires(self) -> Capabilities:
        """What combining the clients' updates needs; see `required_to_combine`."""
        ...

    @property
    def instead(self) -> str:
        """The setting for a kind whose updates can be summed; empty if they can, or if no setting helps."""
        ...

    @property
    def rates(self) -> Rates:
        """Default learning rates."""
        ...

    @property
    def label(self) -> str:
        """Short description for figures."""
        ...

    @property
    def asks(self) -> Mapping[str, int]:
        """The client actions that opening requests, and how often."""
        ...

    @property
    def scores_data(self) -> bool:
        """Whether opening requests something computed from the clients' images."""
        ...

    def check(self, network: Network) -> None:
        """Raise an error if the kind does not fit this network."""
        ...

    def first_block(self, network: Network) -> int:
        """Return the earliest block with a trained coordinate, known before the space is open."""
        ...

    def open(self, network: Network, ask: Ask | None, saved: Mapping[str, Tensor] | None = None) -> TrainableSetup:
        """Return the edit space on this network, which may be changed in place for it (adapters).

        `saved`: what `TrainableSetup.stored` held when the space was opened first; then no client is asked.
        """
        ...


def check_blocks(network: Network, **counts: int) -> None:
    """Raise an error if an option needs more blocks than the network has."""
    for name, count in counts.items():
        if count > network.depth:
            blocks = f"{network.depth} blocks" if network.depth != 1 else "one block"
            raise FedgraftError(
                "E-EDIT-BLOCKS",
                f"trainable.{name} is {count} and the network has {blocks}",
                f"choose at most {network.depth}",
                option=name,
                count=count,
            )


def is_head(network: Network, name: str) -> bool:
    """Return whether a parameter belongs to the head."""
    return network.block_of(name) > network.depth


def layer_ranges(network: Network, space: EditSpace, layers: Sequence[str]) -> tuple[tuple[int, int, int], ...]:
    """Return (layer, begin, end) for every trained tensor: which of the observed layers its change affects first.

    `layer` is an index into `layers`; begin and end are positions in a vector of the space.
    """
    if not layers:
        return ()
    ranges = []
    for part, begin, end in space.trained_ranges:
        layer = first_seen(network, layers, network.block_of(part.name))
        ranges.append((layer, begin, end))
    return tuple(ranges)


def frozen_early(network: Network, name: str, freeze_blocks: int) -> bool:
    """Return whether a parameter lies in the first `freeze_blocks` blocks, or before them."""
    return bool(freeze_blocks) and network.block_of(name) < freeze_blocks
