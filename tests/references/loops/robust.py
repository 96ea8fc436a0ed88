"""Robust rules by their definitions, in NumPy, on whole updates; numbers of examples do not count."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize
from tests.references.loops.local import Local, train
from tests.references.loops.problem import Outcome, Problem, flat, like, minus, plus


def robust(
    problem: Problem,
    local: Local,
    rule: str,
    attackers: int = 1,
    neighbours: bool = False,
    clip: float | None = None,
) -> Outcome:
    """FedAvg with another rule in place of the mean."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        rows = []
        for k in cohort:
            rows.append(flat(minus(train(problem, common, k, t, local), common)).numpy())
        stack = np.stack(rows)
        if clip is not None:
            stack = _clipped(stack, clip)
        if neighbours:
            stack = _neighbour_means(stack, attackers)
        step = _combined(stack, rule, attackers, problem.examples(cohort))
        common = plus(common, like(torch.from_numpy(step), common))
    return {"common": common}


def _combined(stack: np.ndarray, rule: str, attackers: int, examples: list[float]) -> np.ndarray:
    """Return the update of this rule."""
    if rule == "mean":
        return np.average(stack, axis=0, weights=examples)
    if rule == "median":
        return np.asarray(np.median(stack, axis=0))
    if rule == "trimmed_mean":
        ordered = np.sort(stack, axis=0)
        return np.asarray(ordered[attackers : len(ordered) - attackers].mean(0))
    if rule == "krum":
        return np.asarray(stack[_krum_order(stack, attackers)[0]])
    if rule == "multi_krum":
        best = _krum_order(stack, attackers)[: len(stack) - attackers]
        return np.asarray(stack[best].mean(0))
    if rule == "bulyan":
        return _bulyan(stack, attackers)
    if rule == "geometric_median":
        return _geometric_median(stack)
    if rule == "centered_clipping":
        return _centered_clipping(stack)
    if rule == "norm_clip":
        bound = float(np.median(np.linalg.norm(stack, axis=1)))
        return np.average(_clipped(stack, bound), axis=0, weights=examples)
    raise ValueError(rule)


def _clipped(stack: np.ndarray, bound: float) -> np.ndarray:
    """Return every row with a length of at most `bound`."""
    rows = []
    for row in stack:
        rows.append(row * min(1.0, bound / float(np.linalg.norm(row))))
    return np.stack(rows)


def _neighbour_means(stack: np.ndarray, attackers: int) -> np.ndarray:
    """Allouah et al. 2023: every row becomes the mean of the m - f rows nearest to it, itself among them."""
    rows = []
    for row in stack:
        distances = np.linalg.norm(stack - row, axis=1)
        nearest = np.argsort(distances, kind="stable")[: len(stack) - attackers]
        rows.append(stack[nearest].mean(0))
    return np.stack(rows)


def _krum_order(stack: np.ndarray, attackers: int) -> np.ndarray:
    """Blanchard et al. 2017: the rows by the sum of squared distances to their m - f - 2 nearest others."""
    scores = []
    for i, row in enumerate(stack):
        others = np.delete(stack, i, axis=0)
        squares = np.sort(((others - row) ** 2).sum(1))
        scores.append(squares[: max(1, len(stack) - attackers - 2)].sum())
    return np.argsort(scores, kind="stable")


def _bulyan(stack: np.ndarray, attackers: int) -> np.ndarray:
    """El Mhamdi et al. 2018: m - 2f rows by repeated Krum; by coordinate the mean of the m - 4f nearest the median."""
    left = list(range(len(stack)))
    selected = []
    for _ in range(len(stack) - 2 * attackers):
        selected.append(left.pop(int(_krum_order(stack[left], attackers)[0])))
    chosen = stack[selected]
    result = np.empty(stack.shape[1])
    for i, column in enumerate(chosen.T):
        nearest = np.argsort(np.abs(column - np.median(column)), kind="stable")[: len(stack) - 4 * attackers]
        result[i] = column[nearest].mean()
    return result


def _geometric_median(stack: np.ndarray) -> np.ndarray:
    """Minimise the sum of distances directly, over the weights of the rows."""

    def total(logits: np.ndarray) -> float:
        weights = np.exp(logits - logits.max())
        point = (weights / weights.sum()) @ stack
        return float(np.linalg.norm(stack - point, axis=1).sum())

    scale = total(np.zeros(len(stack)))
    best = minimize(lambda x: total(x) / scale, np.zeros(len(stack)), method="BFGS", options={"gtol": 1e-12})
    point = np.exp(best.x) / np.exp(best.x).sum() @ stack
    for _ in range(2000):  # Weiszfeld's steps (1937) to the last digits
        weights = 1 / np.linalg.norm(stack - point, axis=1)
        point = weights / weights.sum() @ stack
    return np.asarray(point)


def _centered_clipping(stack: np.ndarray, iterations: int = 3) -> np.ndarray:
    """Karimireddy et al. 2021: v + mean of (x_i - v) min(1, τ / |x_i - v|), thrice.

    v starts at the median of the coordinates, τ is the median distance to it.
    """
    centre = np.median(stack, axis=0)
    radius = float(np.median(np.linalg.norm(stack - centre, axis=1)))
    for _ in range(iterations):
        centre = centre + _clipped(stack - centre, radius).mean(0)
    return np.asarray(centre)
