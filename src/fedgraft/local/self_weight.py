"""How much a client counts itself when models are mixed, learned on images of its own that it never trains on.

New model = w own + (1 - w) mean of all. A client tries a few w with the mean that the round began with, on the images
it sets aside, and reports the best. w = 1 is training alone, w = 0 the plain mean.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedgraft.core.protocols import Examples, Network
from fedgraft.core.rng import torch_stream
from fedgraft.metrics.evaluate import evaluate

GRID = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def parted(rows: Tensor, share: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """The rows a client trains on, and those it sets aside: the same in every round, none where it has only one."""
    if not share:
        return rows, rows[:0]
    count = min(len(rows) - 1, max(1, round(share * len(rows))))
    order = torch.randperm(len(rows), generator=torch_stream(seed, "aside", client))
    return rows[order[count:].sort().values], rows[order[:count].sort().values]


def learned(
    network: Network, show: Callable[[Tensor], None], own: Tensor, common: Tensor, examples: Examples, rows: Tensor
) -> float:
    """The self-weight of the grid with the least loss on these rows, the least of equals; 0 without rows."""
    if not len(rows):
        return 0.0
    losses = []
    for weight in GRID:
        show(torch.lerp(common, own, weight))
        losses.append(evaluate(network, examples, rows).loss)
    show(own)
    return min(zip(losses, GRID, strict=True))[1]


def matrix(weights: Tensor, examples: Tensor) -> Tensor:
    """The similarity (m, m) whose rows, weighed by examples, give w to oneself and 1 - w to the mean of all."""
    weights, counts = weights.to(torch.float64), examples.to(torch.float64)
    found = (1 - weights)[:, None].repeat(1, len(weights))
    return found + torch.diag(weights * counts.sum() / counts)
