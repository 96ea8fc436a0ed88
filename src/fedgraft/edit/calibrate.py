"""Calibration: from scores to one mask, in one round or several.

`oneshot` scores once. `average(R)` averages R different draws. `progressive(R)` is TaLoS: after round r a fraction
ρ^{r/R} of all coordinates is kept, what was excluded is multiplied by `soft` in the next rounds' forward passes and
never returns, and the weights come back bit for bit. Scores are asked for through a function, so the same code
serves one machine and a federation whose clients send sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.edit.choose import budget, choose, strategy_named
from fedgraft.edit.masks import Mask, intersection, union, votes
from fedgraft.edit.scope import Scope

NEGLIGIBLE = 1e-11
"""A score this small beside the mean is rounding; the K biases of a trained ViT in float32 reach 3e-12 of it."""


@dataclass(frozen=True)
class Mode:
    """How many rounds of scores are asked for, and what happens between them."""

    name: str
    rounds: int = 1
    schedule: str = "exponential"
    soft: float = 1.0

    def kept(self, round: int, total: int, density: float) -> int:
        """Coordinates that remain after this round (counted from 1), of `total` at the start."""
        progress = round / self.rounds
        return budget(total, density**progress if self.schedule == "exponential" else 1 - (1 - density) * progress)


def oneshot() -> Mode:
    """Score once, choose once."""
    return Mode("oneshot")


def average(rounds: int) -> Mode:
    """Average the scores of several different draws, choose once."""
    return _checked(Mode("average", rounds))


def progressive(rounds: int = 4, schedule: str = "exponential", soft: float = 0.1) -> Mode:
    """Shrink the mask round by round, scoring anew each time with what was excluded scaled by `soft`."""
    return _checked(Mode("progressive", rounds, schedule, soft))


def _checked(mode: Mode) -> Mode:
    if mode.rounds < 1:
        raise FedgraftError(f"calibration in {mode.rounds} rounds is impossible; give at least 1")
    if mode.schedule not in ("exponential", "linear"):
        raise FedgraftError(f"calibration schedule {mode.schedule!r} is not one of exponential, linear")
    if not 0 <= mode.soft <= 1:
        raise FedgraftError(f"the soft factor {mode.soft} is not between 0 and 1")
    return mode


@dataclass(frozen=True, eq=False)
class Calibration:
    """The mask, and what is worth knowing about how it came to be."""

    mask: Mask
    kept: tuple[int, ...]
    """Coordinates left after each round."""
    total: int
    """Coordinates the mask could choose from."""
    energy: float
    """Share of the sum of all scores that the chosen coordinates hold, by the first round's scores."""
    negligible: Mapping[str, int] = field(default_factory=dict)
    """Chosen coordinates whose score is only rounding, by tensor: for example the biases of K, which have no effect."""


@contextmanager
def softened(weights: Mapping[str, Tensor], alive: Mapping[str, Tensor], soft: float) -> Iterator[None]:
    """Multiply the coordinates that are not alive by `soft`, in place; all bits are restored on the way out."""
    saved = {name: weights[name].detach().clone() for name in alive}
    try:
        for name, mask in alive.items():
            tensor = weights[name].detach()
            tensor.copy_(torch.where(mask.to(tensor.device), tensor, tensor * soft))
        yield
    finally:
        for name, tensor in saved.items():
            weights[name].detach().copy_(tensor)


