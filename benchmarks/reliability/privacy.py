"""Privacy: epsilon against dp-accounting called independently, noise and sensitivity of whole private rounds.

The rounds, in the clear and inside the secure sum, are in `private_rounds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.unit.privacy.test_dp import worst_shift
from torch import Tensor

from benchmarks.reliability.outcome import Outcome, share
from benchmarks.reliability.private_rounds import (
    BOUND,
    KEY,
    Kind,
    largest_shift,
    noise_case,
    pair_shift,
    private,
    quiet,
)
from fedgraft import algorithms as zoo
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.slots import uniform
from fedgraft.algorithms.algorithm import vary
from fedgraft.core.errors import FedgraftError
from fedgraft.privacy import protection
from fedgraft.privacy.accounting import LARGE_EPSILON, epsilon
from fedgraft.privacy.dp import Mechanism, clip, gaussian_noise, sensitivity
from fedgraft.privacy.protection import DifferentialPrivacy

KINDS: tuple[Kind, Kind] = ("clear", "secure")


def reference(q: float, z: float, rounds_: int, delta: float) -> float:
    """Epsilon by dp-accounting's privacy loss distributions, built here and not by the library."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(z, sampling_prob=q, use_connect_dots=True)
    return float(one.self_compose(rounds_).get_epsilon_for_delta(delta))


def configurations(count: int) -> list[tuple[float, float, int, float]]:
    """Random (q, noise, rounds, delta)."""
    rng = np.random.default_rng(0)
    return [
        (
            float(10 ** rng.uniform(-2.5, 0)),
            float(10 ** rng.uniform(0.0, 0.9)),
            int(rng.integers(1, 1000)),
            float(10 ** rng.uniform(-6, -3)),
        )
        for _ in range(count)
    ]


def compare(account: Callable[..., float], count: int) -> dict[str, float]:
    """How many accounts lie below the reference, and the largest excess over it; apart where epsilon says nothing."""
    below, excess, large, beyond = 0, 0.0, 0, 0.0
    for q, z, rounds_, delta in configurations(count):
        wanted, found = reference(q, z, rounds_, delta), account(q, z, rounds_, delta)
        below += found < wanted * (1 - 1e-9)
        if found > LARGE_EPSILON:  # a cheap bound is told there, by design
            large += 1
            beyond = max(beyond, found / wanted - 1)
        else:
            excess = max(excess, found / wanted - 1)
    return {"below": below, "excess": excess, "large": large, "beyond": beyond}


def by_answers(self: Mechanism, total: Tensor, effective_steps: float, key: bytes, round_: int) -> Tensor:
    """The planted bug: a deviation for the clients that answered, as if there were always three."""
    noise = gaussian_noise(len(total), key, "sum", round_) * self.noise * effective_steps / 3
    return ((total.double() + noise) / self.expected).float()


def all_counted(advance: Callable[..., Any]) -> Callable[..., Any]:
    """The planted bug: a secure sum counts everybody, though a cohort of one is not summed at all."""

    def with_everybody(self: Any, step: Any, total: Tensor, within: float, counted: int, *rest: Any) -> Any:
        return advance(self, step, (counted + 1) / max(1, counted) * total, within, counted, *rest)

    return with_everybody


def shift(divide: Callable[[Tensor, int], Tensor]) -> float:
    """The largest move of the mean by one client, in units of the stated sensitivity."""
    stated = sensitivity(BOUND, 1.0) / 5.0
    return worst_shift(divide, BOUND) / stated


def refusals() -> tuple[int, int]:
    """Settings whose account would be wrong: how many are refused, of how many."""
    wrong: list[Callable[[], Any]] = [
        lambda: vary(private(50, 0.1), weighting=zoo.fedavg().weighting),
        lambda: vary(private(50, 0.1), aggregate=robust_aggregator("median")),
        lambda: vary(zoo.scaffold(), weighting=uniform(), privacy=private(50, 0.1).privacy),
        lambda: clip(torch.tensor([math.nan]), 1.0),
        lambda: Mechanism(1.0, 0.1, 10).release(torch.tensor([math.inf]), 1.0, KEY, 0),
    ]
    found = 0
    for make in wrong:
        try:
            make()
        except FedgraftError:
            found += 1
    return found, len(wrong)


