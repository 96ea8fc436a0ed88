"""Weights and merges that depend on the updates: FedAlignAvg, FedAWA, TIES, DARE, Fisher merging."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.integrate import quad
from scipy.optimize import brentq
from tests.references.loops.local import Local, train
from tests.references.loops.problem import (
    Outcome,
    Problem,
    State,
    flat,
    is_statistic,
    like,
    mean,
    minus,
    plus,
    restricted,
    without_statistics,
)
from torch import Tensor


def _trained(problem: Problem, local: Local, common: State, round: int) -> list[State]:
    """Return the models of the clients of a round after training."""
    return [train(problem, common, k, round, local) for k in problem.cohorts[round]]


def _merged(parameters: State, updates: list[State], weights: list[float]) -> State:
    """Return the merged update of the parameters, with the weighted mean of the statistics."""
    statistics = mean([restricted(update, is_statistic) for update in updates] or [{}], weights)
    return {**parameters, **statistics}


# ---- FedAlignAvg


def fedalign(
    problem: Problem,
    local: Local,
    layers: tuple[str, ...],
    keep: int,
    top: int,
    gamma: float = 1.0,
    cap: float | None = None,
    null_correction: bool = False,
    by_layer: bool = False,
    freeze: float | None = None,
    align: str = "client",
    probe: int = 64,
) -> Outcome:
    """Weights n_k s_k^γ, s_k the mean over layers of the SVCCA of the client's layer with the common model's."""
    common = problem.start()
    null = 0.0
    if null_correction:
        null = _score_of_unrelated(probe, keep, top)
    for t, cohort in enumerate(problem.cohorts):
        inputs = problem.probe
        if align == "server":  # validation images, drawn anew in each round
            order = problem.draws.permutation(len(problem.probe), "secret_probe", t)
            inputs = problem.inputs[problem.probe[order[:probe]]]
        before = _activations(problem, common, layers, inputs)
        updates = []
        scores = []  # by client and layer
        for model in _trained(problem, local, common, t):
            after = _activations(problem, model, layers, inputs)
            scores.append([svcca(x, y, keep, top) for x, y in zip(after, before, strict=True)])
            updates.append(minus(model, common))
        examples = problem.examples(cohort)
        weights = _aligned(examples, scores, gamma, null, cap)
        if align == "random":
            shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
            order = problem.draws.changed_order(shares, 0, "random_weights", t)
            weights = shares[order].tolist()
        update = mean(updates, weights)
        if by_layer:
            update = _by_layer(update, updates, scores, weights, examples, gamma, null, cap, freeze)
        common = plus(common, update)
    return {"common": common}


def _by_layer(
    update: State,
    updates: list[State],
    scores: list[list[float]],
    weights: list[float],
    examples: list[float],
    gamma: float,
    null: float,
    cap: float | None,
    freeze: float | None,
) -> State:
    """Return the update with the weights of each layer's own scores; a layer whose mean score is low rests."""
    result = dict(update)
    for name in update:
        if is_statistic(name):
            continue
        layer = 1  # the second block, the last norm and the head show in the second layer only
        if name.startswith(("backbone.stem.", "backbone.layers.0.")):
            layer = 0
        own = [[row[layer]] for row in scores]
        drift = 1 - sum(w * row[layer] for w, row in zip(weights, scores, strict=True)) / sum(weights)
        if freeze is not None and drift > freeze:
            result[name] = torch.zeros_like(update[name])
        else:
            result[name] = mean([{name: u[name]} for u in updates], _aligned(examples, own, gamma, null, cap))[name]
    return result


def _aligned(
    examples: list[float], scores: list[list[float]], gamma: float, null: float, cap: float | None
) -> list[float]:
    """Return n_k s_k^γ with the null score taken off, at most `cap`."""
    weights = []
    for n, row in zip(examples, scores, strict=True):
        corrected = [max(0.0, (score - null) / (1 - null)) for score in row]
        weight = n * max(sum(corrected) / len(corrected), 1e-6) ** gamma
        if cap is not None:
            weight = min(weight, cap)
        weights.append(weight)
    return weights


def _activations(problem: Problem, model: State, layers: tuple[str, ...], inputs: Tensor) -> list[np.ndarray]:
    """Return the outputs of these layers on the probe, in evaluation mode."""
    network = problem.view(model)
    with torch.no_grad():
        outputs = network.activations(inputs, layers)
    return [outputs[name].numpy() for name in layers]


def svcca(x: np.ndarray, y: np.ndarray, keep: int, top: int) -> float:
    """Return the mean of the largest canonical correlations of the leading principal components, by covariances."""
    x, y = _components(x, keep), _components(y, keep)
    within_x, within_y, between = x.T @ x, y.T @ y, x.T @ y
    product = np.linalg.solve(within_x, between) @ np.linalg.solve(within_y, between.T)
    squares = np.sort(np.linalg.eigvals(product).real)[::-1]
    return float(np.sqrt(np.clip(squares, 0, 1))[:top].mean())


