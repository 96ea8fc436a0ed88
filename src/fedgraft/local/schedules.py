"""Learning-rate schedules as pure functions of position and history.

`lr(t, total, history)` returns the rate at round (or epoch, or step) t of total. `history` is the list of past
validation losses, so that even the plateau rule needs no state and a resumed run gets the same rates.
A schedule counts over the whole run; nothing restarts inside a round. One of your own is a function
`make(lr, ...) -> lr(t, total, history)` in `registry.SCHEDULES`, or, in Python, `fg.run(..., schedule=rate)` with
`rate(t, total, history)` itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import Count, Inner, NotNegative, Number, Positive, Share, in_range
from fedgraft.core.registry import SCHEDULES
from fedgraft.core.state import Schedule


def constant_rate(lr: float) -> Schedule:
    """Return the same rate for the whole run."""
    return lambda t, total, history: lr


@in_range
def cosine(lr: float, minimum: NotNegative = 0.0, restarts: Number = 0, period: Count | None = None) -> Schedule:
    """Return half a cosine from lr down; with restarts, the same in equal cycles.

    It would reach the minimum one position after the last (PyTorch's T_max), so no round is idle. With a `period` of
    its own the cosine goes on at the run's end or before: after `period` rounds the rate is at the minimum, and it
    rises again from there, as PyTorch's CosineAnnealingLR does.

    Args:
        minimum: rate at the end
        restarts: number of times the rate jumps back up
        period: rounds of half a cosine (PyTorch's T_max); default: all rounds of the run
    """
    if period is not None and restarts:
        raise FedgraftError(
            "E-LOCAL-SCHEDULE-PERIOD",
            "a cosine has both restarts and a period, and restarts divide the run's length",
            "give one of schedule.restarts and schedule.period",
        )

    def rate(t: int, total: int, history: Sequence[float]) -> float:
        """Return the rate at round (or epoch, or step) t of `total`."""
        if period is not None:
            return minimum + 0.5 * (lr - minimum) * (1 + math.cos(math.pi * t / period))
        cycle = max(1, math.ceil(total / (restarts + 1)))
        return minimum + 0.5 * (lr - minimum) * (1 + math.cos(math.pi * (t % cycle) / cycle))

    return rate


@in_range
def linear(lr: float, minimum: NotNegative = 0.0) -> Schedule:
    """Return a straight line down from lr; it would reach the minimum one position after the last, so none is idle.

    Args:
        minimum: rate at the end
    """
    return lambda t, total, history: minimum + (lr - minimum) * max(0, total - t) / max(1, total)


@in_range
def exponential(lr: float, decay: Share = 0.99) -> Schedule:
    """Return lr times decay to the power t: the usual `lambda` schedule.

    Args:
        decay: factor per round
    """
    return lambda t, total, history: lr * decay**t


@in_range
def inverse(lr: float, gamma: Positive = 0.1, power: Positive = 0.5) -> Schedule:
    """Return lr·(1+γt)^−α.

    Args:
        gamma: γ
        power: α
    """
    return lambda t, total, history: lr * (1 + gamma * t) ** -power


@in_range
def step(lr: float, at: tuple[Inner, ...] = (0.5, 0.75), factor: Inner = 0.1) -> Schedule:
    """Return lr, multiplied by the factor at each of these fractions of the run.

    Args:
        at: fractions of the run
        factor: on the rate
    """

    def rate(t: int, total: int, history: Sequence[float]) -> float:
        passed = sum(t >= math.floor(fraction * total) for fraction in at)
        return lr * factor**passed

    return rate


@in_range
def plateau(
    lr: float,
    factor: Inner = 0.1,
    patience: Number = 3,
    minimum: NotNegative = 0.0,
    threshold: NotNegative = 1e-4,
) -> Schedule:
    """Return lr, multiplied by the factor after more than `patience` evaluations without a relative improvement.

    Args:
        factor: on the rate
        patience: evaluations to wait
        minimum: the rate does not fall below it
        threshold: relative decrease of the loss that counts as an improvement
    """

    def rate(t: int, total: int, history: Sequence[float]) -> float:
        """Return the rate after the validation losses in `history`."""
        current = lr
        best = math.inf
        bad = 0  # evaluations without an improvement
        for loss in history:
            if loss < best * (1 - threshold):
                best = loss
                bad = 0
            else:
                bad += 1
            if bad > patience:
                current = max(minimum, current * factor)
                bad = 0
        return current

    return rate


def warmed(schedule: Schedule, length: int, start: float = 0.0) -> Schedule:
    """Return the schedule with a linear warm-up from `start` times the rate over the first `length` positions."""

    def rate(t: int, total: int, history: Sequence[float]) -> float:
        """Return the schedule's rate at round (or epoch, or step) t of `total`, times the ramp.

        `history` are the validation losses so far, which the schedule may use.
        """
        ramp = 1.0
        if length:
            ramp = start + (1 - start) * min(1.0, (t + 1) / length)
        return ramp * schedule(t, total, history)

    return rate


SCHEDULES |= {
    "none": constant_rate,
    "cosine": cosine,
    "linear": linear,
    "lambda": exponential,
    "inverse": inverse,
    "step": step,
    "plateau": plateau,
}
