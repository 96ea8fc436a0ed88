"""Heads without training, from pooled features: what the sums over clients must give."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import log_softmax, softmax
from tests.references.loops.local import Local
from tests.references.loops.problem import Outcome, Problem

PENALTIES = tuple(10.0**e for e in (-5, -4, -3, -2.5, -2, -1.5, -1, -0.5, 0))
SCALES = tuple(10 ** (0.1 * step) for step in range(26))


class Pooled:
    """Features and labels of all clients in one pile, and those of validation."""

    def __init__(self, problem: Problem) -> None:
        network = problem.network
        network.eval()
        with torch.no_grad():
            features = network.features(problem.inputs).numpy()
        labels = problem.labels.numpy()
        rows = np.concatenate([rows.numpy() for rows in problem.rows])
        held = problem.probe.numpy()
        self.classes = network.classes
        self.features = features[rows]
        self.labels = labels[rows]
        self.validation = features[held]
        self.validation_labels = labels[held]
        self.by_client = [(features[rows.numpy()], labels[rows.numpy()]) for rows in problem.rows]

    def logits(self, head: np.ndarray) -> np.ndarray:
        """Return the logits of the validation images."""
        return np.asarray(self.validation @ head[:, :-1].T + head[:, -1])

    def accuracy(self, head: np.ndarray) -> float:
        """Return the accuracy on validation."""
        return float((self.logits(head).argmax(1) == self.validation_labels).mean())

    def loss(self, head: np.ndarray) -> float:
        """Return the mean cross-entropy on validation."""
        logs = log_softmax(self.logits(head), axis=1)
        return float(-logs[np.arange(len(logs)), self.validation_labels].mean())


def _strongest(pooled: Pooled, heads: list[np.ndarray]) -> np.ndarray:
    """Return the head of the largest penalty within one standard error of the best accuracy."""
    accuracies = [pooled.accuracy(head) for head in heads]
    best = max(accuracies)
    error = np.sqrt(best * (1 - best) / len(pooled.validation))
    chosen = heads[0]
    for head, accuracy in zip(heads, accuracies, strict=True):
        if accuracy >= best - error:
            chosen = head
    return chosen


def _tempered(pooled: Pooled, head: np.ndarray) -> np.ndarray:
    """Return the head times the smallest scale whose loss is within half a nat over all images of the best."""
    losses = [pooled.loss(scale * head) for scale in SCALES]
    limit = min(losses) + 0.5 / len(pooled.validation)
    for scale, loss in zip(SCALES, losses, strict=True):
        if loss <= limit:
            return scale * head
    raise AssertionError


def _outcome(head: np.ndarray) -> Outcome:
    """Return the head as an outcome."""
    weight = torch.from_numpy(head[:, :-1].copy())
    bias = torch.from_numpy(head[:, -1].copy())
    return {"head": {"weight": weight, "bias": bias}}


def fed3r(problem: Problem, local: Local, ridge: float | None = None, free_bias: bool = True) -> Outcome:
    """Ridge regression by least squares of stacked rows, targets one-hot less 1/C, an unpunished bias."""
    pooled = Pooled(problem)
    width = pooled.features.shape[1]
    targets = np.eye(pooled.classes)[pooled.labels] - 1 / pooled.classes
    energy = (pooled.features**2).sum(0).mean()
    inputs = np.hstack([pooled.features, np.ones((len(pooled.features), 1))])
    penalties = PENALTIES
    if ridge is not None:
        penalties = (ridge,)
    heads = []
    for penalty in penalties:
        punished = np.ones(width + 1)
        if free_bias:
            punished[width] = 0
        rows = np.vstack([inputs, np.sqrt(penalty * energy) * np.diag(punished)])
        aims = np.vstack([targets, np.zeros((width + 1, pooled.classes))])
        heads.append(np.linalg.lstsq(rows, aims, rcond=None)[0].T)
    return _outcome(_tempered(pooled, _strongest(pooled, heads)))


def fedncm(problem: Problem, local: Local, normalised: bool = True) -> Outcome:
    """Legate et al. 2023: the normalised mean feature of each class."""
    pooled = Pooled(problem)
    rows = []
    for label in range(pooled.classes):
        centre = pooled.features[pooled.labels == label].mean(0)
        if normalised:
            centre = centre / np.linalg.norm(centre)
        rows.append(np.append(centre, 0.0))
    return _outcome(_tempered(pooled, np.stack(rows)))


def fedcof(problem: Problem, local: Local, ridge: float | None = None, covariances: str = "client means") -> Outcome:
    """Goswami et al. 2025: class covariances from the spread of the clients' means, then (Σ within + λ I)⁻¹ sums."""
    pooled = Pooled(problem)
    width = pooled.features.shape[1]
    within = np.zeros((width, width))
    sums = np.zeros((width, pooled.classes))
    for label in range(pooled.classes):
        mine = pooled.features[pooled.labels == label]
        sums[:, label] = mine.sum(0)
        scatter = np.zeros((width, width))
        holders = 0
        for features, labels in pooled.by_client:
            own = features[labels == label]
            if len(own):
                holders += 1
                gap = own.mean(0) - mine.mean(0)
                scatter += len(own) * np.outer(gap, gap)
        if covariances == "pooled":
            within += (len(mine) - 1) * np.cov(mine.T)
        elif holders > 1:
            within += (len(mine) - 1) * scatter / (holders - 1)
    penalties = PENALTIES
    if ridge is not None:
        penalties = (ridge,)
    heads = []
    for penalty in penalties:
        damped = within + penalty * np.diag(within).mean() * np.eye(width)
        weights = np.linalg.inv(damped) @ sums
        weights = weights / np.linalg.norm(weights, axis=0)
        heads.append(np.hstack([weights.T, np.zeros((pooled.classes, 1))]))
    return _outcome(_tempered(pooled, _strongest(pooled, heads)))


