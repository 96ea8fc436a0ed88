"""Steps of the server: FedAvgM, FedAdam, FedYogi, FedAdagrad, FedGMA. Batch-norm statistics take the plain mean."""

from __future__ import annotations

import torch
from tests.references.loops.local import Local, train
from tests.references.loops.problem import Outcome, Problem, State, is_statistic, mean, minus, plus, zeros


def _updates(problem: Problem, local: Local, common: State, round: int) -> list[State]:
    """Return what the clients of a round send."""
    updates = []
    for k in problem.cohorts[round]:
        updates.append(minus(train(problem, common, k, round, local), common))
    return updates


def _statistics_moved(common: State, average: State) -> State:
    """Return the common model with its statistics moved by the mean."""
    moved = dict(common)
    for name in common:
        if is_statistic(name):
            moved[name] = common[name] + average[name]
    return moved


def fedavgm(problem: Problem, local: Local, server_lr: float, beta1: float) -> Outcome:
    """Hsu et al. 2019: v ← β v + Δ; x + η v."""
    common = problem.start()
    velocity = zeros(common)
    for t, cohort in enumerate(problem.cohorts):
        average = mean(_updates(problem, local, common, t), problem.examples(cohort))
        common = _statistics_moved(common, average)
        for name in velocity:
            velocity[name] = beta1 * velocity[name] + average[name]
            common[name] = common[name] + server_lr * velocity[name]
    return {"common": common, "rule/velocity": velocity}


def adaptive(
    problem: Problem, local: Local, kind: str, server_lr: float, beta1: float, tau: float, beta2: float = 0.0
) -> Outcome:
    """Reddi et al. 2021, algorithm 2: m ← β1 m + (1 - β1) Δ; v by kind; x + η m / (√v + τ)."""
    common = problem.start()
    first = zeros(common)
    second = zeros(common)
    for t, cohort in enumerate(problem.cohorts):
        average = mean(_updates(problem, local, common, t), problem.examples(cohort))
        common = _statistics_moved(common, average)
        for name in first:
            delta = average[name]
            squared = delta * delta
            first[name] = beta1 * first[name] + (1 - beta1) * delta
            if kind == "adam":
                second[name] = beta2 * second[name] + (1 - beta2) * squared
            elif kind == "yogi":
                second[name] = second[name] - (1 - beta2) * squared * torch.sign(second[name] - squared)
            else:
                second[name] = second[name] + squared
            common[name] = common[name] + server_lr * first[name] / (torch.sqrt(second[name]) + tau)
    steps = torch.tensor(float(len(problem.cohorts)), dtype=torch.float64)
    return {"common": common, "rule/first": first, "rule/second": second, "rule/steps": {"": steps}}


def fedgma(problem: Problem, local: Local, agreement: float, hard: bool, server_lr: float) -> Outcome:
    """Tenison et al. 2023: A = |Σ p_k sign Δ_k|; the mean update times 1 where A ≥ τ, else times A (AND mask: 0)."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        updates = _updates(problem, local, common, t)
        examples = problem.examples(cohort)
        average = mean(updates, examples)
        signs = []
        for update in updates:
            signs.append({name: tensor.sign() for name, tensor in update.items()})
        agreed = mean(signs, examples)
        step = {}
        for name, delta in average.items():
            share = agreed[name].abs()
            below = torch.zeros_like(share)
            if not hard:
                below = share
            # shares are sums of n_k / n: rounding must not decide at the threshold
            factor = torch.where(share >= agreement - 1e-12, 1.0, below)
            step[name] = server_lr * factor * delta
            if is_statistic(name):
                step[name] = delta
        common = plus(common, step)
    return {"common": common}