def accounts(scale: float) -> Outcome:
    """Epsilon against dp-accounting; and an account that is too kind."""
    count = share(500, scale, 2)
    account = compare(epsilon, count)
    lax = compare(lambda q, z, t, d: epsilon(q, 1.05 * z, t, d), 2)
    return Outcome(
        account["below"] == 0 and account["excess"] < 0.01,
        f"{count} configurations: {account['below']:.0f} below dp-accounting, largest excess "
        f"{100 * account['excess']:.2f} %; {account['large']:.0f} of them tell an epsilon above {LARGE_EPSILON:g} by a "
        f"cheaper bound, at most {100 * account['beyond']:.0f} % more than it is",
        {"account for 5 % more noise than there is": f"{lax['below']:.0f} of 2 below"},
        lax["below"] == 2,
        {"count": count, **account},
    )


def noise(scale: float) -> Outcome:
    """Deviation, sensitivity, refusals; and four broken mechanisms."""
    cases, length = share(100, scale, 2), 200_000
    quiet()
    errors = {kind: max(noise_case(seed, length, kind) for seed in range(cases)) for kind in KINDS}
    moved = {kind: largest_shift(max(cases, 6), 2000, kind) for kind in KINDS}
    shifts: dict[str, float] = {kind: found for kind, (found, _) in moved.items()}
    shifts["secure"] = max(shifts["secure"], pair_shift(2000))
    fixed = Mechanism(0.0, 0.1, 50)
    shifts["sum"] = shift(lambda total, n: fixed.release(total, BOUND, KEY, 1).double())
    refused, wrong = refusals()
    with mock.patch.object(Mechanism, "release", by_answers):
        planted = {kind: max(noise_case(seed, length, kind) for seed in range(2)) for kind in KINDS}
    # Not clipped at all, an update leaves the range of the hidden sum, and the client leaves the sum.
    with mock.patch.object(protection, "clip", lambda update, bound: clip(update, 1.5 * bound)):
        unclipped, _ = largest_shift(6, 2000, "secure")
    with mock.patch.object(DifferentialPrivacy, "advance_from_sum", all_counted(DifferentialPrivacy.advance_from_sum)):
        both = pair_shift(2000)
    realised = shift(lambda total, n: total / max(n, 1))
    return Outcome(
        max(errors.values()) < 0.01 and max(shifts.values()) <= 1 + 1e-6 and refused == wrong,
        f"{cases} private rounds in the clear and {cases} inside the secure sum, cohorts of 2 to 11 with lost, zero "
        f"and NaN clients: deviation of the noise off by at most {100 * errors['clear']:.2f} % and "
        f"{100 * errors['secure']:.2f} % ({length:,} coordinates); one client, sampled or not, silent or not, moves "
        f"the result by at most {shifts['clear']:.4f}x and {shifts['secure']:.4f}x the stated sensitivity "
        f"({moved['secure'][1]} sums that were given up for want of that client left out); {refused} of {wrong} wrong "
        "settings refused",
        {
            "noise for three answers, whatever comes": "deviation off by "
            + " and ".join(f"{100 * found:.0f} %" for found in planted.values()),
            "realised count as denominator": f"one client moves the mean by {realised:.1f}x the sensitivity",
            "clients that clip at 1.5 bounds, inside the secure sum": f"one moves the result by {unclipped:.1f}x",
            "everybody counted in a secure sum": f"one of two moves the result by {both:.1f}x",
        },
        min(planted.values()) > 0.01 and min(realised, unclipped, both) > 1.01,
        {"cases": cases, "deviation": errors, "shift": shifts},
    )
