"""One body per client, mixed by a row-normalised similarity matrix (FedSHIBU, FedAvg+CRSM).

Personal vectors are written as offsets from a common anchor. New vectors are anchor + W @ offsets, so a constant
similarity gives every client the same bits, and the same bits as the plain mean: it *is* FedBABU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedgraft.aggregate.mean import CHUNK, accumulate, chunks, normalised
from fedgraft.core.errors import FedgraftError

LEAST, CACHED = 1 << 12, 1 << 19
"""Coordinates of a piece at least, and floats of a piece of all clients together that stay near the processor."""

GROUPS = 32
"""Different rows of W up to which each is summed like the mean; beyond, a product is much faster."""

Rows = Tensor | np.ndarray | Sequence[Tensor] | Callable[[slice], Tensor]
"""m vectors of length k, as a stack, a memory-mapped array, a list, or a function that gives one piece of all."""


def mixing_matrix(similarity: Tensor, examples: Tensor | None = None) -> Tensor:
    """W with rows that sum to one: W_ij = S_ij n_j / sum_j S_ij n_j (n = 1 without `examples`), float64."""
    similarity = similarity.to(torch.float64)
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1] or not bool((similarity >= 0).all()):
        raise FedgraftError("a similarity matrix must be square with entries that are numbers of at least zero.")
    counts = torch.ones(len(similarity)) if examples is None else examples
    rows = []
    for row in similarity:
        if not 0 < float(row.max()) < torch.inf:
            raise FedgraftError("a client is similar to nobody, not even to itself; its row of the matrix is all zero.")
        # Divided by its largest entry first, a constant row becomes exact ones, and so exactly the weights of FedAvg.
        rows.append(normalised(row / row.max() * counts.to(torch.float64)))
    return torch.stack(rows)


def blender(mixing: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that makes W @ offsets of one piece of coordinates, (m, piece) -> (rows of W, piece) float32.

    Where there are few different rows (constant similarity, groups), they are summed in client order like the mean;
    else the faster matrix product makes them, whose order of summation is the library's. Equal rows of W give equal
    rows in both ways.
    """
    distinct, which = torch.unique(mixing, dim=0, return_inverse=True)
    if 1 < len(distinct) == len(mixing):
        every = mixing.to(torch.float32)
        return lambda pieces: every @ pieces
    if len(distinct) <= GROUPS:
        return lambda pieces: torch.stack([accumulate(pieces, row).to(torch.float32) for row in distinct])[which]
    some = distinct.to(torch.float32)
    return lambda pieces: (some @ pieces)[which]


def blended(
    anchor: Tensor, offsets: Rows, mixing: Tensor, mean: tuple[Tensor, Tensor] | None = None, chunk: int | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """New personal vectors anchor + W @ offsets, piece by piece: the coordinates, and their values (rows of W, piece).

    With `mean`, a pair (weights, out), each piece also fills `out` with the next anchor, anchor + weighted mean of the
    offsets, in the bits of `weighted_mean`: offsets may lie on a disk and are read once.
    """
    blend = blender(mixing)
    shares = None if mean is None else normalised(mean[0])
    for piece in chunks(len(anchor), chunk or min(CHUNK, max(LEAST, CACHED // len(mixing)))):
        rows = _piece(offsets, piece)
        if mean is not None and shares is not None:
            mean[1][piece] = anchor[piece] + accumulate(rows, shares).to(torch.float32)
        yield piece, blend(rows).add_(anchor[piece])


def mix(
    anchor: Tensor, offsets: Rows, mixing: Tensor, mean: tuple[Tensor, Tensor] | None = None, chunk: int | None = None
) -> Tensor:
    """What `blended` gives, put together in memory: (rows of W, k)."""
    result = torch.empty(len(mixing), len(anchor))
    for piece, values in blended(anchor, offsets, mixing, mean, chunk):
        result[:, piece] = values
    return result


def _piece(rows: Rows, piece: slice) -> Tensor:
    if callable(rows):
        return rows(piece)
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(rows[:, piece]))
    return rows[:, piece] if isinstance(rows, Tensor) else torch.stack([row[piece] for row in rows])
