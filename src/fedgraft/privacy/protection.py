"""Who may see what: nothing hidden, or only the sum over those who stay; with or without differential privacy.

`secure` and `private` wrap an algorithm; they compose, and an algorithm that they cannot carry is refused when it is
built.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedgraft.aggregate.server_rules import RoundInfo
from fedgraft.aggregate.slots import Step
from fedgraft.core.state import ServerState
from fedgraft.local.update_links import Sending, UpdateLink
from fedgraft.privacy.dp import AdaptiveClip, Mechanism, bound_key, clip, sensitivity

if TYPE_CHECKING:
    from fedgraft.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class DifferentialPrivacy:
    """Client-level differential privacy: updates are clipped, their sum is noised, the denominator is fixed."""

    mechanism: Mechanism
    clip: float = 1.0
    """Largest norm of an update; with `adaptive` where the bound starts."""
    adaptive: AdaptiveClip | None = None
    key: bytes = b""
    """Key of the noise; whoever knows it can take the noise off."""
    bound: bool = False
    """The noise follows from the sum too, as it should where the key is a secret; else from key and round alone."""

    def link(self) -> UpdateLink:
        """What clients do to their update: clip it to the order's bound, and say whether it was within."""

        def apply(update: Tensor, sending: Sending) -> tuple[Tensor, dict[str, float]]:
            clipped, within = clip(update, float(sending.settings["clip"]))
            return clipped, {"within": float(within)} if self.adaptive is not None else {}

        reports = {"within": 1.0} if self.adaptive is not None else {}
        return UpdateLink("clip", apply, reports, whole=("within",), even=True)

    def advance(
        self, step: Step, updates: list[Tensor], within: float, answered: int, rounding: float | None = None
    ) -> ServerState:
        """The clipped sum with noise over the fixed denominator. `rounding`: it came hidden, in steps of this size.

        An empty round releases noise too: who was there is private.
        """
        state, length = step.state, len(step.state.vector)
        total = torch.zeros(length, dtype=torch.float64)
        for update in updates:  # what arrives in the clear is clipped again: a client may not have done it
            total += update.double() if rounding is not None else clip(update, state.clip)[0].double()
        mechanism, key = self.mechanism, bound_key(self.key, total) if self.bound else self.key
        if self.adaptive is not None:
            mechanism = replace(mechanism, noise=self.adaptive.change_noise)
        moved = sensitivity(state.clip, 1.0, rounding or 0.0, length)
        update = mechanism.release(total, moved, key, state.round)
        new = step.server_step(update, RoundInfo(mechanism.population, max(1, round(mechanism.expected))))
        if self.adaptive is None:
            return new
        return replace(new, clip=self.adaptive.update(state.clip, within, answered, key, state.round))


@dataclass(frozen=True)
class Protection:
    """`hidden`: the server sees only the sum over those who stay. `dp`: clipped and noised."""

    hidden: bool = False
    limit: float = 1.0
    """Largest absolute value of a coordinate inside the hidden sum; what is beyond is cut."""
    threshold: int | None = None
    """Shares needed to open a lost client's masks; None: two thirds of the holders."""
    degree: int | None = None
    """Neighbours of a client in large cohorts; None: everyone."""
    dp: DifferentialPrivacy | None = None
    links: tuple[UpdateLink, ...] = ()
    """What the protection adds to the client's chain of update links."""


CLEAR = Protection()


def secure(
    algorithm: Algorithm, limit: float = 1.0, threshold: int | None = None, degree: int | None = None
) -> Algorithm:
    """The algorithm under secure aggregation: five stages instead of one, and the server opens only the sum."""
    kept = replace(algorithm.privacy, hidden=True, limit=limit, threshold=threshold, degree=degree)
    return replace(algorithm, privacy=kept)


def private(algorithm: Algorithm, dp: DifferentialPrivacy) -> Algorithm:
    """The algorithm under client-level differential privacy; it must weigh every client the same."""
    link = dp.link()
    own = tuple(old for old in algorithm.update if old not in algorithm.privacy.links)
    return replace(algorithm, privacy=replace(algorithm.privacy, dp=dp, links=(link,)), update=(*own, link))
