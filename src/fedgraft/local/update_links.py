"""Transformations of a client's update before it is sent: a chain of links, each with the scalars it reports.

FedNova's normalisation (Wang et al. 2020) and the clipping of differential privacy are such links. The codec comes
after all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedgraft.core.capabilities import NOTHING, Capabilities, Capability


@dataclass(frozen=True)
class Sending:
    """What a link may read: the effective steps, the settings of the request, the number of trained coordinates."""

    effective_steps: float
    settings: Mapping[str, float | int | str]
    trained: int


@dataclass(frozen=True)
class StepRange:
    """The fewest and the most effective steps (rate times the optimizer's gain) of any client in a round."""

    smallest: float
    largest: float


@dataclass(frozen=True)
class Scale:
    """Bounds on the output of a link: its trained coordinates as a multiple of its input, and its scalars."""

    update: float
    scalars: Mapping[str, float]


@dataclass(frozen=True)
class UpdateLink:
    """`apply(update, sending) -> (update, scalars)`. `scalars` has the largest value of each scalar it reports."""

    name: str
    apply: Callable[[Tensor, Sending], tuple[Tensor, dict[str, float]]]
    scalars: Mapping[str, float] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    """Names of the scalars that are integers, such as an indicator."""
    scale: Callable[[StepRange], Scale] | None = None
    """Bounds on its output in a round of these steps, for the fixed-point numbers of a secure sum; None: no larger
    than its input, and scalars up to the largest value of each."""
    requires: Capabilities = frozenset({Capability.TRANSFORMED_UPDATES, Capability.SEPARATE_CLIENTS})
    """Without `SEPARATE_CLIENTS` the link is continuous: inputs that differ in the last bits, as those of clients that
    are trained together, give outputs that differ in the last bits."""
    provides: ClassVar[Capabilities] = NOTHING


def normalise() -> UpdateLink:
    """Return FedNova's link: divide by the effective number of steps, and report it as `tau`.

    Only trained coordinates are divided: the batch-norm statistics behind them do not result from steps.
    """

    def apply(update: Tensor, sending: Sending) -> tuple[Tensor, dict[str, float]]:
        """Return the update divided by the effective steps, and {"tau": effective steps}."""
        scaled = update.clone()
        scaled[: sending.trained] /= sending.effective_steps
        return scaled, {"tau": sending.effective_steps}

    def scale(steps: StepRange) -> Scale:
        return Scale(1 / steps.smallest, {"tau": steps.largest})

    requires = frozenset(
        {
            Capability.TRANSFORMED_UPDATES,
            Capability.KNOWN_DISPLACEMENT,
            Capability.ONE_RATE,
            Capability.SAME_START,  # its steps are those of one learning rate
        }
    )
    return UpdateLink("normalise", apply, {"tau": 1e4}, scale=scale, requires=requires)


def run_chain(links: tuple[UpdateLink, ...], update: Tensor, sending: Sending) -> tuple[Tensor, dict[str, float]]:
    """Return the update after all links, and all scalars that they report; `sending` is what they know of the round."""
    scalars: dict[str, float] = {}
    for link in links:
        update, reported = link.apply(update, sending)
        scalars |= reported
    return update, scalars
