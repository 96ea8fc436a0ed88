"""What happens to a client's update before it leaves: a chain of links, each with the numbers it reports beside it.

FedNova's normalisation and the clipping of differential privacy are such links. The codec comes after all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Sending:
    """What a link may know: how far the client went, what the order said, where the trained coordinates end."""

    effective_steps: float
    settings: Mapping[str, float | int | str]
    trained: int


@dataclass(frozen=True)
class StepRange:
    """The fewest and the most effective steps (rate times the optimizer's gain) that any client of a round goes."""

    least: float
    most: float


@dataclass(frozen=True)
class Scale:
    """How large the output of a link is: the trained coordinates as a multiple of its input, and its scalars."""

    update: float
    scalars: Mapping[str, float]


@dataclass(frozen=True)
class UpdateLink:
    """`apply(update, sending) -> (update, scalars)`. `scalars` names what it reports and the largest value of each."""

    name: str
    apply: Callable[[Tensor, Sending], tuple[Tensor, dict[str, float]]]
    scalars: Mapping[str, float] = field(default_factory=dict)
    needs_effective_steps: bool = False
    whole: tuple[str, ...] = ()
    """Scalars that are whole numbers, such as an indicator."""
    scale: Callable[[StepRange], Scale] | None = None
    """How large its output can be in a round of these steps, for the fixed-point numbers of a secure sum; None: no
    larger than its input, and scalars up to the largest value of each."""
    even: bool = False
    """What differs in its last bits before differs in its last bits after: nothing is sorted, cut or signed."""


def normalise() -> UpdateLink:
    """FedNova: divide by the effective number of steps, and report it as `tau`.

    Only what was trained is divided: batch-norm statistics behind it did not come about by steps.
    """

    def apply(update: Tensor, sending: Sending) -> tuple[Tensor, dict[str, float]]:
        scaled = update.clone()
        scaled[: sending.trained] /= sending.effective_steps
        return scaled, {"tau": sending.effective_steps}

    def scale(steps: StepRange) -> Scale:
        return Scale(1 / steps.least, {"tau": steps.most})

    return UpdateLink("normalise", apply, {"tau": 1e4}, needs_effective_steps=True, even=True, scale=scale)


def run_chain(links: tuple[UpdateLink, ...], update: Tensor, sending: Sending) -> tuple[Tensor, dict[str, float]]:
    """The update after all links, with everything they report."""
    scalars: dict[str, float] = {}
    for link in links:
        update, reported = link.apply(update, sending)
        scalars |= reported
    return update, scalars
