"""One body per client, mixed by a row-normalised similarity matrix (FedSHIBU, FedAvg+CRSM).

Personal vectors are written as offsets from a common anchor. New vectors are anchor + W @ offsets, so a constant
similarity gives every client the same bits, and the same bits as the plain mean: it *is* FedBABU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedgraft.combine.mean import CHUNK, accumulate, chunks, normalised
from fedgraft.errors import FedgraftError

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

    Rows of W that repeat (constant similarity, groups) are summed in client order like the mean; only rows that
    are all different take the faster matrix product, whose order of summation is the library's.
    """
    distinct, which = torch.unique(mixing, dim=0, return_inverse=True)
    if 1 < len(mixing) == len(distinct):
        return lambda pieces: (mixing @ pieces.to(torch.float64)).to(torch.float32)
    return lambda pieces: torch.stack([accumulate(pieces, row).to(torch.float32) for row in distinct])[which]


def mix(anchor: Tensor, offsets: Rows, mixing: Tensor, out: np.ndarray | None = None, chunk: int = CHUNK) -> Tensor:
    """New personal vectors anchor + W @ offsets, (rows of W, k), piece by piece; into `out` when it is given."""
    blend = blender(mixing)
    result = torch.empty(len(mixing), len(anchor)) if out is None else torch.from_numpy(out)
    for piece in chunks(len(anchor), chunk):
        result[:, piece] = anchor[piece] + blend(_piece(offsets, piece))
    return result


def moved(anchor: Tensor, offsets: Rows, weights: Tensor, chunk: int = CHUNK) -> Tensor:
    """The next anchor: anchor + weighted mean of the offsets, piece by piece, with the bits of `weighted_mean`."""
    shares, result = normalised(weights), torch.empty_like(anchor)
    for piece in chunks(len(anchor), chunk):
        result[piece] = anchor[piece] + accumulate(_piece(offsets, piece), shares).to(torch.float32)
    return result


def _piece(rows: Rows, piece: slice) -> Tensor:
    if callable(rows):
        return rows(piece)
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(rows[:, piece]))
    return rows[:, piece] if isinstance(rows, Tensor) else torch.stack([row[piece] for row in rows])


def create_store(path: Path, clients: int, anchor: Tensor) -> np.memmap:
    """A file of one personal vector per client, (K, k) float32, each starting at the anchor."""
    store = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(clients, len(anchor)))
    for row in range(clients):
        store[row] = anchor.numpy()
    return store


def open_store(path: Path) -> np.memmap:
    """The personal vectors in a file made by `create_store`, for reading and writing in place."""
    try:
        return np.lib.format.open_memmap(path, mode="r+")
    except (OSError, ValueError) as error:
        raise FedgraftError(f"the file of personal vectors {path} cannot be opened: {error}") from error


def remix(
    store: np.ndarray,
    present: Sequence[int],
    changes: Rows,
    anchor: Tensor,
    mixing: Tensor,
    weights: Tensor,
    absent: Literal["keep", "mean"] = "keep",
    chunk: int = CHUNK,
) -> Tensor:
    """One round on stored personal vectors, in place; returns the next anchor, anchor + weighted mean of the offsets.

    Clients in `present` (rows of `changes`, `mixing` and `weights`) get their mixture of (personal - anchor) + change.
    The others keep their vector, or with absent="mean" take the next anchor as in FedBABU. Since a constant mixture
    lands on the next anchor exactly, the next round's offsets are again the bare changes.
    """
    if not len(present) == len(mixing) == len(weights) or len(set(present)) != len(present):
        raise FedgraftError("a mixture needs one distinct client, one weight and one matrix row per change.")
    shares, rows, blend = normalised(weights), list(present), blender(mixing)
    others = sorted(set(range(len(store))) - set(rows)) if absent == "mean" else []
    following = torch.empty_like(anchor)
    for piece in chunks(len(anchor), chunk):
        offsets = torch.from_numpy(store[rows, piece]) - anchor[piece] + _piece(changes, piece)
        following[piece] = anchor[piece] + accumulate(offsets, shares).to(torch.float32)
        store[rows, piece] = (anchor[piece] + blend(offsets)).numpy()
        if others:
            store[others, piece] = following[piece].numpy()
    return following
