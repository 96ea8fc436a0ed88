"""Rounds to a target, with what is not known said: the evaluation grid, the start, and runs that never get there.

A run is looked at every few rounds, so it got there after one evaluation and by the next; a run that did not get there
is censored at its last evaluation. Means are restricted to the rounds that all runs have (Royston and Parmar 2013):
the mean of min(rounds, horizon) needs no guess about what would have come later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedgraft.core.errors import FedgraftError
from reproduction.statistics import Effect, paired

Curve = Mapping[int, float]
"""A number by round, round 0 (before training) included."""


@dataclass(frozen=True)
class Reached:
    """When one run first reached the target: after one evaluation, by the next."""

    after: int | None
    """The last evaluation before that was below; None: none was, the start is at the target."""
    by: int | None
    """None: not reached."""
    last: int

    def __str__(self) -> str:
        if self.by is None:
            return f"not reached in {self.last}"
        return "at the start" if self.after is None else f"{self.after + 1}-{self.by}"


@dataclass(frozen=True)
class Rounds:
    """Rounds to a target over seeds."""

    target: float
    runs: Mapping[int, Reached]
    horizon: int
    """The last round that all runs were evaluated up to."""

    @property
    def reached(self) -> int:
        """Runs that got there within the horizon."""
        return sum(r.by is not None and r.by <= self.horizon for r in self.runs.values())

    def restricted(self, horizon: int) -> dict[int, float]:
        """Rounds by seed, at most the horizon."""
        return {seed: float(min(horizon, horizon if r.by is None else r.by)) for seed, r in self.runs.items()}

    @property
    def mean(self) -> float | None:
        """The mean restricted to the horizon; None where no run got there."""
        times = self.restricted(self.horizon)
        return sum(times.values()) / len(times) if self.reached else None

    def __str__(self) -> str:
        count = f"{self.reached} of {len(self.runs)} runs"
        each = ", ".join(str(r) for r in self.runs.values())
        if self.mean is None:
            return f"{self.target:g} not reached in {self.horizon} rounds ({count})"
        what = "mean" if self.reached == len(self.runs) else f"mean restricted to {self.horizon} rounds"
        return f"{self.mean:.3g} rounds to {self.target:g} ({what}; {count}; each: {each})"


def rounds_to(curves: Mapping[int, Curve], target: float) -> Rounds:
    """Rounds to the target of one arm: curves by seed."""
    if not curves:
        raise FedgraftError("E-REPRODUCTION-NO-RUNS", "an arm without runs has no rounds to a target")
    runs = {seed: _reached(curve, target, seed) for seed, curve in curves.items()}
    return Rounds(target, runs, min(r.last for r in runs.values()))


def compare_rounds(left: Rounds, right: Rounds, ratio: bool = False) -> Effect | None:
    """Left against right, paired, restricted to the rounds that both arms have; None where neither got there.

    A ratio is only had where every run of both got there, after the start: a censored number has no logarithm.
    """
    horizon = min(left.horizon, right.horizon)
    times = [arm.restricted(horizon) for arm in (left, right)]
    late = [r.by is None or r.by > horizon for arm in (left, right) for r in arm.runs.values()]
    if all(late) or (ratio and (any(late) or any(not t for side in times for t in side.values()))):
        return None
    return paired(times[0], times[1], ratio=ratio)


def _reached(curve: Curve, target: float, seed: int) -> Reached:
    rounds = sorted(curve)
    if not rounds or rounds[0] != 0:
        raise FedgraftError(
            "E-REPRODUCTION-NO-START",
            f"the curve of seed {seed} lacks round 0; without the start nothing is known of a rise",
            seed=seed,
        )
    by = next((i for i, r in enumerate(rounds) if curve[r] >= target), None)
    if by is None:
        return Reached(rounds[-1], None, rounds[-1])
    return Reached(rounds[by - 1] if by else None, rounds[by], rounds[-1])