def _components(x: np.ndarray, keep: int) -> np.ndarray:
    """Return the projections on the leading eigenvectors of the covariance."""
    centred = x - x.mean(0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    return np.asarray(centred @ vectors[:, ::-1][:, :keep])


def _score_of_unrelated(n: int, p: int, top: int) -> float:
    """Return the mean of the top correlations of independent data by Wachter's law, integrated numerically."""
    g = p / (n - 1)
    edge = 4 * g * (1 - g)

    def density(x: float) -> float:
        return math.sqrt(x * (edge - x)) / (2 * math.pi * g * x * (1 - x))

    def mass(lower: float) -> float:
        return float(quad(density, lower, edge, limit=200)[0])

    cut = 0.0
    if top < p:
        whole = mass(0.0)
        cut = float(brentq(lambda x: mass(x) / whole - top / p, 1e-9, edge - 1e-12))
    weighted = quad(lambda x: math.sqrt(x) * density(x), cut, edge, limit=200)[0]
    return float(weighted / mass(cut))


# ---- FedAWA


def fedawa(problem: Problem, local: Local, steps: int, rate: float) -> Outcome:
    """Gradient steps on Σ λ_k (1 - cos(u_k, Σ λ_j u_j)), λ = softmax(x), x from log n_k; the rate times clients."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        updates = [minus(model, common) for model in _trained(problem, local, common, t)]
        vectors = torch.stack([flat(update) for update in updates])
        x = torch.tensor(problem.examples(cohort), dtype=torch.float64).log()
        for _ in range(steps):
            x = x.detach().requires_grad_(True)
            shares = torch.exp(x) / torch.exp(x).sum()
            total = (shares[:, None] * vectors).sum(0)
            loss = torch.zeros((), dtype=torch.float64)
            for share, vector in zip(shares, vectors, strict=True):
                loss = loss + share * (1 - vector @ total / (vector.norm() * total.norm()))
            loss.backward()
            assert x.grad is not None
            x = x.detach() - rate * len(cohort) * x.grad
        common = plus(common, mean(updates, torch.exp(x).tolist()))
    return {"common": common}


# ---- merging rules on the parameters; statistics take the mean


def fedties(problem: Problem, local: Local, share: float) -> Outcome:
    """Yadav et al. 2023: the largest share of each update, the sign with more weight, the mean of those that agree."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        updates = [minus(model, common) for model in _trained(problem, local, common, t)]
        examples = problem.examples(cohort)
        rows = []
        for update in updates:
            row = flat(without_statistics(update))
            order = row.abs().argsort(descending=True)
            trimmed = torch.zeros_like(row)
            count = max(1, round(share * len(row)))
            trimmed[order[:count]] = row[order[:count]]
            rows.append(trimmed)
        merged = torch.zeros_like(rows[0])
        for i in range(len(merged)):
            column = [float(row[i]) for row in rows]
            positive = sum(n * value for n, value in zip(examples, column, strict=True) if value > 0)
            negative = sum(n * -value for n, value in zip(examples, column, strict=True) if value < 0)
            sign = 1.0
            if negative > positive:
                sign = -1.0
            total = 0.0
            weight = 0.0
            for n, value in zip(examples, column, strict=True):
                if value * sign > 0:
                    total += n * value
                    weight += n
            if weight:
                merged[i] = total / weight
        parameters = like(merged, without_statistics(common))
        common = plus(common, _merged(parameters, updates, examples))
    return {"common": common}


def feddare(problem: Problem, local: Local, drop: float, seed: int = 0) -> Outcome:
    """Yu et al. 2024: each entry is dropped with probability p, the others are divided by 1 - p."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        updates = [minus(model, common) for model in _trained(problem, local, common, t)]
        length = len(flat(without_statistics(common)))
        chances = problem.draws.uniform_rows(len(cohort), length, seed, "dare", t)
        thinned = []
        for update, chance in zip(updates, chances, strict=True):
            row = flat(without_statistics(update))
            row = torch.where(chance < drop, 0.0, row / (1 - drop))
            thinned.append({**update, **like(row, without_statistics(common))})
        common = plus(common, mean(thinned, problem.examples(cohort)))
    return {"common": common}


def fedfisher(problem: Problem, local: Local, samples: int, power: float = 1.0) -> Outcome:
    """Matena and Raffel 2022: Σ n_k F_k u_k / Σ n_k F_k by coordinate, F_k the mean squared gradient of an image."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        models = _trained(problem, local, common, t)
        updates = [minus(model, common) for model in models]
        examples = problem.examples(cohort)
        numerator: Tensor | float = 0.0
        denominator: Tensor | float = 0.0
        for k, model, update, n in zip(cohort, models, updates, examples, strict=True):
            order = problem.draws.permutation(len(problem.rows[k]), "fisher_merge", t, k)
            information = _information(problem, model, problem.rows[k][order[:samples]]) ** power
            numerator = numerator + n * information * flat(without_statistics(update))
            denominator = denominator + n * information
        assert isinstance(denominator, Tensor)
        plain = flat(without_statistics(mean(updates, examples)))
        merged = torch.where(denominator > 0, numerator / denominator, plain)
        parameters = like(merged, without_statistics(common))
        common = plus(common, _merged(parameters, updates, examples))
    return {"common": common}


def _information(problem: Problem, model: State, rows: Tensor) -> Tensor:
    """Return the mean over these rows of the squared gradient of one row's loss, in evaluation mode."""
    network = problem.view(model)
    total: Tensor | float = 0.0
    for row in rows:
        network.zero_grad()
        logits = network(problem.inputs[row][None])
        torch.nn.functional.cross_entropy(logits, problem.labels[row][None]).backward()
        squares = [parameter.grad.reshape(-1) ** 2 for parameter in network.parameters()]
        total = total + torch.cat(squares) / len(rows)
    assert isinstance(total, Tensor)
    return total
