"""Merging rules from the model-editing literature, on stacks of updates or task vectors (m, k) with weights (m,).

TIES (Yadav et al. 2023): keep each vector's largest entries, elect a sign by coordinate, average those that agree.
DARE (Yu et al. 2024): drop entries at random and scale up the rest before averaging. Fisher merging (Matena and Raffel
2022): average weighted by each client's diagonal Fisher information. FedAWA (Shi et al. 2025): weights that make client
vectors align with their sum. Everything is summed in float64 in the order of the rows and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedgraft.aggregate.mean import accumulate, normalised, weighted_mean
from fedgraft.aggregate.slots import Aggregator, Answers, Observe
from fedgraft.core.ranges import Rest, Share, in_range
from fedgraft.core.rng import torch_stream


@in_range
def ties(rows: Tensor, weights: Tensor, keep: Share = 0.2) -> Tensor:
    """Return the TIES merge (k,) of rows (m, k): trim each row, elect a sign per coordinate, average what agrees.

    `keep` is the share of each row's entries that survives the trim. A coordinate with no remaining entry is zero.
    """
    share = normalised(weights)
    count = max(1, round(keep * rows.shape[1]))
    trimmed = torch.zeros_like(rows)
    for out, row in zip(trimmed, rows, strict=True):
        largest = row.abs().topk(count, sorted=False).indices
        out[largest] = row[largest]
    elected = accumulate(trimmed, share).sign()
    total, agreeing_weight = torch.zeros(2, rows.shape[1], dtype=torch.float64)
    for row, weight in zip(trimmed, share.tolist(), strict=True):
        agrees = (row.sign() == elected) & (row != 0)
        total += torch.where(agrees, row, 0).double() * weight
        agreeing_weight += agrees.double() * weight
    return torch.where(agreeing_weight > 0, total / agreeing_weight, 0.0).float()


@in_range
def dare(rows: Tensor, weights: Tensor, drop: Rest, generator: torch.Generator) -> Tensor:
    """Return the weighted mean after dropping entries with probability `drop` and dividing the rest by 1 - drop."""
    if drop == 0:
        return weighted_mean(rows, weights)
    sparse_rows = []
    for row in rows:
        keep = torch.rand(len(row), generator=generator) >= drop
        sparse_rows.append(torch.where(keep, row / (1 - drop), 0.0))
    return weighted_mean(sparse_rows, weights)


def fisher_mean(rows: Tensor, weights: Tensor, information: Tensor) -> Tensor:
    """Return Σ w F x / Σ w F per coordinate, (k,), for rows x (m, k) and their diagonal Fisher information F (m, k).

    Where the information of all clients is zero it is the weighted mean.
    """
    share = normalised(weights)
    fisher = information.clamp(min=0)
    weighted_rows = [f.double() * row.double() for f, row in zip(fisher, rows, strict=True)]
    numerator = accumulate(weighted_rows, share)
    denominator = accumulate(fisher, share)
    return torch.where(denominator > 0, numerator / denominator, weighted_mean(rows, share).double()).float()


def aligned_weights(updates: Tensor, weights: Tensor, steps: int = 1, rate: float = 1.0) -> Tensor:
    """Return FedAWA's weights λ = softmax(x), (m,): gradient steps on Σ λ_k (1 - cos(u_k, Σ_j λ_j u_j)) from `weights`.

    The minimum is one client with all the weight, which agrees with itself: hence one or two steps, not many. All
    cosines follow from the Gram matrix of the updates (m, m), so a step costs nothing. The paper also pulls the new
    model towards the old one; here updates are differences to it already.
    """
    share = normalised(weights)
    if steps == 0 or len(share) < 2:
        return share
    wide = updates.double()
    gram = wide @ wide.T  # (m, m)
    length = gram.diagonal().clamp(min=1e-300).sqrt()
    x = share.clamp(min=1e-12).log().requires_grad_(True)
    for _ in range(steps):
        lam = x.softmax(0)
        cosines = gram @ lam / (length * (lam @ gram @ lam).clamp(min=1e-300).sqrt())
        (slope,) = torch.autograd.grad((lam * (1 - cosines)).sum(), x)
        x = (x.detach() - rate * len(share) * slope).requires_grad_(True)
    return x.detach().softmax(0)


def on_trained(rule: Callable[[Tensor, Tensor, Answers], Tensor]) -> Callable[[Answers, Tensor], Tensor]:
    """Return an aggregation that uses `rule(rows, weights, answers)` on trained coordinates and the mean on the rest.

    The rest are the normalisation statistics that follow the trained coordinates.
    """

    def update(answers: Answers, weights: Tensor) -> Tensor:
        """Return the combined update (k,) of all clients."""
        rows = torch.stack(list(answers.updates))
        end = answers.trained or len(answers.updates[0])
        tail = weighted_mean(rows[:, end:], weights)
        return torch.cat([rule(rows[:, :end], weights, answers), tail])

    return update


def ties_aggregator(keep: float) -> Aggregator:
    """Return TIES merging of the client updates."""
    return Aggregator("ties", on_trained(lambda rows, weights, answers: ties(rows, weights, keep)))


def dare_aggregator(drop: float, seed: int) -> Aggregator:
    """Return DARE merging of the client updates; the dropped entries are drawn from (seed, round)."""

    def rule(rows: Tensor, weights: Tensor, answers: Answers) -> Tensor:
        return dare(rows, weights, drop, torch_stream(seed, "dare", answers.round))

    return Aggregator("dare", on_trained(rule))


def fisher_aggregator(samples: int) -> Aggregator:
    """Return Fisher merging; every client sends its diagonal Fisher information over `samples` of its own images."""

    def rule(rows: Tensor, weights: Tensor, answers: Answers) -> Tensor:
        information = torch.stack([evidence["fisher"] for evidence in answers.evidence])
        return fisher_mean(rows, weights, information)

    observation = Observe("fisher", (), {"fisher": ("trained",)}, {"samples": samples})
    return Aggregator("fisher", on_trained(rule), wants=(observation,))


def by_layer(
    scores: Callable[[Answers], Tensor], weigh: Callable[[Answers, Tensor], Tensor], freeze: float | None
) -> Aggregator:
    """Return the aggregator that weights each coordinate by the scores of its own layer.

    Args:
        scores: returns the clients' scores by layer, (m, layers).
        weigh: returns the client weights (m,) from the scores of one layer, (m, 1).
        freeze: a layer whose mean score lies more than this below 1 does not move in this round; None: all move.

    Batch-norm statistics are weighted by the client weights.
    """

    def update(answers: Answers, weights: Tensor) -> Tensor:
        """Return the update (k,), each layer's coordinates averaged with the weights of that layer."""
        layer_scores = scores(answers)
        share = normalised(weights)
        if freeze is None:
            frozen = torch.zeros(layer_scores.shape[1]).bool()
        else:
            frozen = 1 - share @ layer_scores > freeze
        layer_weights = [weigh(answers, column[:, None]) for column in layer_scores.T]
        result = weighted_mean(answers.updates, share)
        for layer, begin, end in answers.layers:
            if frozen[layer]:
                result[begin:end] = 0
                continue
            rows = [client_update[begin:end] for client_update in answers.updates]
            result[begin:end] = weighted_mean(rows, layer_weights[layer])
        return result

    return Aggregator("by_layer", update, instead="algorithm.by_layer=false")
