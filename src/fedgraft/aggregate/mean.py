"""The weighted mean of updates (FedAvg, McMahan et al. 2017) and its relatives, streamed client by client.

Sums run in float64 in the order the clients are given, coordinate by coordinate, so neither the number of threads
nor the size of a chunk can change a bit. Rounding once at the end gives three exact laws: updates that are all zero
average to zero, equal updates average to themselves, and one client's mean is its update, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError

CHUNK = 1 << 16  # coordinates worked on at a time: a float64 piece of this length stays in the processor's cache


def chunks(size: int, chunk: int = CHUNK) -> Iterator[slice]:
    """Consecutive slices that cover `size` coordinates."""
    return (slice(begin, min(begin + chunk, size)) for begin in range(0, size, chunk))


def normalised(weights: Tensor) -> Tensor:
    """Weights over the clients that are given, float64 and summing to one; already normalised ones keep their bits."""
    weights = weights.detach().to(torch.float64).reshape(-1)
    if not len(weights):
        raise FedgraftError("there is no client to average: every reply was missing or refused; ask more clients.")
    total = float(weights.sum())
    if not (math.isfinite(total) and total > 0 and bool((weights >= 0).all())):
        raise FedgraftError("client weights must be finite, none negative and not all zero; check the weighing rule.")
    # Dividing twice would move the last bit, and with it the promise that degenerate rules equal FedAvg exactly.
    return weights if abs(total - 1.0) <= 1e-12 else weights / total


def accumulate(rows: Iterable[Tensor], factors: Tensor) -> Tensor:
    """The sum of factor times row as float64, in the given order; a row whose factor is zero is not looked at."""
    total: Tensor | None = None
    for row, factor in zip(rows, factors.tolist(), strict=True):
        if factor == 0.0:
            continue
        if total is None:
            total = row.to(torch.float64) * factor
            continue
        _add(total, row, factor)
    if total is None:
        raise FedgraftError("there is nothing to sum: no vector was given, or every weight is zero.")
    return total


def _add(total: Tensor, row: Tensor, factor: float) -> None:
    """total += factor * row, widened in a small buffer (three times as quick as letting torch promote)."""
    if row.shape != total.shape:
        raise FedgraftError(f"an update of shape {tuple(row.shape)} cannot join a sum of {tuple(total.shape)}.")
    buffer = torch.empty(min(CHUNK, len(total)), dtype=torch.float64)
    for piece in chunks(len(total)):
        wide = buffer[: piece.stop - piece.start].copy_(row[piece])
        total[piece].add_(wide, alpha=factor)


def weighted_mean(updates: Iterable[Tensor], weights: Tensor) -> Tensor:
    """The mean update, float32; weights are normalised over exactly the clients that are given."""
    return accumulate(updates, normalised(weights)).to(torch.float32)


def sum_unweighted(vectors: Iterable[Tensor]) -> Tensor:
    """The plain sum of auxiliary vectors (control variates and the like), float32."""
    held = iter(vectors)
    first = next(held, None)
    if first is None:
        raise FedgraftError("there is nothing to sum: no client sent the auxiliary vector.")
    total = first.to(torch.float64, copy=True)
    for vector in held:
        _add(total, vector, 1.0)
    return total.to(torch.float32)


def count_normalised(updates: Iterable[Tensor], masks: Iterable[Tensor], weights: Tensor) -> Tensor:
    """Mean under per-client masks: each coordinate is divided by the weight of the clients that may move it.

    What a client sends outside its mask is ignored. The other choice, zero-filling, is `weighted_mean` of updates
    that are zero outside their masks; it shrinks coordinates that few clients chose.
    """
    total = count = torch.zeros(0, dtype=torch.float64)
    whole = 0.0
    for update, mask, weight in zip(updates, masks, normalised(weights).tolist(), strict=True):
        if not len(total):
            total, count = torch.zeros(2, len(update), dtype=torch.float64)
        total += torch.where(mask, update, 0).to(torch.float64) * weight
        count += mask.to(torch.float64) * weight
        whole += weight
    # Where everybody may move, nothing is divided: equal masks give the plain mean, bit for bit.
    return torch.where(count == whole, total, torch.where(count > 0, total / count, 0.0)).to(torch.float32)


def norm(vector: Tensor) -> float:
    """Euclidean length, summed in float64."""
    wide = (vector[piece].to(torch.float64) for piece in chunks(len(vector)))
    return math.sqrt(sum(float(part @ part) for part in wide))


@dataclass(frozen=True)
class DriftReport:
    """How far each client went, one float64 entry per client."""

    norms: Tensor
    """Length of the update."""
    drifts: Tensor
    """Distance of the update to the mean update."""
    cosines: Tensor
    """Cosine to the mean update; 0 where one of the two is zero."""


def drift_report(updates: Iterable[Tensor], mean: Tensor) -> DriftReport:
    """Norm, drift and cosine to the mean of every update, reading each once.

    |c - a|^2 is |c|^2 - 2 c.a + |a|^2 in float64, exactly zero where c equals a.
    """
    whole = mean.to(torch.float64) if len(mean) <= CHUNK else None  # a long mean is widened piece by piece
    pieces = [(piece, whole) for piece in chunks(len(mean))]
    size, rows = 0.0, []
    for piece, kept in pieces:
        a = mean[piece].to(torch.float64) if kept is None else kept
        size += float(a @ a)
    for update in updates:
        square = inner = 0.0
        for piece, kept in pieces:
            a = mean[piece].to(torch.float64) if kept is None else kept
            c = update[piece].to(torch.float64)
            square, inner = square + float(c @ c), inner + float(c @ a)
        rows.append((square, inner))
    squares, inners = torch.tensor(rows, dtype=torch.float64).unbind(1)  # each (m,)
    scale = squares.sqrt() * math.sqrt(size)
    cosines = torch.where(scale > 0, inners / scale, 0.0).clamp(-1, 1)
    return DriftReport(squares.sqrt(), (squares - 2 * inners + size).clamp(min=0).sqrt(), cosines)
