"""Default learning rates by trainable kind and optimizer; for a linear head by the curvature of its loss."""

from __future__ import annotations

import torch

from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.core.capabilities import Capability
from fedgraft.edit.trainable import HEAD
from fedgraft.local.features import feature_batches
from fedgraft.runs.task import Task

FROM_RANDOM = 5
"""A head that starts at random has far to go and nothing to lose: so many times the rate of another."""
ADAPTIVE_HEAD_RATE = 0.001
"""The rate of a head under an adaptive optimizer, whose steps do not depend on the curvature."""


def with_default_rates(algorithm: Algorithm, curvature: float | None = None, from_random: bool = False) -> Algorithm:
    """Return the algorithm with all learning rates set: those that no option sets get a default.

    The head's rate is a twentieth of the inverse of its `curvature`; where that is unknown, or steps are adaptive, a
    constant. `from_random`: the head starts at random, which takes a larger one. Normalised updates and control
    variates divide by one number of steps for all weights, so there the head has no rate of its own.
    """
    local = algorithm.local
    head_rate = HEAD if curvature is None else 0.05 / curvature
    if from_random:
        head_rate = FROM_RANDOM * head_rate
    if local.optimizer.adaptive:
        head_rate = ADAPTIVE_HEAD_RATE
    if Capability.TRAINED_BODY not in algorithm.provides:
        return vary(algorithm, lr=local.lr or head_rate)
    rate = algorithm.lr
    has_own_head_rate = algorithm.leaves_head_rate and Capability.ONE_RATE not in algorithm.requires
    head_factor = head_rate / rate if has_own_head_rate else local.head_lr
    return vary(algorithm, lr=rate, head_lr=head_factor)


def head_curvature(task: Task, algorithm: Algorithm, count: int = 128) -> float | None:
    """Return the largest second derivative of a linear head's loss at even predictions: λ_max(E[x xᵀ]) / classes.

    It is measured on at most `count` validation images; None where there are none, or where the head's rate is given.
    """
    rows = task.data.validation_rows[:count]
    if not len(rows) or not algorithm.leaves_head_rate:
        return None
    batches = [pooled for _, pooled in feature_batches(task.network, task.eval_images, rows)]
    pooled_features = torch.cat(batches)  # (n, width)
    largest = float(torch.linalg.matrix_norm(pooled_features.double(), 2)) ** 2 / len(pooled_features)
    return largest / task.network.classes or None
