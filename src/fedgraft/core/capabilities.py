"""Capabilities: what the parts of an algorithm require of each other, and what they provide.

Every part of an algorithm (its trainable, loss, local training, weighting, ...) has two sets of capabilities:
`requires`, what it needs in order to work, and `provides`, what it makes possible for the others. A combination of
parts is legal when every required capability is provided by some part. `docs/extend.md` has the table.

A capability is provided by parts of one slot only, which `Capability.slot` names; so an error can say which part
would have to be another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Capability(Enum):
    """One named capability: the slot whose parts may provide it, and its meaning."""

    # What the privacy strategy lets clients send and the server see.
    EACH_UPDATE = ("privacy", "each client's update by itself")
    CLIENT_TENSORS = ("privacy", "tensors that clients report beside their update")
    CLIENT_NUMBERS = ("privacy", "numbers that clients report beside their update")
    AUXILIARY_SUMS = ("privacy", "sums of further vectors, such as control variates")
    CLASS_COUNTS = ("privacy", "the class counts of the federation")
    CLIENT_WEIGHTS = ("privacy", "weights that differ between clients")
    TRANSFORMED_UPDATES = ("privacy", "updates that clients transform before they send them")
    ENCODED_UPDATES = ("privacy", "updates that a codec rounds or thins out")

    # What the trainable trains.
    TRAINED_BODY = ("trainable", "a trained body: with a frozen one all clients have the same features")
    FROZEN_BODY = ("trainable", "a frozen body")
    TRAINED_HEAD = ("trainable", "a trained head")
    FROZEN_HEAD = ("trainable", "a frozen head")
    FIXED_COORDINATES = ("trainable", "the same trained coordinates for every client in every round")
    AVERAGED_UPDATES = ("trainable", "updates that may be averaged coordinate by coordinate")

    # Which models the aggregation has.
    COMMON_MODEL = ("aggregate", "one common model")
    STABLE_MODEL = ("aggregate", "a client that continues the same model from round to round")
    PERSONAL_MODELS = ("aggregate", "one model per client")
    EXCHANGE = ("aggregate", "updates that travel between clients and server")

    # The other slots.
    COMMON_START = ("client_state", "clients that start every round from the common model")
    STATELESS_STEP = ("server", "a server step without memory of earlier rounds")
    KNOWN_DISPLACEMENT = ("local", "an optimizer whose displacement per gradient is known")
    ONE_RATE = ("local", "one learning rate for all coordinates")
    SAME_START = ("rounds", "updates that all began with the present model")
    SEPARATE_CLIENTS = ("engine", "clients that are trained one by one")
    GRADIENT_VECTORS = ("engine", "each client's gradient as a vector, which products over all heads do not make")

    def __init__(self, slot: str, meaning: str) -> None:
        self.slot = slot
        self.meaning = meaning


Capabilities = frozenset[Capability]
NOTHING: Capabilities = frozenset()


class Requiring(Protocol):
    """Anything that says what it requires: a part of an algorithm, or an observation."""

    @property
    def requires(self) -> Capabilities:
        """What it needs from the parts of the algorithm."""
        ...


class CapablePart(Requiring, Protocol):
    """A part of an algorithm that says what it requires and provides."""

    @property
    def provides(self) -> Capabilities:
        """What this part makes possible for the others."""
        ...


@dataclass(frozen=True)
class NamedPart:
    """A part with its slot, its name for people, and the settings that replace it by a plainer one."""

    slot: str
    name: str
    requires: Capabilities
    provides: Capabilities
    instead: str = ""
    """For example "algorithm.robust='mean'"; empty if no setting replaces the part."""


@dataclass(frozen=True)
class Unmet:
    """A part requires a capability that no part provides."""

    part: NamedPart
    capability: Capability


def required_by(items: Iterable[Requiring]) -> Capabilities:
    """Return everything that at least one of these parts or observations requires."""
    required: set[Capability] = set()
    for item in items:
        required |= item.requires
    return frozenset(required)


def provided_by(parts: Iterable[NamedPart]) -> Capabilities:
    """Return everything that at least one of the parts provides."""
    provided: set[Capability] = set()
    for part in parts:
        provided |= part.provides
    return frozenset(provided)


def unmet_requirements(parts: Sequence[NamedPart]) -> list[Unmet]:
    """Return each required capability that no part provides, in the order of the parts and of `Capability`.

    Capabilities of slots that are not among the parts, such as the engine, are left to whoever chooses them.
    """
    slots = {part.slot for part in parts}
    provided = provided_by(parts)
    unmet = []
    for part in parts:
        for capability in Capability:
            missing = capability in part.requires and capability not in provided
            if missing and capability.slot in slots:
                unmet.append(Unmet(part, capability))
    return unmet
