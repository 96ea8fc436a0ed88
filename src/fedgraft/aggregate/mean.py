"""The weighted mean of updates (FedAvg, McMahan et al. 2017) and its relatives, streamed client by client.

Sums run in float64 in client order, coordinate by coordinate, so neither the number of threads nor the size of a
chunk can change a bit. Rounding once at the end gives three exact laws: updates that are all zero average to zero,
equal updates average to themselves, and one client's mean is its update, bit for bit.
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
    """Return consecutive slices that cover `size` coordinates."""
    return (slice(begin, min(begin + chunk, size)) for begin in range(0, size, chunk))


def normalised(weights: Tensor) -> Tensor:
    """Return the client weights as float64 summing to one; weights that already sum to one keep their bits."""
    weights = weights.detach().to(torch.float64).reshape(-1)
    if not len(weights):
        raise FedgraftError(
            "E-AGGREGATE-NO-UPDATES",
            "there is no client to average because every response was missing or refused",
            "sample more clients per round",
        )
    total = float(weights.sum())
    if not (math.isfinite(total) and total > 0 and bool((weights >= 0).all())):
        raise FedgraftError(
            "E-AGGREGATE-WEIGHTS",
            "client weights must be finite, none negative and not all zero",
            "check the weighting rule",
        )
    # Dividing twice would move the last bit, and with it the law that degenerate rules equal FedAvg exactly.
    if abs(total - 1.0) <= 1e-12:
        return weights
    return weights / total


def accumulate(rows: Iterable[Tensor], factors: Tensor) -> Tensor:
    """Return the sum of factor times row as float64, in the order of the rows; a row of factor zero is not read."""
    total: Tensor | None = None
    for row, factor in zip(rows, factors.tolist(), strict=True):
        if factor == 0.0:
            continue
        if total is None:
            total = row.to(torch.float64) * factor
            continue
        _add(total, row, factor)
    if total is None:
        raise FedgraftError(
            "E-AGGREGATE-NO-UPDATES",
            "there is nothing to sum because there is no vector or every weight is zero",
            "check the weighting rule and the number of clients",
        )
    return total


def _add(total: Tensor, row: Tensor, factor: float) -> None:
    """Add factor * row to `total` in place, converting through a small buffer (three times as fast as promotion)."""
    if row.shape != total.shape:
        raise FedgraftError(
            "E-AGGREGATE-SHAPES",
            f"an update of shape {tuple(row.shape)} cannot be added to a sum of shape {tuple(total.shape)}",
            "send updates of the same edit space from all clients",
        )
    buffer = torch.empty(min(CHUNK, len(total)), dtype=torch.float64)
    for piece in chunks(len(total)):
        wide = buffer[: piece.stop - piece.start].copy_(row[piece])
        total[piece].add_(wide, alpha=factor)


def weighted_mean(updates: Iterable[Tensor], weights: Tensor) -> Tensor:
    """Return the weighted mean of the client updates as float32; the weights are normalised over these clients."""
    return accumulate(updates, normalised(weights)).to(torch.float32)


def sum_unweighted(vectors: Iterable[Tensor]) -> Tensor:
    """Return the unweighted sum of auxiliary vectors (control variates and the like) as float32."""
    total: Tensor | None = None
    for vector in vectors:
        if total is None:
            total = vector.to(torch.float64, copy=True)
        else:
            _add(total, vector, 1.0)
    if total is None:
        raise FedgraftError(
            "E-AGGREGATE-NO-UPDATES",
            "there is nothing to sum because no client sent the auxiliary vector",
            "sample more clients per round",
        )
    return total.to(torch.float32)


def count_normalised(updates: Iterable[Tensor], masks: Iterable[Tensor], weights: Tensor) -> Tensor:
    """Return the mean under per-client masks: each coordinate is averaged over the clients whose mask contains it.

    Values outside a client's mask are ignored. The alternative, zero-filling, is `weighted_mean` of updates that are
    zero outside their masks; it shrinks coordinates that few clients chose.
    """
    total = torch.zeros(0, dtype=torch.float64)
    count = total  # by coordinate: weight of the clients whose mask contains it
    all_weights = 0.0
    for update, mask, weight in zip(updates, masks, normalised(weights).tolist(), strict=True):
        if not len(total):
            total, count = torch.zeros(2, len(update), dtype=torch.float64)
        total += torch.where(mask, update, 0).to(torch.float64) * weight
        count += mask.to(torch.float64) * weight
        all_weights += weight
    # Where every mask contains the coordinate, nothing is divided: equal masks give the plain mean, bit for bit.
    mean = torch.where(count == all_weights, total, torch.where(count > 0, total / count, 0.0))
    return mean.to(torch.float32)


def norm(vector: Tensor) -> float:
    """Return the Euclidean norm, summed in float64."""
    total = 0.0
    for piece in chunks(len(vector)):
        part = vector[piece].to(torch.float64)
        total += float(part @ part)
    return math.sqrt(total)


@dataclass(frozen=True)
class DriftReport:
    """How far each client moved from the common model, one float64 entry per client."""

    norms: Tensor
    """Norm of the update."""
    drifts: Tensor
    """Distance of the update to the combined one."""
    cosines: Tensor
    """Cosine to the combined update; 0 where one of the two is zero."""


def drift_report(updates: Iterable[Tensor], combined: Tensor) -> DriftReport:
    """Return norm of every update, and its distance and cosine to `combined`, reading each update once.

    `combined` is what the aggregation made of them, a mean or another rule's update. |c - a|^2 is
    |c|^2 - 2 c.a + |a|^2 in float64, exactly zero where c equals a.
    """
    short: Tensor | None = None
    if len(combined) <= CHUNK:  # one piece: convert it once; a long vector is converted piece by piece
        short = combined.to(torch.float64)

    def combined_piece(piece: slice) -> Tensor:
        """Return this piece of the combined update as float64."""
        if short is not None:
            return short
        return combined[piece].to(torch.float64)

    pieces = list(chunks(len(combined)))
    combined_square = 0.0
    for piece in pieces:
        a = combined_piece(piece)
        combined_square += float(a @ a)
    rows = []
    for update in updates:
        square = 0.0
        inner = 0.0
        for piece in pieces:
            a = combined_piece(piece)
            c = update[piece].to(torch.float64)
            square += float(c @ c)
            inner += float(c @ a)
        rows.append((square, inner))
    squares, inners = torch.tensor(rows, dtype=torch.float64).unbind(1)  # each (m,)
    norms = squares.sqrt()
    scale = norms * math.sqrt(combined_square)
    cosines = torch.where(scale > 0, inners / scale, 0.0).clamp(-1, 1)
    drifts = (squares - 2 * inners + combined_square).clamp(min=0).sqrt()
    return DriftReport(norms, drifts, cosines)