def calibrate(
    score_round: Callable[[int], Mapping[str, Tensor]],
    strategy: str,
    density: float,
    mode: Mode = Mode("oneshot"),
    *,
    scope: Scope | None = None,
    weights: Mapping[str, Tensor] | None = None,
    **rule: Any,
) -> Calibration:
    """Choose round(density * total) coordinates by the scores of `score_round(1)`, `score_round(2)`, ...

    `weights` are the live tensors that the scores are computed with; progressive calibration scales them in place
    while it asks for scores. `rule` goes to `choose` (threshold, floor, order, block_of). Magnitude and random
    scores do not depend on the data, so they are asked for once whatever the mode.
    """
    plan = strategy_named(strategy)
    mode = _checked(mode if plan.scores is None else oneshot())
    restrict: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = scope.restrict if scope else dict
    rule["largest"] = plan.largest

    def scores(round: int) -> Mapping[str, Tensor]:
        return restrict(score_round(round))

    if mode.name == "progressive":
        first, alive, kept = _shrink(scores, density, mode, None if weights is None else restrict(weights), rule)
    else:
        first = _averaged(scores, mode.rounds)
        alive = choose(first, density, **rule)
        kept = (alive.count,)
    mask = scope.expand(alive) if scope else alive
    return Calibration(mask, kept, alive.total, energy_share(first, alive), negligible_counts(first, alive))


def _averaged(scores: Callable[[int], Mapping[str, Tensor]], rounds: int) -> Mapping[str, Tensor]:
    """The mean of the rounds' scores, which must differ."""
    first = scores(1)
    total = {name: tensor.clone() for name, tensor in first.items()}
    for round in range(2, rounds + 1):
        found = scores(round)
        if all(torch.equal(found[name], first[name]) for name in first):
            raise FedgraftError(f"rounds 1 and {round} gave identical scores; averaging needs a new draw each round")
        for name, tensor in total.items():
            tensor.add_(found[name])
    return {name: tensor / rounds for name, tensor in total.items()} if rounds > 1 else first


def _shrink(
    scores: Callable[[int], Mapping[str, Tensor]],
    density: float,
    mode: Mode,
    weights: Mapping[str, Tensor] | None,
    rule: Mapping[str, Any],
) -> tuple[Mapping[str, Tensor], Mask, tuple[int, ...]]:
    """Progressive rounds; the choice is made among survivors only, so nothing excluded can return."""
    if weights is None and mode.soft != 1 and mode.rounds > 1:
        raise FedgraftError("progressive calibration scales excluded weights: give the live weights, or soft=1")
    first = scores(1)
    total = sum(tensor.numel() for tensor in first.values())
    alive = choose(first, k=mode.kept(1, total, density), **rule)
    kept = [alive.count]
    for round in range(2, mode.rounds + 1):
        with softened(weights, alive, mode.soft) if weights is not None and mode.soft != 1 else nullcontext():
            found = scores(round)
        alive = choose(found, k=mode.kept(round, total, density), among=alive, **rule)
        kept.append(alive.count)
    return first, alive, tuple(kept)


def energy_share(scores: Mapping[str, Tensor], mask: Mask) -> float:
    """Which share of the sum of all scores the mask's coordinates hold."""
    total = sum(float(tensor.sum(dtype=torch.float64)) for tensor in scores.values())
    held = sum(float(scores[name][chosen].sum(dtype=torch.float64)) for name, chosen in mask.items())
    return held / total if total else 0.0


def negligible_counts(scores: Mapping[str, Tensor], mask: Mask) -> dict[str, int]:
    """Chosen coordinates with a score that is only rounding, by tensor; tensors without any are left out."""
    total = sum(float(tensor.sum(dtype=torch.float64)) for tensor in scores.values())
    limit = NEGLIGIBLE * total / max(1, mask.total)
    counts = {name: int((scores[name][chosen] <= limit).count_nonzero()) for name, chosen in mask.items()}
    return {name: count for name, count in counts.items() if count}


def merge(masks: Sequence[Mask], how: str, density: float | None = None) -> Mask:
    """One mask from the clients' masks: `union`, `intersection`, or `vote` for the round(density * total) coordinates
    with the most votes, ties going by a fixed hash."""
    if how in ("union", "intersection"):
        return union(masks) if how == "union" else intersection(masks)
    if how != "vote" or density is None:
        raise FedgraftError(f"merge {how!r}: use union, intersection, or vote with a density")
    counted, wanted = votes(masks), budget(masks[0].total, density)
    if wanted == 0:
        return Mask({name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in counted.items()})
    return choose(counted, k=wanted, largest=True, order="hash")
