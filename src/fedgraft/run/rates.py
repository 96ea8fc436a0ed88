"""Learning rates that nobody gave: what suits the trainable kind, and for the head what its features allow."""

from __future__ import annotations

import torch

from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.edit.trainable import HEAD
from fedgraft.local.features import features
from fedgraft.run.job import Job

FROM_RANDOM = 5
"""A head that starts at random has a way to go, and nothing to lose on it: so many times the rate of another."""


def settled(algorithm: Algorithm, curvature: float | None = None, from_random: bool = False) -> Algorithm:
    """The algorithm with its learning rates written out: what was left open gets what suits the trainable kind.

    The head's rate is a twentieth of the inverse of its `curvature`; where that is unknown, or steps are adaptive, a
    constant. Normalised updates and control variates divide by one number of steps for all weights: one rate.
    """
    local, kind, lr = algorithm.local, algorithm.trainable, algorithm.lr
    head = HEAD if curvature is None else 0.05 / curvature
    head = 0.001 if local.optimizer.adaptive else FROM_RANDOM * head if from_random else head
    if not kind.trains_body:
        return vary(algorithm, lr=local.lr or head)
    own = algorithm.leaves_head_rate and not algorithm.divides_by_steps
    return vary(algorithm, lr=lr, head_lr=head / lr if own else local.head_lr)


def head_curvature(job: Job, count: int = 128) -> float | None:
    """The largest second derivative of a linear head's loss at even predictions: λ_max(E[x xᵀ]) over the classes.

    From some validation images; None where the server has none.
    """
    rows, task = job.task.data.validation_rows[:count], job.task
    if not len(rows) or not job.algorithm.leaves_head_rate:
        return None
    found = torch.cat([x for _, x in features(task.network, task.eval_images, rows)])  # (n, width)
    largest = float(torch.linalg.matrix_norm(found.double(), 2)) ** 2 / len(found)
    return largest / task.network.classes or None