def fedprobe(problem: Problem, local: Local, probe_steps: int, decay: float = 1e-3, damping: float = 1e-4) -> Outcome:
    """Logistic regression with decay on whitened features, by Newton's method to the last digits."""
    pooled = Pooled(problem)
    centre = pooled.features.mean(0)
    covariance = np.cov(pooled.features.T, bias=True)
    covariance = covariance + damping * np.diag(covariance).mean() * np.eye(len(centre))
    whitening = np.linalg.inv(np.linalg.cholesky(covariance))
    inputs = np.hstack([(pooled.features - centre) @ whitening.T, np.ones((len(pooled.features), 1))])
    targets = np.eye(pooled.classes)[pooled.labels]
    count, side = inputs.shape
    head = np.zeros((pooled.classes, side))
    for _ in range(30):
        chances = softmax(inputs @ head.T, axis=1)
        gradient = (chances - targets).T @ inputs / count + decay * head
        curvature = decay * np.eye(pooled.classes * side)
        for chance, row in zip(chances, inputs, strict=True):
            spread = np.diag(chance) - np.outer(chance, chance)
            curvature += np.kron(spread, np.outer(row, row)) / count
        head = head - np.linalg.solve(curvature, gradient.ravel()).reshape(head.shape)
    weight = head[:, :-1] @ whitening
    bias = head[:, -1] - weight @ centre
    return _outcome(np.hstack([weight, bias[:, None]]))


def fedlda(problem: Problem, local: Local, ridge: float | None = None, covariance: str = "within") -> Outcome:
    """Gaussian classes of one covariance: Σ⁻¹ μ_c and log π_c - μ_c Σ⁻¹ μ_c / 2, Σ over all images, then shrunk."""
    pooled = Pooled(problem)
    width = pooled.features.shape[1]
    centred = np.empty_like(pooled.features)
    means = np.zeros((pooled.classes, width))
    priors = np.zeros(pooled.classes)
    for label in range(pooled.classes):
        mine = pooled.labels == label
        means[label] = pooled.features[mine].mean(0)
        priors[label] = mine.mean()
        centred[mine] = pooled.features[mine] - means[label]
    if covariance == "total":
        centred = pooled.features - pooled.features.mean(0)
    spread = centred.T @ centred / len(centred)
    shrinkages = PENALTIES
    if ridge is not None:
        shrinkages = (ridge,)
    heads = []
    for shrinkage in shrinkages:
        shrunk = (1 - shrinkage) * spread + shrinkage * np.trace(spread) / width * np.eye(width)
        weights = means @ np.linalg.inv(shrunk)
        offsets = np.log(priors) - 0.5 * np.einsum("cd,cd->c", weights, means)
        heads.append(np.hstack([weights, offsets[:, None]]))
    return _outcome(_tempered(pooled, _strongest(pooled, heads)))
