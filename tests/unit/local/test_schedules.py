"""Schedules against torch's, where they correspond, and their edges."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.errors import raises

from fedgraft.local import schedules as s


def torch_rates(make: Any, count: int, losses: Sequence[float] = ()) -> list[float]:
    """The rates torch's scheduler gives before each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler, rates = make(optimizer), []
    for t in range(count):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step(losses[t]) if losses else scheduler.step()
    return rates


def ours(schedule: s.Schedule, count: int, total: int | None = None) -> list[float]:
    return [schedule(t, total or count, []) for t in range(count)]


T = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (s.constant_rate(0.4), lambda o: T.LambdaLR(o, lambda t: 1.0)),
        (s.cosine(0.4, 0.01), lambda o: T.CosineAnnealingLR(o, T_max=20, eta_min=0.01)),
        (s.cosine(0.4), lambda o: T.CosineAnnealingLR(o, T_max=20)),
        (s.cosine(0.4, 0.01, period=7), lambda o: T.CosineAnnealingLR(o, T_max=7, eta_min=0.01)),
        (s.cosine(0.4, period=30), lambda o: T.CosineAnnealingLR(o, T_max=30)),
        (s.exponential(0.4, 0.95), lambda o: T.LambdaLR(o, lambda t: 0.95**t)),
        (s.linear(0.4, 0.04), lambda o: T.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=20)),
        (s.inverse(0.4, 0.2, 0.5), lambda o: T.LambdaLR(o, lambda t: (1 + 0.2 * t) ** -0.5)),
        (s.step(0.4, (0.5, 0.75), 0.1), lambda o: T.MultiStepLR(o, [10, 15], 0.1)),
        (s.step(0.4, (0.25, 0.5, 0.75), 0.5), lambda o: T.StepLR(o, 5, 0.5)),
        (s.warmed(s.constant_rate(0.4), 5, 0.0), lambda o: T.LambdaLR(o, lambda t: min(1.0, (t + 1) / 5))),
    ],
    ids=[
        "none",
        "cosine-min",
        "cosine",
        "short period",
        "long period",
        "lambda",
        "linear",
        "inverse",
        "multistep",
        "step",
        "warmup",
    ],
)
def test_rates_are_torchs(schedule: s.Schedule, make: Any) -> None:
    assert ours(schedule, 20) == pytest.approx(torch_rates(make, 20), rel=1e-6)


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_is_torchs_reduce_on_plateau(patience: int) -> None:
    losses = [1.0, 0.9, 0.95, 0.93, 0.9, 0.91, 0.92, 0.89999, 0.7, 0.7, 0.7, 0.7, 0.7, 0.71, 0.72, 0.5, 0.6, 0.6]
    wanted = torch_rates(
        lambda o: T.ReduceLROnPlateau(o, factor=0.5, patience=patience, min_lr=0.03, eps=0), len(losses), losses
    )
    rule = s.plateau(0.4, 0.5, patience, 0.03)
    assert [rule(t, 99, losses[:t]) for t in range(len(losses))] == pytest.approx(wanted)
    assert min(wanted) < 0.4


def test_plateau_resumes_by_itself() -> None:
    """The rate is a function of the history, so a resumed run needs no saved scheduler."""
    rule = s.plateau(0.1, factor=0.5, patience=1)
    assert rule(5, 9, [1.0, 2.0, 2.0]) == rule(7, 9, (1.0, 2.0, 2.0)) == 0.05


def test_cosine_with_restarts_begins_every_cycle_at_the_top() -> None:
    rates = ours(s.cosine(0.4, 0.01, restarts=3), 20)
    assert rates == ours(s.cosine(0.4, 0.01), 5) * 4
    assert [t for t, r in enumerate(rates) if r == 0.4] == [0, 5, 10, 15]


def test_a_cosine_has_restarts_or_a_period() -> None:
    with raises("E-LOCAL-SCHEDULE-PERIOD"):
        s.cosine(0.4, restarts=1, period=5)


def test_schedules_count_over_the_run_and_end_where_they_should() -> None:
    """The first rate is the full one, then it falls to the minimum; nothing restarts in between."""
    for schedule, end in (
        (s.cosine(0.4, 0.01), 0.01 + 0.195 * (1 + math.cos(math.pi * 49 / 50))),
        (s.linear(0.4, 0.01), 0.01 + 0.39 / 50),
    ):
        rates = ours(schedule, 50)
        assert rates[0] == 0.4 and rates[-1] == pytest.approx(end) and rates == sorted(rates, reverse=True)
    ramp = ours(s.warmed(s.constant_rate(1.0), 4), 8)
    assert ramp == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert ours(s.warmed(s.constant_rate(1.0), 0), 3) == [1.0] * 3


@pytest.mark.parametrize("name", list(s.SCHEDULES))
@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_runs_have_finite_positive_rates(name: str, total: int) -> None:
    rates = ours(s.SCHEDULES[name](0.4), total)
    assert all(math.isfinite(r) and r >= 0 for r in rates) and rates[0] > 0


def test_a_warm_up_restarted_in_every_round_would_be_noticed() -> None:
    """The planted bug of section 2.3: position counted inside the round."""
    rule = s.warmed(s.constant_rate(1.0), 4)
    by_run, by_round = ours(rule, 8), [rule(t % 4, 8, []) for t in range(8)]
    assert by_run != by_round and sum(by_round) < sum(by_run)
