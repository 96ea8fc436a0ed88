"""Merging rules of the model-editing literature, on stacks of updates or task vectors (m, k) with weights (m,).

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

Merge = Callable[[Tensor, Tensor], Tensor]


@in_range
def ties(rows: Tensor, weights: Tensor, keep: Share = 0.2) -> Tensor:
    """Trim, elect sign, average what agrees; a coordinate on which nobody is left does not move."""
    share = normalised(weights)
    count = max(1, round(keep * rows.shape[1]))
    trimmed = torch.zeros_like(rows)
    for out, row in zip(trimmed, rows, strict=True):
        largest = row.abs().topk(count, sorted=False).indices
        out[largest] = row[largest]
    elected = accumulate(trimmed, share).sign()
    total, count_ = torch.zeros(2, rows.shape[1], dtype=torch.float64)
    for row, weight in zip(trimmed, share.tolist(), strict=True):
        agrees = (row.sign() == elected) & (row != 0)
        total += torch.where(agrees, row, 0).double() * weight
        count_ += agrees.double() * weight
    return torch.where(count_ > 0, total / count_, 0.0).float()


@in_range
def dare(rows: Tensor, weights: Tensor, drop: Rest, generator: torch.Generator) -> Tensor:
    """Each entry is dropped with probability `drop`, the rest divided by 1 - drop; then the weighted mean."""
    if drop == 0:
        return weighted_mean(rows, weights)
    kept = [torch.rand(len(row), generator=generator) >= drop for row in rows]
    return weighted_mean([torch.where(k, row / (1 - drop), 0.0) for k, row in zip(kept, rows, strict=True)], weights)


def fisher_mean(rows: Tensor, weights: Tensor, information: Tensor) -> Tensor:
    """Σ w F x / Σ w F by coordinate; where nobody has information the weighted mean."""
    share, known = normalised(weights), information.clamp(min=0)
    top = accumulate([f.double() * row.double() for f, row in zip(known, rows, strict=True)], share)
    bottom = accumulate(known, share)
    return torch.where(bottom > 0, top / bottom, weighted_mean(rows, share).double()).float()


def aligned_weights(updates: Tensor, weights: Tensor, steps: int = 1, rate: float = 1.0) -> Tensor:
    """FedAWA: weights λ = softmax(x) that lessen Σ λ_k (1 - cos(u_k, Σ_j λ_j u_j)), from the given ones.

    The least of it is one client with all the weight, which agrees with itself: hence a step or two, not many. All
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
    """A rule on the coordinates that train; statistics behind them take the plain mean."""

    def update(answers: Answers, weights: Tensor) -> Tensor:
        rows, end = torch.stack(list(answers.updates)), answers.trained or len(answers.updates[0])
        tail = weighted_mean(rows[:, end:], weights)
        return torch.cat([rule(rows[:, :end], weights, answers), tail])

    return update


def ties_aggregator(keep: float) -> Aggregator:
    """TIES of the clients' updates."""
    return Aggregator("ties", on_trained(lambda rows, weights, answers: ties(rows, weights, keep)), linear=False)


def dare_aggregator(drop: float, seed: int) -> Aggregator:
    """DARE of the clients' updates; what is dropped is drawn from (seed, round)."""

    def rule(rows: Tensor, weights: Tensor, answers: Answers) -> Tensor:
        return dare(rows, weights, drop, torch_stream(seed, "dare", answers.round))

    return Aggregator("dare", on_trained(rule), linear=False)


def fisher_aggregator(samples: int) -> Aggregator:
    """Fisher merging: every client shows its diagonal Fisher information after training, on so many own images."""

    def rule(rows: Tensor, weights: Tensor, answers: Answers) -> Tensor:
        return fisher_mean(rows, weights, torch.stack([e["fisher"] for e in answers.evidence]))

    shows = Observe("fisher", (), {"fisher": ("trained",)}, {"samples": samples})
    return Aggregator("fisher", on_trained(rule), linear=False, wants=(shows,))


def by_layer(
    scores: Callable[[Answers], Tensor], weigh: Callable[[Answers, Tensor], Tensor], freeze: float | None
) -> Aggregator:
    """Each coordinate weighed by the scores (m, layers) of the layer that shows its drift, statistics by the clients'.

    A layer whose mean score lies more than `freeze` below 1 does not move in this round.
    """

    def update(answers: Answers, weights: Tensor) -> Tensor:
        seen, share = scores(answers), normalised(weights)
        still = torch.zeros(seen.shape[1]).bool() if freeze is None else 1 - share @ seen > freeze
        shares = [weigh(answers, column[:, None]) for column in seen.T]
        result = weighted_mean(answers.updates, share)
        for layer, begin, end in answers.layers:
            rows = [update[begin:end] for update in answers.updates]
            result[begin:end] = 0 if still[layer] else weighted_mean(rows, shares[layer])
        return result

    return Aggregator("by_layer", update, linear=False, instead="algorithm.by_layer=false")
