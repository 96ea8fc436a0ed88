"""Mask calibration: from sensitivity scores to one mask, in one round or several.

`oneshot` scores once. `average(R)` averages R different draws. `progressive(R)` is TaLoS (Iurada et al. 2025): after
round r a fraction ρ^{r/R} of all coordinates remains, excluded coordinates are multiplied by `soft` in the forward
passes of the next rounds and never return, and at the end the weights are restored bit for bit. Scores come from a
function, so the same code serves one machine and a federation whose clients send sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError
from fedgraft.edit.choose import choose, coordinate_budget, strategy_named
from fedgraft.edit.masks import Mask, intersection, union, votes
from fedgraft.edit.scope import Scope

NEGLIGIBLE = 1e-11
"""A score below this share of the mean is rounding; the K biases of a trained ViT in float32 reach 3e-12 of it."""


@dataclass(frozen=True)
class CalibrationMode:
    """How many rounds of scores are computed, and how the mask shrinks between them."""

    name: str
    rounds: int = 1
    schedule: str = "exponential"
    soft: float = 1.0

    def remaining(self, round: int, total: int, density: float) -> int:
        """Return how many of `total` coordinates remain after this round (counted from 1); `density` after the last."""
        progress = round / self.rounds
        if self.schedule == "exponential":
            share = density**progress
        else:
            share = 1 - (1 - density) * progress
        return coordinate_budget(total, share)


def oneshot() -> CalibrationMode:
    """Return the mode that scores once and chooses once."""
    return CalibrationMode("oneshot")


def average(rounds: int) -> CalibrationMode:
    """Return the mode that averages the scores of several different draws and chooses once."""
    return _checked(CalibrationMode("average", rounds))


def progressive(rounds: int = 4, schedule: str = "exponential", soft: float = 0.1) -> CalibrationMode:
    """Return the mode that shrinks the mask round by round, scoring with excluded coordinates scaled by `soft`."""
    return _checked(CalibrationMode("progressive", rounds, schedule, soft))


def _checked(mode: CalibrationMode) -> CalibrationMode:
    """Return the mode, or raise an error for impossible options."""
    if mode.rounds < 1:
        raise FedgraftError(
            "E-EDIT-CALIBRATION-ROUNDS",
            f"calibration in {mode.rounds} rounds is impossible",
            "choose at least 1 round",
            rounds=mode.rounds,
        )
    if mode.schedule not in ("exponential", "linear"):
        raise FedgraftError(
            "E-EDIT-CALIBRATION-SCHEDULE",
            f"there is no calibration schedule {mode.schedule!r}",
            "choose exponential or linear",
            schedule=mode.schedule,
        )
    if not 0 <= mode.soft <= 1:
        raise FedgraftError(
            "E-EDIT-CALIBRATION-SOFT",
            f"the soft factor of calibration is {mode.soft}",
            "choose a number between 0 and 1",
            soft=mode.soft,
        )
    return mode


@dataclass(frozen=True, eq=False)
class Calibration:
    """The mask, with figures about how it was chosen."""

    mask: Mask
    remaining: tuple[int, ...]
    """Coordinates left after each round."""
    total: int
    """Coordinates that the mask could choose from."""
    energy: float
    """Share of the chosen coordinates in the sum of all scores, by the first round's scores."""
    negligible: Mapping[str, int] = field(default_factory=dict)
    """Chosen coordinates whose score is only rounding, by tensor: for example the biases of K, which have no effect."""


@contextmanager
def softened(weights: Mapping[str, Tensor], alive: Mapping[str, Tensor], soft: float) -> Iterator[None]:
    """Multiply the coordinates that are False in `alive` by `soft` inside the block, in place; then restore all bits.

    `weights` are the live tensors by name, `alive` the masks of those that may change.
    """
    saved = {name: weights[name].detach().clone() for name in alive}
    try:
        for name, mask in alive.items():
            tensor = weights[name].detach()
            tensor.copy_(torch.where(Device(tensor.device).put(mask), tensor, tensor * soft))
        yield
    finally:
        for name, tensor in saved.items():
            weights[name].detach().copy_(tensor)


