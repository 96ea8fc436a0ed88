"""DP-FedAvg: clipped updates, a noised sum, a fixed denominator, and the bound that follows a quantile."""

from __future__ import annotations

import math

import torch
from tests.references.loops.local import Local, train
from tests.references.loops.problem import Outcome, Problem, flat, is_statistic, like, minus, plus, restricted


def private(
    problem: Problem,
    local: Local,
    noise: float,
    clip: float,
    probability: float,
    key: bytes,
    adaptive: bool = False,
    quantile: float = 0.5,
    rate: float = 0.2,
    count_noise: float | None = None,
    denominator: str = "expected",
) -> Outcome:
    """McMahan et al. 2018: x + (Σ clip(Δ_k, S) + z S N(0, I)) / qK; Andrew et al. 2021 for an adaptive S."""
    selected = lambda name: not is_statistic(name)  # noqa: E731
    common = problem.start()
    expected = probability * len(problem.rows)
    deviation = count_noise
    if deviation is None:
        deviation = expected / 20
    for t, cohort in enumerate(problem.cohorts):
        parameters = restricted(common, selected)
        total = torch.zeros_like(flat(parameters))
        within = 0
        for k in cohort:
            model = train(problem, common, k, t, local, selected=selected)
            update = flat(minus(restricted(model, selected), parameters))
            length = float(update.norm())
            if length <= clip:
                within += 1
            total += update * min(1.0, clip / length)
        multiplier = noise
        if adaptive and noise:
            multiplier = (noise**-2 - (2 * deviation) ** -2) ** -0.5
        total += multiplier * clip * problem.draws.noise(len(total), key, "sum", t)
        divisor = expected
        if denominator == "answered":
            divisor = float(len(cohort))
        common = {**common, **plus(parameters, like(total / divisor, parameters))}
        if adaptive:
            count = within - len(cohort) / 2 + deviation * float(problem.draws.noise(1, key, "clip", t))
            clip *= math.exp(-rate * (count / expected + 0.5 - quantile))
    return {"common": common, "clip": {"": torch.tensor(clip, dtype=torch.float64)}}
