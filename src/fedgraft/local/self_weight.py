"""Self-weights: the weight of a client's own model in its mixture, learned on images that it never trains on.

New model = w own + (1 - w) mean of all. A client tries a few w with the mean at the start of the round, on the images
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
"""The self-weights that a client tries."""


def split_aside(rows: Tensor, share: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """Return the rows a client trains on and those it sets aside; the same in every round.

    `share` is the fraction set aside; a client with a single row sets none aside.
    """
    if not share:
        return rows, rows[:0]
    count = min(len(rows) - 1, max(1, round(share * len(rows))))
    order = torch.randperm(len(rows), generator=torch_stream(seed, "aside", client))
    return rows[order[count:].sort().values], rows[order[:count].sort().values]


def learn_self_weight(
    network: Network, load: Callable[[Tensor], None], own: Tensor, common: Tensor, examples: Examples, rows: Tensor
) -> float:
    """Return the self-weight of the grid with the least loss on these rows, the smallest of equals; 0 without rows.

    The weight w makes the model w times `own` plus 1 - w times `common`. `load(vector)` puts a model into the network;
    at the end it is the client's own.
    """
    if not len(rows):
        return 0.0
    losses = []
    for weight in GRID:
        load(torch.lerp(common, own, weight))
        losses.append(evaluate(network, examples, rows).loss)
    load(own)
    return min(zip(losses, GRID, strict=True))[1]


def self_weight_similarity(weights: Tensor, examples: Tensor) -> Tensor:
    """Return the similarity (m, m) whose rows, weighted by examples, give w to oneself and 1 - w to the mean of all."""
    weights = weights.to(torch.float64)
    counts = examples.to(torch.float64)
    shared = (1 - weights)[:, None].repeat(1, len(weights))
    return shared + torch.diag(weights * counts.sum() / counts)