def calibrate(
    score_round: Callable[[int], Mapping[str, Tensor]],
    strategy: str,
    density: float,
    mode: CalibrationMode = CalibrationMode("oneshot"),
    *,
    scope: Scope | None = None,
    weights: Mapping[str, Tensor] | None = None,
    **rule: Any,
) -> Calibration:
    """Choose round(density * total) coordinates by the scores of `score_round(1)`, `score_round(2)`, ...

    Args:
        score_round: returns the scores of all maskable tensors in a calibration round, counted from 1.
        strategy: name in `STRATEGIES`.
        density: share of the coordinates that is trained.
        mode: number of rounds, and how the mask shrinks.
        scope: which tensors and rows the mask may touch; None: all that are scored.
        weights: the live tensors that the scores are computed with; progressive calibration scales them in place while
            scores are computed.
        rule: passed to `choose` (threshold, floor, order, block_of).

    Magnitude and random scores do not depend on the data, so they are computed once whatever the mode.
    """
    strategy_rule = strategy_named(strategy)
    if strategy_rule.scores is not None:
        mode = oneshot()
    mode = _checked(mode)
    rule["largest"] = strategy_rule.largest

    def restrict(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the part of these tensors that the mask may touch."""
        if scope is None:
            return dict(tensors)
        return scope.restrict(tensors)

    def scores(round: int) -> Mapping[str, Tensor]:
        return restrict(score_round(round))

    if mode.name == "progressive":
        live_weights = None
        if weights is not None:
            live_weights = restrict(weights)
        first, alive, remaining = _shrink(scores, density, mode, live_weights, rule)
    else:
        first = _averaged(scores, mode.rounds)
        alive = choose(first, density, **rule)
        remaining = (alive.count,)
    mask = alive
    if scope is not None:
        mask = scope.expand(alive)
    return Calibration(mask, remaining, alive.total, energy_share(first, alive), negligible_counts(first, alive))


def _averaged(scores: Callable[[int], Mapping[str, Tensor]], rounds: int) -> Mapping[str, Tensor]:
    """Return the mean of the scores of all rounds, which must differ."""
    first = scores(1)
    total = {name: tensor.clone() for name, tensor in first.items()}
    for round in range(2, rounds + 1):
        round_scores = scores(round)
        if all(torch.equal(round_scores[name], first[name]) for name in first):
            raise FedgraftError(
                "E-EDIT-CALIBRATION-SAME-SCORES",
                f"calibration rounds 1 and {round} gave identical scores",
                "draw other samples in each round",
                round=round,
            )
        for name, tensor in total.items():
            tensor.add_(round_scores[name])
    if rounds == 1:
        return first
    return {name: tensor / rounds for name, tensor in total.items()}


def _shrink(
    scores: Callable[[int], Mapping[str, Tensor]],
    density: float,
    mode: CalibrationMode,
    weights: Mapping[str, Tensor] | None,
    rule: Mapping[str, Any],
) -> tuple[Mapping[str, Tensor], Mask, tuple[int, ...]]:
    """Return the first round's scores, the last mask and the coordinates left after each progressive round.

    `scores(round)` returns the scores of a round, `density` is the share of the coordinates that remains in the end,
    `mode` says in how many rounds. `weights` are the live tensors that are scaled between rounds, `rule` are options of
    `choose`. Each round chooses among the remaining coordinates only, so an excluded one cannot return.
    """
    if weights is None and mode.soft != 1 and mode.rounds > 1:
        raise FedgraftError(
            "E-EDIT-CALIBRATION-WEIGHTS",
            "progressive calibration scales excluded weights and has no weights to scale",
            "pass the live weights, or use soft=1",
        )
    first = scores(1)
    total = sum(tensor.numel() for tensor in first.values())
    alive = choose(first, k=mode.remaining(1, total, density), **rule)
    remaining = [alive.count]
    for round in range(2, mode.rounds + 1):
        if weights is not None and mode.soft != 1:
            with softened(weights, alive, mode.soft):
                round_scores = scores(round)
        else:
            round_scores = scores(round)
        alive = choose(round_scores, k=mode.remaining(round, total, density), among=alive, **rule)
        remaining.append(alive.count)
    return first, alive, tuple(remaining)


def _score_sum(scores: Mapping[str, Tensor]) -> float:
    """Return the sum of all scores."""
    return sum(float(tensor.sum(dtype=torch.float64)) for tensor in scores.values())


def energy_share(scores: Mapping[str, Tensor], mask: Mask) -> float:
    """Return the share of the mask's coordinates in the sum of all scores."""
    total = _score_sum(scores)
    if not total:
        return 0.0
    inside = _score_sum({name: scores[name][chosen] for name, chosen in mask.items()})
    return inside / total


def negligible_counts(scores: Mapping[str, Tensor], mask: Mask) -> dict[str, int]:
    """Return how many coordinates in `mask` have a score that is only rounding, by tensor, for those that have some."""
    limit = NEGLIGIBLE * _score_sum(scores) / max(1, mask.total)
    counts = {}
    for name, chosen in mask.items():
        count = int((scores[name][chosen] <= limit).count_nonzero())
        if count:
            counts[name] = count
    return counts


def merge_masks(masks: Sequence[Mask], how: str, density: float | None = None) -> Mask:
    """Return one mask from the clients' masks; `how` is "union", "intersection" or "vote".

    A vote takes the round(density * total) coordinates with the most votes and breaks ties by a fixed hash.
    """
    if how == "union":
        return union(masks)
    if how == "intersection":
        return intersection(masks)
    if how != "vote" or density is None:
        raise FedgraftError(
            "E-EDIT-MASK-MERGE",
            f"masks cannot be merged by {how!r} with density {density}",
            "use union, intersection, or vote with a density",
            how=how,
        )
    counts = votes(masks)
    k = coordinate_budget(masks[0].total, density)
    if k == 0:
        return Mask({name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in counts.items()})
    return choose(counts, k=k, largest=True, order="hash")
