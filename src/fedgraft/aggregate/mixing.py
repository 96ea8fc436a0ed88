"""Personalized models mixed by a row-normalised similarity matrix (FedSHIBU, FedAvg+CRSM).

Personal vectors are stored as offsets from a common anchor. New vectors are anchor + W @ offsets, so a constant
similarity gives every client the same bits, and the same bits as the plain mean: then it equals FedBABU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedgraft.aggregate.mean import CHUNK, accumulate, chunks, normalised
from fedgraft.core.errors import FedgraftError

SMALLEST_PIECE = 1 << 12
"""The smallest number of coordinates of a piece."""
CACHED_FLOATS = 1 << 19
"""Floats of a piece of all clients together that stay in the processor's cache."""

GROUPS = 32
"""Number of different rows of W up to which each is summed like the mean; beyond it a matrix product is faster."""

ClientVectors = Tensor | np.ndarray | Sequence[Tensor] | Callable[[slice], Tensor]
"""m vectors of length k: a stack, a memory-mapped array, a list, or a function that returns a piece of all of them."""


def mixing_matrix(similarity: Tensor, examples: Tensor | None = None) -> Tensor:
    """Return W with rows that sum to one: W_ij = S_ij n_j / sum_j S_ij n_j (n = 1 without `examples`), float64."""
    similarity = similarity.to(torch.float64)
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1] or not bool((similarity >= 0).all()):
        raise FedgraftError(
            "E-AGGREGATE-SIMILARITY-MATRIX",
            f"the similarity matrix of shape {tuple(similarity.shape)} is not square, or has negative or NaN entries",
            "return a square matrix of numbers of at least zero",
        )
    if examples is None:
        counts = torch.ones(len(similarity))
    else:
        counts = examples
    rows = []
    for client, row in enumerate(similarity):
        if not 0 < float(row.max()) < torch.inf:
            raise FedgraftError(
                "E-AGGREGATE-SIMILARITY-ROW",
                f"row {client} of the similarity matrix is all zero or not finite",
                "make each client similar at least to itself",
                row=client,
            )
        # Divided by its largest entry first, a constant row becomes exact ones, and so exactly the weights of FedAvg.
        rows.append(normalised(row / row.max() * counts.to(torch.float64)))
    return torch.stack(rows)


def blender(mixing: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that computes W @ offsets of one piece of coordinates, (m, piece) -> (rows of W, piece).

    If W has few different rows (constant similarity, groups), each is summed in client order like the mean; otherwise
    the faster matrix product is used, whose order of summation is the library's. Equal rows of W give equal rows of
    the result in both cases.
    """
    distinct, row_of_client = torch.unique(mixing, dim=0, return_inverse=True)
    if 1 < len(distinct) == len(mixing):
        all_rows = mixing.to(torch.float32)
        return lambda pieces: all_rows @ pieces
    if len(distinct) <= GROUPS:

        def sum_in_order(pieces: Tensor) -> Tensor:
            """Return the mixed rows of a piece, each distinct row of W summed in client order."""
            sums = torch.stack([accumulate(pieces, row).to(torch.float32) for row in distinct])
            return sums[row_of_client]

        return sum_in_order
    distinct_rows = distinct.to(torch.float32)
    return lambda pieces: (distinct_rows @ pieces)[row_of_client]


def blended(
    anchor: Tensor,
    offsets: ClientVectors,
    mixing: Tensor,
    mean: tuple[Tensor, Tensor] | None = None,
    chunk: int | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield new personal vectors anchor + W @ offsets piece by piece: the slice, and its values (rows of W, piece).

    `mixing` is W. `mean` is a pair (weights, out): each piece also fills `out` with the next anchor, anchor + weighted
    mean of the offsets, in the bits of `weighted_mean`. Offsets may be stored on disk; they are read once. `chunk` is
    the number of coordinates of a piece; None: as many as stay in the processor's cache.
    """
    blend = blender(mixing)
    if not chunk:
        chunk = min(CHUNK, max(SMALLEST_PIECE, CACHED_FLOATS // len(mixing)))
    shares: Tensor | None = None
    if mean is not None:
        shares = normalised(mean[0])
    for piece in chunks(len(anchor), chunk):
        rows = _piece(offsets, piece)
        if mean is not None and shares is not None:
            mean[1][piece] = anchor[piece] + accumulate(rows, shares).to(torch.float32)
        yield piece, blend(rows).add_(anchor[piece])


def mix(
    anchor: Tensor,
    offsets: ClientVectors,
    mixing: Tensor,
    mean: tuple[Tensor, Tensor] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return the new personal vectors anchor + W @ offsets as one tensor in memory, (rows of W, k).

    `mixing` is W. `mean` is a pair (weights, out): `out` is filled with the next anchor, anchor + weighted mean of the
    offsets. `chunk` is the number of coordinates of a piece in between; None: as many as stay in the processor's cache.
    """
    result = torch.empty(len(mixing), len(anchor))
    for piece, values in blended(anchor, offsets, mixing, mean, chunk):
        result[:, piece] = values
    return result


def _piece(rows: ClientVectors, piece: slice) -> Tensor:
    """Return the columns `piece` of all rows, (m, piece)."""
    if callable(rows):
        return rows(piece)
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(rows[:, piece]))
    if isinstance(rows, Tensor):
        return rows[:, piece]
    return torch.stack([row[piece] for row in rows])
